"""What pools and offloads refuse: holdings, pages and values that are not the caller's, or not its any more.

Invariants:
- A refused call changes nothing; what is compared afterwards is memory, tables and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcheck.core.base.errors import (
    DoubleFree,
    ForeignAccess,
    FreeInFlight,
    LayoutMismatch,
    LengthMismatch,
    TargetError,
)
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import POISON_BYTE
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import Choice, Goal, SimulatedBackend
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.pool import Given, Holding, KVPool, PoolSizes
from kvcheck.core.workload.shapes import TINY_SHAPES, shape

PAGES = 16


class NothingUnasked:
    """Completes nothing before the host waits for it."""

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        """The first, where there is no way round it."""
        return None if may_pause else 0


def ids(*values: int) -> IndexArray:
    """Ids as the product takes them."""
    return np.array(values, dtype=np.int64)


def pool_on(backend: EagerBackend | SimulatedBackend, name: str = "llama-3-tiny") -> tuple[KVPool, Offload]:
    """A pool with room for a few requests, and its offload."""
    preset = shape(name)
    window_pages = PAGES if preset.window_layers else 0
    sizes = PoolSizes(pages=PAGES, requests=3, max_tokens=8 * preset.page_size, window_pages=window_pages)
    pool = KVPool(preset, sizes, backend=backend)
    return pool, Offload(pool, backend)


def holding_of(pool: KVPool, request: int, pages: int = 2) -> Holding:
    """A holding whose pages are full of committed tokens."""
    holding = pool.open(request)
    assert holding is not None
    assert pool.grow(holding, pages * pool.page_size, query=0)
    pool.commit(holding, pages * pool.page_size)
    return holding


def state_of(pool: KVPool) -> list[object]:
    """Counts, tables and words of a pool, as plain values."""
    return [
        {name: (each.available, each.live) for name, each in pool.allocators.items()},
        {name: table.read_view().tolist() for name, table in pool.tables.items()},
        {(space, each.name): pool.sets[space].write_view(each.name).tolist() for space, each in pool.buffers()},
    ]


# Holdings


@pytest.mark.parametrize("name", TINY_SHAPES)
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda pool, holding: pool.close(holding), DoubleFree),
        (lambda pool, holding: pool.grow(holding, 3 * pool.page_size, query=0), ForeignAccess),
        (lambda pool, holding: pool.evict_window(holding, 2 * pool.page_size), ForeignAccess),
        (lambda pool, holding: pool.adopt(holding, ids(), ids()), ForeignAccess),
        (lambda pool, holding: Offload(pool, pool.backend).save(holding), ForeignAccess),
        (lambda pool, holding: pool.close(replace(holding, is_open=True)), ForeignAccess),
    ],
)
def test_a_closed_holding_is_refused_though_its_ids_live_on_with_another(
    name: str, call: Callable[[KVPool, Holding], object], error: type[TargetError]
) -> None:
    pool, _ = pool_on(EagerBackend(), name)
    keeps_rows = [pool.open(8), pool.open(9)]  # so that the closed one's row and slot are next
    holding = holding_of(pool, 1)
    pool.close(holding)
    heir = holding_of(pool, 2)
    assert (heir.row, set(heir.pages.tolist())) == (holding.row, set(holding.pages.tolist()))
    before = state_of(pool)
    with pytest.raises(error, match="request 1"):
        call(pool, holding)
    assert state_of(pool) == before
    assert all(keeps_rows) and heir.is_open


@pytest.mark.parametrize(
    ("pages", "error"),
    [
        (ids(0, 1), ForeignAccess),
        (ids(99), ForeignAccess),
        (ids(9), ForeignAccess),
        (ids(*range(1, 10)), LengthMismatch),
    ],
)
def test_a_holding_adopts_live_pages_only_and_no_more_than_a_request_may_have(
    pages: IndexArray, error: type[TargetError]
) -> None:
    pool, _ = pool_on(EagerBackend())
    count = 9 if error is LengthMismatch else 8
    assert pool.allocators["full"].allocate(count, 77) is not None
    holding = pool.open(1)
    assert holding is not None
    before = state_of(pool)
    with pytest.raises(error):
        pool.adopt(holding, pages, ids())
    assert state_of(pool) == before
    assert (len(holding.pages), holding.shared, holding.committed) == (0, 0, 0)


def test_a_holding_with_pages_of_its_own_adopts_none() -> None:
    pool, _ = pool_on(EagerBackend())
    holding = holding_of(pool, 1)
    with pytest.raises(LengthMismatch, match="expected an empty holding"):
        pool.adopt(holding, holding.pages, ids())


def test_closing_does_not_free_a_page_that_another_request_holds() -> None:
    pool, _ = pool_on(EagerBackend())
    first, second = holding_of(pool, 1), holding_of(pool, 2)
    first.pages = np.concatenate((first.pages, second.pages[:1]))
    before = state_of(pool)
    with pytest.raises(ForeignAccess, match="was used for request 1 and belongs to request 2"):
        pool.close(first)
    assert state_of(pool) == before


# Pages in flight


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_what_a_save_reads_cannot_be_freed_before_it_is_saved(name: str) -> None:
    backend = SimulatedBackend(NothingUnasked())
    pool, offload = pool_on(backend, name)
    holding = holding_of(pool, 1)
    backend.drain()
    value = offload.save(holding)
    with pytest.raises(FreeInFlight):
        pool.close(holding)
    assert holding.is_open
    backend.wait(value.saved)
    pool.close(holding)
    assert all(each.live == 0 for each in pool.allocators.values())


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_what_a_restore_writes_cannot_be_freed_before_it_is_restored(name: str) -> None:
    backend = SimulatedBackend(NothingUnasked())
    pool, offload = pool_on(backend, name)
    old = holding_of(pool, 1)
    value = offload.save(old)
    backend.wait(value.saved)
    pool.close(old)
    new = holding_of(pool, 1)
    restored = offload.restore(value, new)
    with pytest.raises(FreeInFlight):
        pool.close(new)
    backend.wait(restored)
    pool.close(new)
    assert all(each.live == 0 for each in pool.allocators.values())


def test_a_discarded_value_leaves_no_pin_on_pages_that_are_kept() -> None:
    pool, offload = pool_on(EagerBackend())
    holding = holding_of(pool, 1)
    for _ in range(3):
        offload.discard(offload.save(holding))
    for pages in (holding.pages[:1], holding.pages[1:]):
        with pytest.raises(LengthMismatch, match="not pinned"):
            pool.allocators["full"].unpin(pages)


# Values


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_value_is_not_discarded_while_its_save_or_its_restore_is_pending(name: str) -> None:
    backend = SimulatedBackend(NothingUnasked())
    pool, offload = pool_on(backend, name)
    holding = holding_of(pool, 1)
    backend.drain()
    value = offload.save(holding)
    held = backend.allocated()
    with pytest.raises(FreeInFlight, match="discarded while a copy of it is pending"):
        offload.discard(value)
    backend.wait(value.saved)
    restored = offload.restore(value, holding)
    with pytest.raises(FreeInFlight, match="discarded while a copy of it is pending"):
        offload.discard(value)
    assert backend.allocated() == held
    backend.wait(restored)
    offload.discard(value)
    assert not any(memory.startswith("offload.") for memory in backend.allocated())


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_discarded_value_is_not_restored(name: str) -> None:
    pool, offload = pool_on(EagerBackend(), name)
    holding = holding_of(pool, 1)
    value = offload.save(holding)
    offload.discard(value)
    before = state_of(pool)
    with pytest.raises(ForeignAccess, match="value 1 was discarded"):
        offload.restore(value, holding)
    assert state_of(pool) == before


def test_bytes_of_a_dropped_value_read_as_never_written() -> None:
    backend = SimulatedBackend(NothingUnasked())
    pool, offload = pool_on(backend)
    holding = holding_of(pool, 1)
    words = pool.sets["full"].write_view("k")
    words.fill_(7)
    value = offload.save(holding)
    backend.wait(value.saved)
    assert bool((value.buffers[0].words == 7).all())
    restored = offload.restore(value, holding)
    backend.release(value.buffers[0].memory)  # too early, and behind the offload's back
    backend.wait(restored)
    extent = pool.extent(holding, holding.committed)
    rows = torch.from_numpy(extent.rows("full", pool.sets["full"].buffer("k")))
    assert bool((words[:, rows].view(torch.uint8) == POISON_BYTE).all())


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_value_is_not_restored_into_another_requests_holding(name: str) -> None:
    pool, offload = pool_on(EagerBackend(), name)
    value = offload.save(holding_of(pool, 1))
    other = holding_of(pool, 2)
    before = state_of(pool)
    with pytest.raises(ForeignAccess, match="got one of request 2 with 0"):
        offload.restore(value, other)
    other.request = 1  # a holding that lies about whose it is
    with pytest.raises(ForeignAccess, match="row 2 is request 2's now"):
        offload.restore(value, other)
    assert state_of(pool) == before


def test_pages_that_the_prefix_tree_owns_are_not_restored_into() -> None:
    pool, offload = pool_on(EagerBackend())
    holding = holding_of(pool, 1)
    trees, given = holding.pages.copy(), Given.nothing(len(holding.pages))
    given.full[:] = True
    value = offload.save(holding)
    pool.close(holding, given=given)
    sharing = pool.open(1)
    assert sharing is not None
    pool.adopt(sharing, trees, ids())
    before = state_of(pool)
    with pytest.raises(ForeignAccess, match="got one of request 1 with 2"):
        offload.restore(value, sharing)
    assert state_of(pool) == before


def test_a_closed_holding_is_not_restored_into() -> None:
    pool, offload = pool_on(EagerBackend())
    holding = holding_of(pool, 1)
    value = offload.save(holding)
    pool.close(holding)
    heir = holding_of(pool, 2)
    before = state_of(pool)
    with pytest.raises(ForeignAccess, match="request 1: expected an open holding"):
        offload.restore(value, holding)
    assert state_of(pool) == before
    assert heir.is_open


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_dtype": torch.float16}, "torch.float16"),
        ({"page_size": 8}, "got pages of 4"),
        ({"num_kv_heads": 4}, r"\[4, 8\]"),
        ({"full_layers": (0,)}, "of 1 layers"),
    ],
)
def test_a_value_of_another_layout_under_the_same_names_is_refused(change: dict[str, object], words: str) -> None:
    pool, offload = pool_on(EagerBackend())
    value = offload.save(holding_of(pool, 1))
    preset = replace(shape("llama-3-tiny"), **change)  # type: ignore[arg-type]
    other = KVPool(preset, PoolSizes(pages=8, requests=2, max_tokens=64), backend=EagerBackend())
    holding = holding_of(other, 1)
    before = state_of(other)
    with pytest.raises(LayoutMismatch, match=words):
        Offload(other, other.backend).restore(value, holding)
    assert state_of(other) == before


@pytest.mark.parametrize("name", TINY_SHAPES)
@pytest.mark.parametrize("more", [1, -1000])
def test_a_save_of_more_tokens_than_the_pages_hold_is_refused(name: str, more: int) -> None:
    pool, offload = pool_on(EagerBackend(), name)
    holding = holding_of(pool, 1)
    held = pool.backend.allocated()
    holding.committed += more
    with pytest.raises(LengthMismatch, match=f"expected 0 to {2 * pool.page_size} committed tokens in 2 pages"):
        offload.save(holding)
    assert pool.backend.allocated() == held


def test_window_pages_that_are_gone_elsewhere_than_at_the_front_are_refused() -> None:
    pool, offload = pool_on(EagerBackend(), "gpt-oss-tiny")
    holding = holding_of(pool, 1, pages=5)
    pool.evict_window(holding, 17)
    value = offload.save(holding)
    assert value.window_start == 2
    holding.window_pages = np.roll(holding.window_pages, -1)  # as many are live, but others
    for call in (lambda: offload.save(holding), lambda: offload.restore(value, holding)):
        with pytest.raises(LengthMismatch, match="gone from the front only"):
            call()


def test_two_offloads_of_one_backend_keep_their_values_apart() -> None:
    backend = EagerBackend()
    pool, first = pool_on(backend)
    second = Offload(pool, backend)
    holding = holding_of(pool, 1)
    held = backend.allocated()
    mine, theirs = first.save(holding), second.save(holding)
    assert len({kept.memory for value in (mine, theirs) for kept in value.buffers}) == 4
    first.discard(mine)
    again = first.save(holding)
    assert len(backend.allocated()) == len(held) + 4
    with pytest.raises(DoubleFree):
        first.discard(mine)
    first.discard(again)
    second.discard(theirs)
    assert backend.allocated() == held
