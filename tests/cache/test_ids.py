"""What allocators and index tables refuse: ids that are no ids, ids of others, places outside a row.

Invariants:
- A refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcheck.core.base.errors import DoubleFree, ForeignAccess, FreeInFlight, LengthMismatch, TargetError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.pools.allocator import PageAllocator
from kvcheck.core.cache.pools.request_table import IndexTable


def ids(*values: int) -> IndexArray:
    """Ids as the product takes them."""
    return np.array(values, dtype=np.int64)


# Allocators


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda each: each.allocate(-1, 1), LengthMismatch),
        (lambda each: each.pin(ids(-1)), DoubleFree),
        (lambda each: each.pin(ids(99)), DoubleFree),
        (lambda each: each.unpin(ids(-1)), LengthMismatch),
        (lambda each: each.free(np.array([1.0])), LengthMismatch),
        (lambda each: each.free(np.array([[1, 2]])), LengthMismatch),
        (lambda each: each.free(np.array([True])), LengthMismatch),
        (lambda each: each.check_owned(ids(1, 3), 1), ForeignAccess),
        (lambda each: each.check_owned(ids(0), 1), ForeignAccess),
    ],
)
def test_an_allocator_refuses_what_is_no_list_of_the_callers_ids(
    call: Callable[[PageAllocator], object], error: type[TargetError]
) -> None:
    allocator = PageAllocator("full", count=4, page_size=4)
    assert allocator.allocate(2, 1) is not None and allocator.allocate(2, 2) is not None
    with pytest.raises(error, match="full: "):
        call(allocator)
    allocator.check_owned(ids(1, 2), 1)
    allocator.free(ids(1, 2, 3, 4))
    assert allocator.available == 4


def test_an_id_that_is_pinned_twice_in_one_call_stays_pinned_after_one_unpin() -> None:
    allocator = PageAllocator("full", count=4, page_size=4)
    assert allocator.allocate(4, 1) is not None
    allocator.pin(ids(2, 2))
    allocator.unpin(ids(2))
    with pytest.raises(FreeInFlight):
        allocator.free(ids(2))
    with pytest.raises(LengthMismatch, match="not pinned"):
        allocator.unpin(ids(2, 2))
    allocator.unpin(ids(2))
    allocator.free(ids(2))
    assert allocator.available == 1


def test_a_use_ends_when_it_is_reached_or_dropped_and_not_before() -> None:
    allocator = PageAllocator("full", count=4, page_size=4)
    assert allocator.allocate(4, 1) is not None
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


# Tables


@pytest.mark.parametrize(
    "call",
    [
        lambda table: table.write(1, 2, ids(7, 7, 7, 7)),
        lambda table: table.write(1, -1, ids(7)),
        lambda table: table.write(4, 0, ids(7)),
        lambda table: table.write(-1, 0, ids(7)),
        lambda table: table.assign(ids(-1), ids(9)),
        lambda table: table.assign(ids(4), ids(9)),
        lambda table: table.assign(ids(1, 2), ids(9)),
    ],
)
def test_a_write_that_leaves_its_row_is_refused_and_writes_nothing(call: Callable[[IndexTable], None]) -> None:
    backend = EagerBackend()
    table = IndexTable("t", rows=3, columns=4, backend=backend, lane=backend.lane("forward"))
    with pytest.raises(LengthMismatch, match="table t: expected"):
        call(table)
    assert not table.read_view().any()
    table.write(3, 1, ids(5, 6, 7))
    assert table.read_view().tolist() == [[0] * 4, [0] * 4, [0] * 4, [0, 5, 6, 7]]
