"""Copies of pages, by each form, on a device and within host memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from rigs.interpreted import interpreted_check, needs_triton
from torch.utils._python_dispatch import TorchDispatchMode

from kvcheck import kernels
from kvcheck.kernels import page_copy
from kvcheck.kernels.compilers import grid_of
from kvcheck.kernels.page_copy import (
    copy_block_torch,
    copy_rows,
    copy_rows_torch,
    gather_blocks,
    gather_rows,
    gather_rows_torch,
    scatter_blocks,
    scatter_rows,
    scatter_rows_torch,
)

Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
ORDERS = {"layer-first": (0, 1, 2, 3), "page-first": (1, 2, 0, 3), "page-first-direct": (1, 0, 2, 3)}
SHAPES = ((2, 5, 4, 3), (1, 4, 1, 1), (3, 3, 2, 259))  # [L, U, r, W]; the last row is wider than a kernel's block
PAGE, WORDS, PAGES = 4, 64, 12


def paged(shape: tuple[int, ...], order: tuple[int, ...], start: int, *, device: str = "cpu") -> torch.Tensor:
    """[L, U, r, W] words start, start + 1, ... over memory whose axes have that order."""
    words = torch.arange(start, start + torch.Size(shape).numel(), device=device)
    return words.view([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])


def rows_to_copy(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Target rows and source rows: not monotonic, not all of them, a source row twice."""
    count = shape[1] * shape[2]
    target = torch.tensor([*range(count - 1, 0, -2), 0])
    return target, (torch.arange(len(target)) * 3 + 1) % count


def check_row_copy(copy: Copy, shape: tuple[int, ...], orders: Sequence[str], *, devices: tuple[str, str]) -> None:
    """Every word of the target is the named one of the source or its old self, and the source is as it was."""
    target = paged(shape, ORDERS[orders[0]], 1 << 40, device=devices[0])
    source = paged(shape, ORDERS[orders[1]], 1 << 20, device=devices[1])
    if "cuda" in devices:
        target, source = (each if each.is_cuda else each.pin_memory() for each in (target, source))
    before, unchanged = target.cpu().tolist(), source.cpu().tolist()
    into, out_of = rows_to_copy(shape)
    index_device = "cuda" if "cuda" in devices else "cpu"
    copy(target, into[:0].to(index_device), source, out_of[:0].to(index_device))  # no rows, no change
    copy(target, into.to(index_device), source, out_of.to(index_device))
    if "cuda" in devices:
        torch.cuda.synchronize()
    rows = shape[2]
    expected = [[[*map(list, unit)] for unit in layer] for layer in before]
    for to, at in zip(into.tolist(), out_of.tolist(), strict=True):
        for layer in range(shape[0]):
            expected[layer][to // rows][to % rows] = unchanged[layer][at // rows][at % rows]
    assert target.cpu().tolist() == expected != before
    assert source.cpu().tolist() == unchanged


def check_row_copies(copy: Copy = copy_rows, devices: tuple[str, str] = ("cpu", "cpu")) -> int:
    """Every shape between memory of every two orders; returns how many."""
    compared = 0
    for shape, *orders in product(SHAPES, ORDERS, ORDERS):
        check_row_copy(copy, shape, orders, devices=devices)
        compared += 1
    return compared


@pytest.mark.parametrize(
    "devices",
    [
        ("cpu", "cpu"),
        *(pytest.param(each, marks=pytest.mark.gpu) for each in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda"))),
    ],
)
@pytest.mark.parametrize("copy", [copy_rows_torch, copy_rows])
def test_named_rows_are_copied_on_every_layer_and_nothing_else_is(copy: Copy, devices: tuple[str, str]) -> None:
    assert check_row_copies(copy, devices) == len(SHAPES) * len(ORDERS) ** 2


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernel_means_what_the_torch_form_means() -> None:
    compared, launches = interpreted_check(
        "kernels.test_page_copy:check_row_copies", "page_copy_triton:copy_rows_triton"
    )
    assert (compared, launches) == (len(SHAPES) * len(ORDERS) ** 2, 2 * compared)


class Crossings(TorchDispatchMode):
    """Notes the host side of every copy between two devices, and leaves such copies out."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled, and being left out of that would import the compiler first."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Addresses of the host's words, in order; a strided host side is an error."""
        device = (kwargs or {}).get("device")
        if func is torch.ops.aten._to_copy.default and device is not None and device != args[0].device:
            result = torch.empty(args[0].shape, dtype=args[0].dtype, device=device)
            self._note(args[0], result)
            return result
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            self._note(*args[:2])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _note(self, *sides: torch.Tensor) -> None:
        (host,) = [side for side in sides if side.device.type == "cpu"]
        assert host.is_contiguous(), f"torch would pack {tuple(host.shape)} of strides {host.stride()} at once"
        self.touched += range(host.data_ptr(), host.data_ptr() + host.numel() * 8, 8)


def strided_blocks() -> list[torch.Tensor]:
    """Whole memory, a slice of layers, a slice of rows, one column of pages, a permuted block."""
    memory = torch.arange(4 * 6 * 5).view(4, 6, 5)
    return [memory, memory[1:3], memory[:, 2:5], memory[:, 2:3], memory.permute(1, 0, 2)[1:4]]


def addresses(block: torch.Tensor) -> list[int]:
    base = block.data_ptr() - block.flatten()[0].item() * 8  # type: ignore[operator]
    return sorted(int(base) + int(word) * 8 for word in block.flatten().tolist())


@pytest.mark.parametrize("at", range(len(strided_blocks())))
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("device_is_strided", [True, False])
def test_a_block_crosses_in_contiguous_pieces_of_host_memory_each_word_once(
    at: int, to_host: bool, device_is_strided: bool
) -> None:
    host = strided_blocks()[at]
    device = torch.empty((*host.shape[:-1], 9 if device_is_strided else 5), dtype=torch.int64, device="meta")[..., :5]
    expected = addresses(host)
    with Crossings() as crossings:
        copy_block_torch(*((host, device) if to_host else (device, host)))
    assert sorted(crossings.touched) == expected


@pytest.mark.parametrize("at", range(4))
def test_gathered_and_scattered_rows_cross_in_contiguous_pieces_of_host_memory(at: int) -> None:
    host = strided_blocks()[at]
    device = torch.empty((host.shape[0], 8, 5), dtype=torch.int64, device="meta")
    rows = torch.zeros(host.shape[1], dtype=torch.int64, device="meta")
    expected = addresses(host)
    for copy in (gather_rows_torch, scatter_rows_torch):
        with Crossings() as crossings:
            copy(*((host, device) if copy is gather_rows_torch else (device, host)), rows)
        assert sorted(crossings.touched) == expected, copy.__name__


@pytest.mark.parametrize("at", range(len(strided_blocks())))
def test_a_block_on_one_device_is_copied_word_for_word(at: int) -> None:
    source = strided_blocks()[at]
    target = torch.zeros((*source.shape[:-1], 7), dtype=torch.int64)
    copy_block_torch(target[..., 1:6], source)
    assert torch.equal(target[..., 1:6], source)
    assert not target[..., 0].any() and not target[..., 6].any()


class Side:
    """What a copy asks of a tensor before it takes a kernel."""

    def __init__(self, *, is_cuda: bool = False, is_pinned: bool = False) -> None:
        self.is_cuda, self._is_pinned = is_cuda, is_pinned

    def is_pinned(self) -> bool:
        return self._is_pinned


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ((Side(is_cuda=True), Side(is_cuda=True)), True),
        ((Side(is_cuda=True), Side(is_pinned=True)), True),
        ((Side(is_cuda=True), Side()), False),
        ((Side(), Side()), False),
    ],
)
def test_a_kernel_takes_pinned_host_memory_and_no_pageable(
    sides: tuple[Any, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copy, "asks_triton", lambda *tensors: True)
    monkeypatch.setitem(sys.modules, "kvcheck.kernels.page_copy_triton", SimpleNamespace(IS_INTERPRETED=False))
    monkeypatch.setattr(kernels, "page_copy_triton", SimpleNamespace(IS_INTERPRETED=False), raising=False)
    assert (page_copy._kernels(*sides) is not None) == expected


def test_a_launch_beyond_a_device_is_refused_in_words() -> None:
    assert grid_of((1 << 31) - 1, 65_535, 65_535) == ((1 << 31) - 1, 65_535, 65_535)
    for grid in ((1 << 31,), (1, 65_536), (1, 1, 65_536)):
        with pytest.raises(ValueError, match=r"a device has [\d,]+: split the call"):
            grid_of(*grid)


def tokens_of(pages: list[int], tokens: int) -> torch.Tensor:
    """Token rows of pages in order, the last page cut."""
    rows = (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    return torch.from_numpy(rows[:tokens].astype(np.int64))


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(1 << 62, shape, generator=torch.Generator().manual_seed(seed))


@hypothesis.given(
    pages=st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=PAGES, unique=True),
    cut=st.integers(0, PAGE - 1),
    layers=st.integers(1, 3),
)
def test_blocks_move_what_rows_move(pages: list[int], cut: int, layers: int) -> None:
    rows = tokens_of(pages, len(pages) * PAGE - cut)
    pool, packed = numbers(layers, PAGES * PAGE, WORDS, seed=1), numbers(layers, len(rows), WORDS, seed=2)
    by_rows, by_blocks = packed.clone(), packed.clone()
    gather_rows_torch(by_rows, pool, rows)
    gather_rows(by_blocks, pool, rows)
    assert torch.equal(by_blocks, by_rows) and not torch.equal(by_rows, packed)
    by_rows, by_blocks = pool.clone(), pool.clone()
    scatter_rows_torch(by_rows, packed, rows)
    scatter_rows(by_blocks, packed, rows)
    assert torch.equal(by_blocks, by_rows) and not torch.equal(by_rows, pool)


@pytest.mark.parametrize("pages", [[7, 2, 9, 5, 1, 11], [3]])  # many blocks go layer by layer, few all at once
def test_pages_are_moved_as_blocks(pages: list[int]) -> None:
    pool, packed = numbers(2, PAGES * PAGE, WORDS, seed=3), numbers(2, len(pages) * PAGE, WORDS, seed=4)
    assert gather_blocks(packed, pool, tokens_of(pages, len(pages) * PAGE))
    assert torch.equal(packed[:, :PAGE], pool[:, pages[0] * PAGE : (pages[0] + 1) * PAGE])


def test_a_part_of_every_row_is_left_to_the_row_by_row_form() -> None:
    pool, packed = numbers(2, PAGES * PAGE, WORDS, seed=5), numbers(2, PAGE, WORDS // 2, seed=6)
    half, rows = pool[:, :, WORDS // 2 :], tokens_of([2], PAGE)
    assert not gather_blocks(packed, half, rows) and not scatter_blocks(half, packed, rows)
    gather_rows(packed, half, rows)
    assert torch.equal(packed, half[:, 2 * PAGE : 3 * PAGE])


@pytest.mark.parametrize("row", [-1, PAGES * PAGE])
def test_a_row_that_there_is_not_is_refused_before_any_is_written(row: int) -> None:
    pool, packed = numbers(2, PAGES * PAGE, WORDS, seed=8), numbers(2, 2, WORDS, seed=9)
    before = pool.clone(), packed.clone()
    for copy, pair in ((gather_rows, (packed, pool)), (scatter_rows, (pool, packed))):
        with pytest.raises(IndexError, match="expected 2 rows of 0 to 47"):
            copy(*pair, torch.tensor([0, row]))
    assert torch.equal(pool, before[0]) and torch.equal(packed, before[1])


def at_offset(words: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory that holds the words from so many words on, and the words in it."""
    memory = torch.full((words.numel() + 16,), -1, dtype=torch.int64)
    return memory, memory[offset : offset + words.numel()].view(words.shape).copy_(words)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    rows=st.lists(st.integers(0, 23), min_size=1, max_size=24, unique=True),
    wide=st.integers(1, 21),
    layers=st.integers(1, 3),
    offsets=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
def test_runs_past_the_caches_move_what_rows_move_and_touch_nothing_else(
    rows: list[int], wide: int, layers: int, offsets: tuple[int, int]
) -> None:
    page_copy_numba = pytest.importorskip("kvcheck.kernels.page_copy_numba")
    ids, places = np.array(rows), np.arange(len(rows))
    pool_memory, pool = at_offset(numbers(layers, 24, wide, seed=7), offsets[0])
    packed_memory, packed = at_offset(numbers(layers, len(rows) + 1, wide, seed=8), offsets[1])
    packed = packed[:, :-1]  # layers do not touch
    for memory, target, moves in ((packed_memory, packed, gather_rows_torch), (pool_memory, pool, scatter_rows_torch)):
        expected = memory.clone()
        twin = expected.as_strided(target.shape, target.stride(), target.storage_offset())
        if target is packed:
            moves(twin, pool, torch.from_numpy(ids))
            page_copy_numba.copy_runs_numba(packed, places, pool, ids)
        else:
            packed.bitwise_not_()
            moves(twin, packed, torch.from_numpy(ids))
            page_copy_numba.copy_runs_numba(pool, ids, packed, places)
        assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_types_that_numpy_does_not_know_are_moved_bit_for_bit(dtype: torch.dtype) -> None:
    pool = torch.arange(2 * 8 * 2048, dtype=torch.int16).view(dtype).view(2, 8, -1)
    packed, rows = pool.new_zeros(2, 4, pool.shape[2]), torch.tensor([4, 5, 2, 3])
    assert gather_blocks(packed, pool, rows)
    assert torch.equal(packed.view(torch.int16), pool[:, rows].view(torch.int16))
    back = torch.zeros_like(pool)
    assert scatter_blocks(back, packed, rows)
    assert torch.equal(back[:, rows].view(torch.int16), packed.view(torch.int16))


@pytest.mark.parametrize(
    ("packed", "other", "rows"),
    [
        *(
            (torch.zeros(2, 8, 512), other, torch.arange(8))
            for other in (torch.zeros(1, 8, 512), torch.zeros(2, 8, 256))
        ),
        (torch.zeros(2, 8, 512), torch.zeros(2, 8, 512).double(), torch.arange(8)),
        (torch.zeros(1, 3, 2), torch.zeros(1, 40, 2), torch.tensor([3, 9, 1])),  # small and scattered
    ],
)
def test_sides_of_other_layers_words_or_type_and_small_rows_are_left_to_torch(
    packed: torch.Tensor, other: torch.Tensor, rows: torch.Tensor
) -> None:
    assert not gather_blocks(packed, other, rows) and not scatter_blocks(other, packed, rows)
