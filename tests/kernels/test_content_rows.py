"""Comparing rows of content words: every form names the rows that differ, in any layout of memory."""

from __future__ import annotations

import random

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_numba, needs_triton

from kvcheck.kernels import compilers, content_rows
from kvcheck.kernels.content import as_signed, as_unsigned, differing_torch, mix64_int, unmix64_int, unmix64_torch
from kvcheck.kernels.content_rows import differing

FORMS = [
    pytest.param(1 << 40, False, "cpu", id="torch"),
    pytest.param(1000, False, "cpu", id="blocks"),
    pytest.param(300, False, "cpu", id="blocks of a row"),
    pytest.param(1000, True, "cpu", id="numba", marks=[needs_numba, pytest.mark.compiled]),
    pytest.param(512 << 10, False, "cuda", id="device", marks=pytest.mark.gpu),
]
"""Up to how many bytes the torch form is asked, whether numba is, and where the rows lie."""
SHAPES = ((0, 3), (3, 0), (1, 1), (5, 3), (7, 82), (130, 17))


def codes_and_mask(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = random.Random(f"{shape}")
    codes = [as_signed(mix64_int(1 << 40 | row)) for row in range(shape[0])]
    mask = [as_signed(drawn.getrandbits(64)) for _ in range(shape[1])]
    return torch.tensor(codes, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)


def low(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def written(
    codes: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype, *, device: str, strided: bool = False
) -> torch.Tensor:
    """Rows by the rule; strided: every other row and every third word of wider memory of poison."""
    words = [[code ^ word for word in mask.tolist()] for code in codes.tolist()]
    values = words if dtype is torch.int64 else [[low(word) for word in row] for row in words]
    rows = torch.tensor(values, dtype=dtype, device=device).view(len(codes), len(mask))
    if not strided:
        return rows
    memory = torch.full((2 * len(codes), 3 * len(mask)), -7, dtype=dtype, device=device)[::2, 1::3]
    memory.copy_(rows)
    return memory


def damages(shape: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Places to damage together: nothing, the corners, then several rows at once, out of order."""
    if 0 in shape:
        return [[]]
    last = (shape[0] - 1, shape[1] - 1)
    return [[], [(0, 0)], [last], [last, (shape[0] // 2, shape[1] // 2), (shape[0] // 2, last[1])]]


def check_rows(device: str) -> int:
    """Compare rows as they have to be, and with words damaged; returns how many verdicts were compared."""
    compared = 0
    for shape in SHAPES:
        codes, mask = codes_and_mask(shape)
        for dtype, strided in ((torch.int64, False), (torch.int64, True), (torch.int32, False)):
            for damaged in damages(shape):
                rows = written(codes, mask, dtype, device=device, strided=strided)
                for row, word in damaged:
                    rows[row, word] ^= 64
                found = differing(rows, codes.to(device), mask.to(device))
                assert found.dtype is torch.bool and found.shape == (shape[0],), (shape, dtype, strided)
                assert torch.nonzero(found).flatten().tolist() == sorted({row for row, _ in damaged})
                compared += 1
    return compared


def check_any_layout(dtype: torch.dtype, device: str) -> None:
    """Rows of any leading shape and strides: the two that are damaged differ."""
    codes, mask = codes_and_mask((24, 10))
    memory = torch.full((24, 12), -7, dtype=dtype, device=device)
    rows = memory[:, 1:11]
    rows.copy_(written(codes, mask, dtype, device=device))
    rows[[3, 17], [9, 0]] ^= 1
    codes, mask = codes.to(device), mask.to(device)
    found = differing(rows.view(4, 6, 10), codes.view(4, 6), mask)
    assert torch.nonzero(found.flatten()).flatten().tolist() == [3, 17]
    for seen in (rows, rows.contiguous(), rows.t().contiguous().t()):
        assert differing(seen, codes, mask).equal(differing_torch(seen, codes, mask))


def check_all(device: str = "cpu") -> int:
    for dtype in (torch.int64, torch.int32):
        check_any_layout(dtype, device)
    return check_rows(device)


COMPARED = 3 * sum(len(damages(shape)) for shape in SHAPES)


@pytest.mark.parametrize(("block_bytes", "by_numba", "device"), FORMS)
def test_rows_that_differ_are_named_word_by_word(
    block_bytes: int, by_numba: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_rows, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(content_rows, "asks_numba", lambda rows: by_numba and rows.is_contiguous())
    assert check_all(device) == COMPARED


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernel_means_what_the_torch_form_means() -> None:
    settings = {"content_rows_triton:BLOCK_WORDS": 128, "content_rows:BLOCK_BYTES": 0}
    compared, launches = interpreted_check(
        "kernels.test_content_rows:check_all", "content_rows_triton:differing_triton", settings=settings
    )
    assert (compared, launches) == (COMPARED, COMPARED - 6 + 8), "not for the 6 shapes without a word"


def test_an_owner_is_decoded_by_undoing_the_mix() -> None:
    values = [0, 1, (1 << 64) - 1, 1 << 63, 9 << 40 | 5, 0x9E3779B97F4A7C15]
    mixed = torch.tensor([as_signed(mix64_int(value)) for value in values])
    assert [as_unsigned(value) for value in unmix64_torch(mixed).tolist()] == values
    assert [unmix64_int(as_unsigned(value)) for value in mixed.tolist()] == values


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
