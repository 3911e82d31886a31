"""Pairing, grouping, sharding and blocks, each against a plain reference written here with loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.errors import LayoutMismatch, LengthMismatch
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.pools.shape import shard_range
from kvcheck.core.cache.transfer.blocks import (
    PageRun,
    RowLayout,
    ShardSlice,
    byte_blocks,
    group_contiguous,
    pair_pages,
    shard_slices,
)

SIZES = (1, 2, 4, 8)
WHOLE = ShardSlice(source_rank=0, target_rank=0, source_first=0, target_first=0, count=1)
POISON = 0xA5


def run_of(first: int, count: int, base: int) -> PageRun:
    """Physical pages that go down while logical pages go up, so that no two rules give the same pairs by luck."""
    return PageRun(first, np.array([base - at for at in range(count)], dtype=np.int64))


def ids(*values: int) -> IndexArray:
    return np.array(values, dtype=np.int64)


def plainly_paired(source: PageRun, target: PageRun, needed: range) -> list[list[int]] | None:
    """Pairs page by page, or None where the ends disagree."""
    ends = [{run.first + at: int(page) for at, page in enumerate(run.pages)} for run in (source, target)]
    if any(page >= needed.stop for end in ends for page in end) or any(
        page not in end for end in ends for page in needed
    ):
        return None
    return [[ends[0][page], ends[1][page]] for page in needed]


@pytest.mark.parametrize("source_first", range(4))
@pytest.mark.parametrize("target_first", range(4))
def test_every_pair_of_lengths_is_paired_by_logical_page_or_refused(source_first: int, target_first: int) -> None:
    judged: Counter[str] = Counter()
    for lengths in product(range(9), repeat=2):
        source, target = run_of(source_first, lengths[0], 50), run_of(target_first, lengths[1], 90)
        for start, count in product(range(6), range(9)):
            needed = range(start, start + count)
            expected = plainly_paired(source, target, needed)
            judged["refused" if expected is None else "paired"] += 1
            if expected is None:
                with pytest.raises(
                    LengthMismatch, match=f"source has {lengths[0]} pages.*target has {lengths[1]} pages"
                ):
                    pair_pages(source, target, needed=needed, what="w")
                continue
            pairs = pair_pages(source, target, needed=needed, what="w")
            assert pairs.tolist() == expected
            assert (pairs.shape, pairs.dtype) == ((len(needed), 2), np.int64)
    assert judged["paired"] + judged["refused"] == 81 * 54
    assert min(judged["paired"], judged["refused"]) > 30


def test_a_page_run_owns_its_pages_and_cannot_be_changed() -> None:
    given_pages = ids(3, 4)
    run = PageRun(2, given_pages)
    given_pages[0] = 9
    assert (run.pages.tolist(), run.stop) == ([3, 4], 4)
    with pytest.raises(ValueError, match="read-only"):
        run.pages[0] = 9
    pairs = pair_pages(run, run, needed=range(2, 4), what="w")
    pairs[0] = 9
    assert run.pages.tolist() == [3, 4]


def plainly_grouped(pairs: list[list[int]]) -> list[list[int]]:
    runs: list[list[int]] = []
    for source, target in pairs:
        if runs and source == runs[-1][0] + runs[-1][2] and target == runs[-1][1] + runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([source, target, 1])
    return runs


PAGES = 12


@st.composite
def page_pairs(draw: st.DrawFn) -> list[list[int]]:
    """Pairs of pages in random orders in which neighbours are frequent; no page twice on one side."""
    sides = []
    for _ in range(2):
        cut = draw(st.integers(1, PAGES))
        order = [*range(cut, PAGES + 1), *range(1, cut)]
        for one, other in draw(st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(0, PAGES - 1)), max_size=4)):
            order[one], order[other] = order[other], order[one]
        sides.append(order)
    count = draw(st.integers(0, PAGES))
    return [[source, target] for source, target in zip(*sides, strict=True)][:count]


@given(page_pairs())
def test_runs_are_maximal_and_give_back_the_pairs(pairs: list[list[int]]) -> None:
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    runs = group_contiguous(array)
    assert runs.dtype == np.int64
    assert runs.tolist() == plainly_grouped(pairs)
    assert [[source + at, target + at] for source, target, count in runs.tolist() for at in range(count)] == pairs


def moved(blocks: IndexArray, source: np.ndarray, target: np.ndarray, written: np.ndarray) -> None:
    """Move bytes as the blocks say, and count how often each byte of the target is written."""
    for at, to, size in blocks.tolist():
        assert 0 <= at <= at + size <= source.size and 0 <= to <= to + size <= target.size
        target.reshape(-1)[to : to + size] = source.reshape(-1)[at : at + size]
        written.reshape(-1)[to : to + size] += 1


TP_PAIRS = [*product(SIZES, repeat=3), (6, 3, 2), (6, 2, 3), (12, 4, 6), (3, 6, 9), (3, 9, 6), (2, 8, 6)]


@pytest.mark.parametrize(("shards", "sources", "targets"), TP_PAIRS)
def test_replicas_share_the_work_and_neighbours_are_one_slice(shards: int, sources: int, targets: int) -> None:
    kept = [[*shard_range(shards, rank, sources)] for rank in range(sources)]
    slices = shard_slices(shards, sources, targets)
    served = Counter(
        (kept[each.source_rank][each.source_first + at], each.source_rank)
        for each in slices
        for at in range(each.count)
    )
    for shard in range(shards):
        loads = [served[shard, rank] for rank in range(sources) if shard in kept[rank]]
        assert max(loads) - min(loads) <= 1, f"replicas of shard {shard} serve {loads} targets"
    assert len(slices) == len({(each.source_rank, each.target_rank) for each in slices})
    if sources == targets:
        assert [each.source_rank for each in slices] == [*range(targets)], "equal sizes: each rank to its own number"


LAYERS, PER_UNIT, SHARD_BYTES = 2, 2, 8
TOKENS_OF = ids(4, 5, 2, 1)  # source pages of four logical pages: a run of two, then alone
TOKENS_AT = ids(2, 3, 4, 1)


def dealt(row: np.ndarray, shards: int, rank: int, size: int, *, units: int, pages: IndexArray) -> np.ndarray:
    """A rank's memory, poison but for its shards of the global rows [LAYERS, tokens, shards * SHARD_BYTES]."""
    keeps = shard_range(shards, rank, size)
    memory = np.full((LAYERS, (units + 1) * PER_UNIT, len(keeps) * SHARD_BYTES), POISON, dtype=np.uint8)
    for layer, token, (at, shard) in product(range(LAYERS), range(row.shape[1]), [*enumerate(keeps)]):
        place = int(pages[token // PER_UNIT]) * PER_UNIT + token % PER_UNIT
        memory[layer, place, at * SHARD_BYTES : (at + 1) * SHARD_BYTES] = row[
            layer, token, shard * SHARD_BYTES : (shard + 1) * SHARD_BYTES
        ]
    return memory


@pytest.mark.parametrize(("shards", "sources", "targets"), TP_PAIRS)
def test_the_right_bytes_arrive_between_every_pair_of_tp_sizes(shards: int, sources: int, targets: int) -> None:
    tokens = PER_UNIT * len(TOKENS_OF)
    row = np.random.default_rng(shards).integers(0, 160, (LAYERS, tokens, shards * SHARD_BYTES), dtype=np.uint8)
    have = [dealt(row, shards, rank, sources, units=5, pages=TOKENS_OF) for rank in range(sources)]
    want = [dealt(row, shards, rank, targets, units=4, pages=TOKENS_AT) for rank in range(targets)]
    got = [np.full_like(memory, POISON) for memory in want]
    written = [np.zeros(memory.shape, dtype=np.int64) for memory in want]
    runs = group_contiguous(np.column_stack((TOKENS_OF, TOKENS_AT)))
    for piece in shard_slices(shards, sources, targets):
        source, target = (
            RowLayout(
                layers=LAYERS,
                rows=memory.shape[1],
                row_bytes=memory.shape[2],
                rows_per_unit=PER_UNIT,
                shards=memory.shape[2] // SHARD_BYTES,
            )
            for memory in (have[piece.source_rank], want[piece.target_rank])
        )
        blocks = byte_blocks(source, target, runs, piece)
        single = np.column_stack((TOKENS_OF, TOKENS_AT, np.ones_like(TOKENS_OF)))
        assert byte_blocks(source, target, single, piece).tolist() == blocks.tolist(), "runs that were not merged yet"
        whole = piece.count == source.shards == target.shards
        assert len(blocks) == LAYERS * (len(runs) if whole else tokens)
        moved(blocks, have[piece.source_rank], got[piece.target_rank], written[piece.target_rank])
    for rank in range(targets):
        assert np.array_equal(got[rank], want[rank])
        assert np.array_equal(written[rank], want[rank] != POISON)


LAYOUT = RowLayout(layers=2, rows=10, row_bytes=32, rows_per_unit=2, shards=2)  # units 1 to 4


ONE = np.array([[1, 1, 1]])
REFUSED = [
    partial(PageRun, -1, ids(1)),
    *(partial(PageRun, 0, pages) for pages in (np.ones((1, 2), dtype=np.int64), np.array([1.0]), np.array([True]))),
    *(partial(shard_slices, *each) for each in ((8, 3, 1), (8, 1, 3), (2, 3, 2), (0, 1, 1), (1, 0, 1), (1, 1, 0))),
    *(partial(replace, LAYOUT, **{name: 0}) for name in ("layers", "rows", "row_bytes", "rows_per_unit", "shards")),
    *(partial(replace, LAYOUT, **change) for change in ({"rows": 9}, {"shards": 3})),
    *(
        partial(byte_blocks, LAYOUT, replace(LAYOUT, **change), ONE, WHOLE)
        for change in ({"layers": 3}, {"rows_per_unit": 1}, {"row_bytes": 64}, {"shards": 1})
    ),
    *(
        partial(byte_blocks, LAYOUT, LAYOUT, ONE, replace(WHOLE, source_first=source, target_first=target, count=count))
        for source, target, count in ((2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 1, 2), (0, 0, 0))
    ),
]


@pytest.mark.parametrize("call", REFUSED, ids=[f"{each.func.__name__}-{at}" for at, each in enumerate(REFUSED)])
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(LayoutMismatch):
        call()


def test_no_runs_are_no_blocks_and_pools_may_have_other_sizes() -> None:
    assert byte_blocks(LAYOUT, LAYOUT, np.empty((0, 3), dtype=np.int64), WHOLE).shape == (0, 3)
    more = replace(LAYOUT, rows=40)
    assert len(byte_blocks(LAYOUT, more, np.array([[1, 19, 1]]), replace(WHOLE, count=2))) == 2


BIG = (1 << 63) - 1


@pytest.mark.parametrize("run", [(0, 1), (5, 1), (4, 2), (1, 5), (-1, 2), (1, 0), (1, -1), (BIG, 1), (2, BIG)])
@pytest.mark.parametrize("end", ["source", "target"])
def test_an_id_outside_the_pool_is_refused_at_either_end(end: str, run: tuple[int, int]) -> None:
    first, count = run
    layouts = {"source": replace(LAYOUT, rows=1 << 40), "target": replace(LAYOUT, rows=1 << 40), end: LAYOUT}
    runs = ids(1, 1, 1, *((first, 9, count) if end == "source" else (9, first, count))).reshape(2, 3)
    who = end if 0 < count < 1 << 39 else "source"  # a count outside both is reported once, for the source
    with pytest.raises(LayoutMismatch, match=f"{who} has the units 1 to "):
        byte_blocks(layouts["source"], layouts["target"], runs, WHOLE)
