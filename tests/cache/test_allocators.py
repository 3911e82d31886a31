"""Allocators: which id comes next, what may be freed, and that free and live ids are all ids."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.errors import FreeInFlight, LengthMismatch
from kvcheck.core.cache.pools.allocator import IdAllocator, PageAllocator, SlotAllocator

ALLOCATORS: dict[str, Callable[[int], IdAllocator]] = {
    "slots": lambda count: SlotAllocator("slots", count=count),
    "slots from 0": lambda count: SlotAllocator("slots", count=count, first=0),
    "pages": lambda count: PageAllocator("pages", count=count, page_size=4),
}


@pytest.mark.parametrize("kind", ALLOCATORS)
@given(calls=st.lists(st.tuples(st.sampled_from(["take", "free", "pin", "unpin"]), st.integers(0, 7)), max_size=40))
def test_free_and_live_ids_are_all_ids_whatever_is_called(kind: str, calls: list[tuple[str, int]]) -> None:
    allocator = ALLOCATORS[kind](6)
    first = 0 if kind == "slots from 0" else 1
    free, live, pinned = list(range(first, first + 6)), [], []  # type: tuple[list[int], list[int], list[int]]
    for verb, n in calls:
        ids = np.array(live[:n], dtype=np.int64)
        if verb == "take":
            got = allocator.allocate(n, 1)
            assert (got is None) == (n > len(free))
            taken = [] if got is None else got.tolist()
            assert taken == free[: len(taken)]
            free, live = free[len(taken) :], live + taken
        elif verb == "free" and set(ids.tolist()) & set(pinned):
            with pytest.raises(FreeInFlight):
                allocator.free(ids)
        elif verb == "free":
            allocator.free(ids)
            free = free + live[:n] if kind.startswith("slots") else live[:n] + free
            live = live[n:]
        elif verb == "pin":
            allocator.pin(ids)
            pinned += ids.tolist()
        elif pinned:
            allocator.unpin(np.array([pinned.pop(0)], dtype=np.int64))
        else:
            with pytest.raises(LengthMismatch, match="not pinned"):
                allocator.unpin(np.array([first], dtype=np.int64))
        assert (allocator.available, allocator.live) == (len(free), len(live))
    everything_left = allocator.allocate(len(free), 2)
    assert everything_left is not None
    assert sorted([*everything_left.tolist(), *live]) == list(range(first, first + 6))


@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize("by", [0, 1, 4, 6, 13])
def test_a_turned_allocator_hands_out_the_same_ids_in_another_order(kind: str, by: int) -> None:
    usual, turned = ALLOCATORS[kind](6), ALLOCATORS[kind](6)
    turned.turn(by)
    plain, other = usual.allocate(6, 1), turned.allocate(6, 1)
    assert plain is not None and other is not None
    assert other.tolist() == [*plain[by % 6 :].tolist(), *plain[: by % 6].tolist()]
    assert (turned.available, turned.live) == (0, 6)
