"""The seal: only a whole and untouched row parses, and it parses to what was packed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.transfer.seal import SEAL_BYTES, Seal, known_words, parse, sealed_words
from kvcheck.kernels.content import as_signed

TOP = (1 << 64) - 1
U64 = st.integers(0, TOP) | st.sampled_from((0, 1, 1 << 63, TOP))
SEAL = Seal(room=0x1122334455667788, generation=3, bytes=1 << 20, digest=0xFEDCBA9876543210)


def words_of(seal: Seal) -> torch.Tensor:
    return seal.packed().view(torch.int64)


@given(U64, U64, U64, U64)
def test_every_seal_comes_back_whatever_its_values(room: int, generation: int, size: int, digest: int) -> None:
    seal = Seal(room=room, generation=generation, bytes=size, digest=digest)
    row = seal.packed()
    assert (row.dtype, row.shape) == (torch.uint8, (64,))
    assert parse(row) == seal
    row.zero_()
    assert parse(seal.packed()) == seal, "a row is the caller's own"


@given(U64, U64, U64, U64)
@example(0, 0, 0, 0)
@example(TOP, TOP, TOP, TOP)
def test_a_seal_that_is_made_on_a_device_has_the_same_bytes(room: int, generation: int, size: int, digest: int) -> None:
    """What is known before is made first, whatever digest the seal has in it."""
    seal = Seal(room=room, generation=generation, bytes=size, digest=digest)
    known = torch.from_numpy(known_words(seal))
    before = known.clone()
    made = sealed_words(known, torch.tensor(as_signed(digest)))
    assert torch.equal(made.view(torch.uint8), seal.packed())
    assert torch.equal(known, before), "it is used again"
    assert torch.equal(sealed_words(known, None).view(torch.uint8), replace(seal, digest=0).packed())


@pytest.mark.parametrize("seal", [SEAL, Seal(room=0, generation=0, bytes=0, digest=0)])
def test_every_flip_of_a_single_bit_is_seen(seal: Seal) -> None:
    for byte in range(SEAL_BYTES):
        for bit in range(8):
            row = seal.packed()
            row[byte] ^= 1 << bit
            assert parse(row) is None, (byte, bit)


BEFORE = {
    "zeros": torch.zeros(SEAL_BYTES, dtype=torch.uint8),
    "poison": torch.full((SEAL_BYTES,), 0xA5, dtype=torch.uint8),
    "the last user": Seal(room=5, generation=2, bytes=77, digest=88).packed(),
    "the same room, a generation ago": replace(SEAL, generation=2).packed(),
    "the same but for the digest": replace(SEAL, digest=SEAL.digest ^ 1).packed(),
}


@pytest.mark.parametrize("name", BEFORE)
def test_no_torn_row_parses_wherever_it_is_torn(name: str) -> None:
    """Arrived is a prefix, or a suffix: what is left of the row is what lay there before."""
    old, new = BEFORE[name], SEAL.packed()
    for cut in range(SEAL_BYTES + 1):
        for row in (torch.cat((new[:cut], old[cut:])), torch.cat((old[:cut], new[cut:]))):
            whole = [each for each in (old, new) if torch.equal(row, each)]
            assert parse(row) == (parse(whole[0]) if whole else None), cut
    assert parse(new) == SEAL


def test_any_set_of_arrived_words_is_no_seal_until_all_are_there() -> None:
    old, new = words_of(Seal(room=5, generation=2, bytes=77, digest=88)), words_of(SEAL)
    for arrived in range(256):
        picked = torch.tensor([bool(arrived >> word & 1) for word in range(8)])
        row = torch.where(picked, new, old)
        expected = next((parse(each.view(torch.uint8)) for each in (new, old) if torch.equal(row, each)), None)
        assert parse(row.view(torch.uint8)) == expected, f"{arrived:08b}"


def test_swapped_moved_dropped_and_doubled_words_are_seen() -> None:
    whole = words_of(SEAL).tolist()
    assert len(set(whole)) == 8
    for one, other in combinations(range(8), 2):
        swapped = [*whole]
        swapped[one], swapped[other] = whole[other], whole[one]
        doubled = [*whole]
        doubled[other] = whole[one]
        dropped = [*whole[:one], *whole[one + 1 :], 0]
        moved = [*whole[:one], *whole[one + 1 :]]
        moved.insert(other, whole[one])
        for damaged in (swapped, doubled, dropped, moved):
            assert parse(torch.tensor(damaged).view(torch.uint8)) is None, (one, other)


def test_the_layout_is_what_the_other_end_was_told() -> None:
    row = bytes(SEAL.packed().tolist())
    assert row[:8] == b"kvc-seal"
    fields = [int.from_bytes(row[at : at + 8], "little") for at in range(8, 56, 8)]
    assert fields == [1, SEAL.room, SEAL.generation, SEAL.bytes, SEAL.digest, 0]


@pytest.mark.parametrize("field", ["room", "generation", "bytes", "digest"])
@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_a_value_that_does_not_fit_is_refused(field: str, value: int) -> None:
    with pytest.raises(LayoutMismatch, match=f"unsigned 64-bit.*{value}"):
        replace(SEAL, **{field: value})


@pytest.mark.parametrize(
    "row", [*(torch.zeros(size, dtype=torch.uint8) for size in (63, 65)), torch.zeros(64, dtype=torch.int8)]
)
def test_a_row_of_another_size_or_type_is_refused(row: torch.Tensor) -> None:
    with pytest.raises(LayoutMismatch, match="64 uint8"):
        parse(row)
