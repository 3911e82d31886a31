"""Filling and verifying rows: every form gives the words of the rule, names the first wrong one, digests them all.

Invariants:
- What is expected is worked out word by word in plain integers; the code under test only makes the words to damage.
- Forms that split the work are tested round their splits, and so is the order in which they find things.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_numba, needs_triton

from kvcheck.kernels import compilers, content_rows
from kvcheck.kernels.content import as_signed, as_unsigned, differing_torch, mix64_int, unmix64_int, unmix64_torch
from kvcheck.kernels.content_rows import RowsSeen, differing, fill, fill_torch, verify, verify_torch
from kvcheck.kernels.digest import digest_int

FORMS = [
    pytest.param((fill_torch, verify_torch, False), id="torch"),
    pytest.param((fill, verify, False), id="blocks"),
    pytest.param((fill, verify, True), id="numba", marks=[needs_numba, pytest.mark.compiled]),
]
SHAPES = ((0, 3), (3, 0), (1, 1), (5, 3), (7, 82), (130, 17))
KEY, FIRST = 0xFEEDFACE12345678, 1 << 33
NOTHING = [-1, -1, 0, 0]
Forms = tuple[Callable[..., torch.Tensor | None], Callable[..., RowsSeen], bool]


@pytest.fixture(params=FORMS)
def forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forms]:
    """Fill and verify by one way of working, in blocks of a few rows where it has blocks."""
    monkeypatch.setattr(content_rows, "asks_numba", lambda rows: request.param[2] and rows.is_contiguous())
    monkeypatch.setattr(content_rows, "BLOCK_BYTES", 1000)
    return request.param  # type: ignore[no-any-return]


def codes_and_mask(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as requests have them, so that a word decodes to 1 << 40 | row, and any mask."""
    drawn = random.Random(f"{shape}")
    codes = [as_signed(mix64_int(1 << 40 | row)) for row in range(shape[0])]
    mask = [as_signed(drawn.getrandbits(64)) for _ in range(shape[1])]
    return torch.tensor(codes, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)


def expected_words(codes: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Rows by the rule, as signed integers."""
    return [[code ^ word for word in mask.tolist()] for code in codes.tolist()]


def halves(rows: list[list[int]]) -> list[list[int]]:
    """The low 32 bits of each word, signed."""
    return [[(word & 0xFFFFFFFF) - ((word & 0x80000000) << 1) for word in row] for row in rows]


def fresh(shape: tuple[int, int], dtype: torch.dtype, *, device: str, strided: bool = False) -> torch.Tensor:
    """Rows of poison; strided: every other row and every third word of wider memory."""
    if not strided:
        return torch.full(shape, -7, dtype=dtype, device=device)
    return torch.full((2 * shape[0], 3 * shape[1]), -7, dtype=dtype, device=device)[::2, 1::3]


def check_rows(forms: tuple[Callable[..., Any], Callable[..., RowsSeen]], *, device: str) -> int:
    """Fill, then verify as written and with words damaged; returns how many verdicts were compared."""
    fill_rows, verify_rows = forms
    compared = 0
    for shape in SHAPES:
        codes, mask = codes_and_mask(shape)
        words = expected_words(codes, mask)
        there = (codes.to(device), mask.to(device))
        for dtype, strided in ((torch.int64, False), (torch.int64, True), (torch.int32, False)):
            rows = fresh(shape, dtype, device=device, strided=strided)
            key = KEY if dtype is torch.int64 else None
            total = fill_rows(rows, *there, key=key, first=FIRST)
            assert rows.cpu().tolist() == (words if key else halves(words)), (shape, dtype, strided)
            wanted = digest_int([word for row in words for word in row], key=KEY, first=FIRST)
            assert total is None if key is None else as_unsigned(int(total)) == wanted
            again = fresh(shape, dtype, device=device, strided=strided)
            assert fill_rows(again, *there) is None
            assert again.equal(rows)
            clean = verify_rows(rows, *there, key=key, first=FIRST)
            assert (clean.differing.tolist(), clean.first.tolist()) == ([False] * shape[0], NOTHING)
            assert clean.digest is None if key is None else as_unsigned(int(clean.digest)) == wanted
            compared += 1
            for damaged in damages(shape):
                compared += check_damage(verify_rows, rows.clone(), there, damaged)
    return compared


def damages(shape: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Places to damage together: the corners, then several rows at once, out of order."""
    if 0 in shape:
        return []
    last = (shape[0] - 1, shape[1] - 1)
    return [[(0, 0)], [last], [last, (shape[0] // 2, shape[1] // 2), (shape[0] // 2, last[1])]]


def check_damage(
    verify_rows: Callable[..., RowsSeen],
    rows: torch.Tensor,
    there: tuple[torch.Tensor, torch.Tensor],
    damaged: list[tuple[int, int]],
) -> int:
    """Rows with the words of another owner in those places are named, and the first word's owner is."""
    code = as_signed(mix64_int(9 << 40 | 5))
    for row, word in damaged:
        rows[row, word] = (int(there[1][word]) ^ code) if rows.dtype is torch.int64 else int(rows[row, word]) ^ 64
    seen = verify_rows(rows, *there, key=KEY if rows.dtype is torch.int64 else None)
    row, word = min(damaged)
    found = int(rows[row, word])
    tag = 9 << 40 | 5 if rows.dtype is torch.int64 else 0
    assert seen.first.tolist() == [row, word, found, tag]
    assert torch.nonzero(seen.differing).flatten().tolist() == sorted({row for row, _ in damaged})
    if seen.digest is not None:
        assert as_unsigned(int(seen.digest)) == digest_int(rows.flatten().tolist(), key=KEY)
    return 1


def check_any_layout(dtype: torch.dtype, device: str) -> None:
    """Rows of any leading shape and strides: the two that are damaged differ, and nothing beside rows is written."""
    codes, mask = (each.to(device) for each in codes_and_mask((24, 10)))
    memory = fresh((24, 12), dtype, device=device)
    rows = memory[:, 1:11]
    fill(rows, codes, mask)
    assert memory[:, 0].eq(-7).all() and memory[:, 11].eq(-7).all()
    rows[[3, 17], [9, 0]] ^= 1
    found = differing(rows.view(4, 6, 10), codes.view(4, 6), mask)
    assert torch.nonzero(found.flatten()).flatten().tolist() == [3, 17]
    for seen in (rows, rows.contiguous(), rows.t().contiguous().t()):
        assert differing(seen, codes, mask).equal(differing_torch(seen, codes, mask))


COMPARED = 3 * len(SHAPES) + 9 * (len(SHAPES) - 2)


def test_rows_are_filled_verified_and_digested_word_by_word(forms: Forms) -> None:
    assert check_rows(forms[:2], device="cpu") == COMPARED


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernel_means_what_the_torch_forms_mean() -> None:
    said = interpreted_check(
        """
        import torch
        from kernels.test_content_rows import check_any_layout, check_rows
        from kvcheck.kernels import content_rows, content_rows_triton as kernels

        calls = []
        for name in ("fill_triton", "verify_triton"):
            by_kernel = getattr(kernels, name)
            setattr(kernels, name, lambda *args, by_kernel=by_kernel: (calls.append(args), by_kernel(*args))[1])
        kernels.BLOCK_WORDS = 128
        compared = check_rows((content_rows.fill, content_rows.verify), device="cpu")
        assert len(calls) >= 2 * compared / 3, "the kernels did not run"
        content_rows.BLOCK_BYTES, before = 0, len(calls)
        check_any_layout(torch.int64, "cpu")
        check_any_layout(torch.int32, "cpu")
        assert len(calls) == before + 10, "the kernels did not run"
        print(compared)
        """
    )
    assert said == [str(COMPARED)]


@pytest.mark.gpu
@pytest.mark.parametrize("forms", [(fill_torch, verify_torch), (fill, verify)])
def test_a_device_fills_and_verifies_like_the_host(
    forms: tuple[Callable[..., Any], Callable[..., RowsSeen]],
) -> None:
    assert check_rows(forms, device="cuda") == COMPARED
    check_any_layout(torch.int64, "cuda")
    check_any_layout(torch.int32, "cuda")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("block_bytes", [0, 300, 1 << 20])
def test_rows_of_any_leading_shape_and_stride_are_told_apart(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_rows, "BLOCK_BYTES", block_bytes)
    check_any_layout(dtype, "cpu")


def test_an_owner_is_decoded_by_undoing_the_mix() -> None:
    values = [0, 1, (1 << 64) - 1, 1 << 63, 9 << 40 | 5, 0x9E3779B97F4A7C15]
    mixed = torch.tensor([as_signed(mix64_int(value)) for value in values])
    assert [as_unsigned(value) for value in unmix64_torch(mixed).tolist()] == values
    assert [unmix64_int(as_unsigned(value)) for value in mixed.tolist()] == values


def test_misshapen_rows_and_digests_of_halves_are_refused() -> None:
    codes, mask = codes_and_mask((4, 3))
    for form in (fill_torch, fill, verify_torch, verify):
        with pytest.raises(AssertionError, match=r"rows are \[T, W\]"):
            form(torch.zeros(3, 4, dtype=torch.int64), codes, mask)
        with pytest.raises(AssertionError, match="64-bit"):
            form(torch.zeros(4, 3, dtype=torch.int32), codes, mask, key=1)
        with pytest.raises(AssertionError, match="integer"):
            form(torch.zeros(4, 3), codes, mask)


def test_a_compiler_is_asked_only_where_it_pays_or_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_is_installed", lambda name: True)
    monkeypatch.delitem(compilers.sys.modules, "numba", raising=False)
    monkeypatch.delitem(compilers.sys.modules, "triton", raising=False)
    few, many = torch.zeros(8), torch.zeros(compilers.MANY_BYTES // 4)
    assert [compilers.asks_numba(each) for each in (few, many, many.view(2, -1).t())] == [False, True, False]
    assert not compilers.asks_triton(few, many)
    monkeypatch.setitem(compilers.sys.modules, "numba", compilers)
    monkeypatch.setitem(compilers.sys.modules, "triton", compilers)
    assert compilers.asks_numba(few) and compilers.asks_triton(few)
