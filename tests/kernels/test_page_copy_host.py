"""Host rows by blocks of neighbours: the same bytes as row by row, whatever the ids, and nothing else touched."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from kvcheck.kernels.page_copy import (
    gather_blocks,
    gather_rows,
    gather_rows_torch,
    scatter_blocks,
    scatter_rows,
    scatter_rows_torch,
)

PAGE, WORDS, PAGES = 4, 64, 12


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
