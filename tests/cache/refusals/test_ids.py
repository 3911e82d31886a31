"""What allocators and index tables refuse: ids that are no ids, ids of others, places outside a row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcheck.core.base.errors import DoubleFree, ForeignAccess, FreeInFlight, LengthMismatch, TargetError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.pools.allocator import FEW, IdAllocator, PageAllocator
from kvcheck.core.cache.pools.request_table import IndexTable

ME, OTHER = 7, 8


def ids(*values: int) -> IndexArray:
    return np.array(values, dtype=np.int64)


# Allocators


def taken(first: int) -> IdAllocator:
    """Five ids, counted from `first`: 0 held, 1 pinned, 2 free, 3 another request's, 4 held."""
    made = IdAllocator("full", count=5, first=first)
    for owner in (ME, ME, ME, OTHER, ME):
        assert made.allocate(1, owner) is not None
    made.free(ids(first + 2))
    made.pin(ids(first + 1))
    return made


def refused(allocator: IdAllocator, call: Callable[[], object], error: type[TargetError]) -> None:

    def state() -> object:
        owners = [allocator.owner_of(unit) for unit in range(-1, 7)]
        return allocator.available, allocator.live, allocator._pins.tolist(), owners

    before = state()
    with pytest.raises(error):
        call()
    assert state() == before


METHODS: dict[str, tuple[type[TargetError], Callable[[IdAllocator, IndexArray], object]]] = {
    "free": (DoubleFree, IdAllocator.free),
    "check_freeable": (DoubleFree, IdAllocator.check_freeable),
    "check_live": (ForeignAccess, IdAllocator.check_live),
    "check_owned": (ForeignAccess, lambda each, wrong: each.check_owned(wrong, ME)),
    "pin": (DoubleFree, IdAllocator.pin),
    "hold": (DoubleFree, lambda each, wrong: each.hold(wrong, lambda: True)),
}
WRONG: dict[str, Callable[[int], IndexArray]] = {
    "a free id": lambda first: ids(first, first + 2),
    "below the first": lambda first: ids(first - 1),
    "minus one": lambda first: ids(-1),
    "above the last": lambda first: ids(first, first + 5),
}
SHAPELESS: dict[str, IndexArray] = {
    "floats": np.array([1.0]),
    "a mask": np.ones(5, dtype=bool),
    "int32": np.array([1], dtype=np.int32),
    "a single id": np.array(1),
    "two rows": np.array([[1], [4]]),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("method", METHODS)
def test_no_method_takes_a_list_with_an_id_that_is_not_the_callers(method: str, wrong: str, first: int) -> None:
    allocator, (error, call) = taken(first), METHODS[method]
    refused(allocator, lambda: call(allocator, WRONG[wrong](first)), error)


@pytest.mark.parametrize("shape", SHAPELESS)
@pytest.mark.parametrize("method", ["check_live", "check_owned", "pin", "hold"])
def test_plain_indexing_would_take_what_is_no_list_of_ids(method: str, shape: str) -> None:
    allocator, (_, call) = taken(1), METHODS[method]
    refused(allocator, lambda: call(allocator, SHAPELESS[shape]), LengthMismatch)


@pytest.mark.parametrize("wrong", [-1, 2, FEW + 4])
def test_a_long_list_is_looked_at_as_a_short_one(wrong: int) -> None:
    allocator = IdAllocator("full", count=FEW + 4, first=0)
    assert allocator.allocate(FEW + 4, ME) is not None
    allocator.check_live(np.arange(FEW + 4))
    allocator.free(ids(2))
    with pytest.raises(ForeignAccess):
        allocator.check_live(np.append(np.arange(3, FEW + 4), wrong))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda each, first: each.allocate(-1, ME), LengthMismatch),
        (lambda each, first: each.free(ids(first, first)), DoubleFree),
        (lambda each, first: each.free(ids(first, first + 1)), FreeInFlight),
        (lambda each, first: each.check_freeable(ids(first + 1)), FreeInFlight),
        (lambda each, first: each.check_owned(ids(first, first + 3), ME), ForeignAccess),
        (lambda each, first: each.check_owned(ids(first + 2), ME), ForeignAccess),
        (lambda each, first: each.check_owner(first + 3, ME), ForeignAccess),
        (lambda each, first: each.check_owner(first + 2, ME), ForeignAccess),
        (lambda each, first: each.check_owner(-1, ME), ForeignAccess),
        (lambda each, first: each.check_owner(first + 5, ME), ForeignAccess),
        (lambda each, first: each.unpin(ids(first + 1, first)), LengthMismatch),
        (lambda each, first: each.unpin(ids(first + 1, first + 1)), LengthMismatch),
        (lambda each, first: each.unpin(ids(-1)), LengthMismatch),
        (lambda each, first: each.unpin(ids(first + 5)), LengthMismatch),
    ],
)
def test_an_allocator_refuses_what_is_not_the_callers(
    call: Callable[[IdAllocator, int], object], error: type[TargetError], first: int
) -> None:
    allocator = taken(first)
    refused(allocator, lambda: call(allocator, first), error)


@pytest.mark.parametrize("first", [0, 1])
def test_an_allocator_accepts_the_first_the_last_and_no_id(first: int) -> None:
    allocator, edges = taken(first), ids(first, first + 4)
    allocator.check_live(edges)
    allocator.check_owned(edges, ME)
    allocator.check_owner(first, ME)
    allocator.check_owner(first + 4, ME)
    assert [allocator.owner_of(unit) for unit in (-1, first, first + 2, first + 4, first + 5)] == [
        *(None, ME, None, ME, None)
    ]
    allocator.pin(edges)
    allocator.unpin(edges)
    for call in (allocator.free, allocator.check_freeable, allocator.unpin):
        call(ids())
    assert allocator.allocate(2, ME) is None
    nothing, last = allocator.allocate(0, ME), allocator.allocate(1, ME)
    assert nothing is not None and last is not None and (len(nothing), last.tolist()) == (0, [first + 2])
    allocator.free(edges)
    assert allocator.available == 2


def test_a_use_ends_when_it_is_reached_or_dropped_and_not_before() -> None:
    allocator = PageAllocator("full", count=4, page_size=4)
    assert allocator.allocate(4, ME) is not None
    reached: list[bool] = []
    first = allocator.hold(ids(1, 2), lambda: bool(reached))
    second = allocator.hold(ids(2, 3), lambda: False)
    with pytest.raises(FreeInFlight, match=r"while pinned: \[1\]"):
        allocator.free(ids(1))
    reached.append(True)
    with pytest.raises(FreeInFlight, match=r"while pinned: \[2\]"):
        allocator.free(ids(1, 2))
    allocator.drop(first)  # has ended already: nothing is undone twice
    allocator.free(ids(1))
    allocator.drop(second)
    allocator.free(ids(2, 3))
    assert allocator.available == 3


def test_a_use_is_of_the_ids_that_were_named() -> None:
    allocator, named = taken(1), ids(1)
    use = allocator.hold(named, lambda: False)
    named[0] = 5
    allocator.drop(use)
    allocator.free(ids(1))


# Tables


@pytest.mark.parametrize(
    "call",
    [
        lambda table: table.write(1, 2, ids(7, 7, 7, 7)),
        lambda table: table.write(1, 3, ids(7, 7)),
        lambda table: table.write(1, -1, ids(7)),
        lambda table: table.write(1, -1, ids(7, 7)),
        lambda table: table.write(4, 0, ids(7)),
        lambda table: table.write(4, 0, ids()),
        lambda table: table.write(-1, 0, ids(7)),
        lambda table: table.assign(ids(-1), ids(9)),
        lambda table: table.assign(ids(4), ids(9)),
        lambda table: table.assign(ids(1, 2), ids(9)),
        lambda table: table.assign(ids(1), ids(9, 9)),
    ],
)
def test_a_write_that_leaves_its_row_is_refused_and_writes_nothing(call: Callable[[IndexTable], None]) -> None:
    backend = EagerBackend()
    table = IndexTable("t", rows=3, columns=4, backend=backend, lane=backend.lane("forward"))
    with pytest.raises(LengthMismatch):
        call(table)
    assert not table.read_view().any()
    table.write(3, 1, ids(5, 6, 7))
    table.write(1, 4, ids())
    table.assign(ids(0, 3), ids(8, 9))
    assert table.read_view().tolist() == [[8, 0, 0, 9], [0] * 4, [0] * 4, [0, 5, 6, 7]]
