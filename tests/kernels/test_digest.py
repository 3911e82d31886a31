"""The digest: equal to its formula everywhere, and different after everything that can happen to words on their way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rigs.interpreted import interpreted_check, needs_numba, needs_triton

from kvcheck.kernels.content import as_signed, as_unsigned
from kvcheck.kernels.digest import FEW_WORDS, combined, digest, digest_blocks, digest_int, digest_torch, start_of

U64 = (1 << 64) - 1
KEYS = (0, 1, 2, 1 << 63, U64)
WORDS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from((0, 1, -1)), max_size=40)
LEG = [0, 0, 7, 7, -1, 1 << 62, -(1 << 63), (1 << 63) - 1, 5, 0, 0]
Digest = Callable[..., torch.Tensor]


def by_formula(words: list[int], key: int, first: int = 0) -> int:
    """The documented sum with the published finaliser, in plain integers."""

    def finalised(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    total = 0
    for at, word in enumerate(words):
        place = finalised((finalised(key ^ 0xD1B54A32D192ED03) + (first + at) * 0x9E3779B97F4A7C15) % 2**64)
        total += finalised((word + place) % 2**64)
    return total % 2**64


def by_numba(words: torch.Tensor, *, key: int, first: int = 0) -> torch.Tensor:
    """The compiled form, whatever the size."""
    from kvcheck.kernels.digest_numba import digest_numba

    return digest_numba(words, start_of(key, first))


def seen(words: list[int], key: int = 3, first: int = 0) -> int:
    """The digest of words on this machine, unsigned."""
    return as_unsigned(int(digest_torch(torch.tensor(words, dtype=torch.int64), key=key, first=first)))


@given(WORDS, st.sampled_from(KEYS) | st.integers(0, U64), st.integers(0, 1 << 50))
def test_all_forms_mean_the_formula(words: list[int], key: int, first: int) -> None:
    tensor = torch.tensor(words, dtype=torch.int64)
    expected = by_formula(words, key, first)
    assert digest_int(words, key=key, first=first) == expected
    assert digest_int([word & U64 for word in words], key=key, first=first) == expected
    for form in (digest_torch, digest_blocks, digest):
        found = form(tensor, key=key, first=first)
        assert (found.shape, found.dtype) == ((), torch.int64)
        assert as_unsigned(int(found)) == expected


@given(WORDS, st.integers(0, 40), st.integers(0, 40))
def test_digests_of_parts_add_up_in_any_order(words: list[int], one: int, other: int) -> None:
    cuts = [0, *sorted(min(cut, len(words)) for cut in (one, other)), len(words)]
    parts = [
        digest_torch(torch.tensor(words[start:stop], dtype=torch.int64), key=9, first=start)
        for start, stop in pairwise(cuts)
    ]
    assert as_unsigned(int(combined(torch.stack(parts[::-1])))) == by_formula(words, 9)


def with_word(at: int, *words: int, over: int = 1) -> list[int]:
    """The leg with those words over one of its own."""
    return [*LEG[:at], *words, *LEG[at + over :]]


PLACES = range(len(LEG))
DAMAGED: dict[str, list[list[int]]] = {
    "one bit": [with_word(at, as_signed((LEG[at] & U64) ^ (1 << bit))) for at in PLACES for bit in range(64)],
    "another's word": [with_word(to, LEG[source]) for to in PLACES for source in PLACES],
    "two that changed places": [
        [*LEG[:one], LEG[two], *LEG[one + 1 : two], LEG[one], *LEG[two + 1 :]] for one, two in combinations(PLACES, 2)
    ],
    "left out": [with_word(at) for at in PLACES],
    "twice": [with_word(at, LEG[at], LEG[at]) for at in PLACES],
    "shifted": [LEG[1:] + LEG[:1]],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_of_a_word_is_seen(name: str) -> None:
    for words in DAMAGED[name]:
        assert (seen(words) != seen(LEG)) == (words != LEG), words


def test_zeros_are_counted_and_placed() -> None:
    assert len({seen([0] * count) for count in range(50)}) == len({seen(LEG, first=first) for first in range(50)}) == 50


@pytest.mark.parametrize("keys", [(0, 1), (1, 2), (5, 1 << 63), (U64 - 1, U64)])
def test_words_moved_between_legs_are_seen_although_keys_are_neighbours(keys: tuple[int, int]) -> None:
    """If a key were a mere offset, word i of the second leg would count like word i + 1 of the first."""
    one, other = LEG, [31, 0, 0, 9, 7]

    def both(first: list[int], second: list[int]) -> int:
        return (seen(first, keys[0]) + seen(second, keys[1])) & U64

    whole = both(one, other)
    assert both(other, one) != whole, "the legs changed places"
    for at in range(len(one)):
        for to in range(len(other) + 1):
            moved = both(one[:at] + one[at + 1 :], [*other[:to], one[at], *other[to:]])
            assert moved != whole, (at, to)
    for at in range(len(one)):
        for to in range(len(other)):
            exchanged = both([*one[:at], other[to], *one[at + 1 :]], [*other[:to], one[at], *other[to + 1 :]])
            assert (exchanged != whole) == (one[at] != other[to]), (at, to)


def check_digest(form: Digest = digest, device: str = "cpu") -> int:
    """`form` against the formula for counts round a kernel's block; returns how many were compared."""
    compared = 0
    for count in (0, 1, FEW_WORDS, FEW_WORDS + 1, 255, 1023, 1024, 1025, 3000):
        words = torch.randint(-(1 << 62), 1 << 62, (count, 2), generator=torch.Generator().manual_seed(count))
        words[::3] = 0
        for key, first in ((0, 0), (U64, 1), (77, 1 << 45)):
            for column in (words[:, 0], words[:, 1].contiguous(), words.view(-1)[1 : count + 1]):
                found = as_unsigned(int(form(column.to(device), key=key, first=first)))
                assert found == by_formula(column.tolist(), key, first), (count, key, first)
                compared += 1
    return compared


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernel_means_the_formula() -> None:
    ran = interpreted_check("kernels.test_digest:check_digest", "digest_triton:partial_digests_triton")
    assert ran == [81, 81]


@pytest.mark.parametrize("block_words", [64, 32768])
@pytest.mark.parametrize(
    ("form", "device"),
    [
        *((form, "cpu") for form in (digest_torch, digest, digest_blocks)),
        pytest.param(by_numba, "cpu", marks=[needs_numba, pytest.mark.compiled]),
        *(pytest.param(form, "cuda", marks=pytest.mark.gpu) for form in (digest_torch, digest)),
    ],
)
def test_the_forms_agree_round_their_blocks_on_every_device(
    form: Digest, device: str, block_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcheck.kernels.digest.BLOCK_WORDS", block_words)
    assert check_digest(form, device) == 81
