"""What pools and offloads refuse: holdings, pages and values that are not the caller's, or not its any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from rigs.scene import LONGEST, PAGES, ROWS, Scene, ids, pool_of

from kvcheck.core.base.errors import (
    DoubleFree,
    ForeignAccess,
    FreeInFlight,
    LayoutMismatch,
    LengthMismatch,
    TargetError,
)
from kvcheck.core.cache.backend.backend import POISON_BYTE
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.strategies import LazyStrategy
from kvcheck.core.stress.workload.shapes import TINY_SHAPES, shape

Call = Callable[[Scene], object]
Error = type[TargetError]
NAMES = ("llama-3-tiny", "glm-5.1-tiny", "gpt-oss-tiny", "qwen3-next-tiny")
"""Pools of one space, with page rows, of a window and of states."""


@pytest.fixture(params=NAMES)
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


# Holdings

NOT_OPEN: dict[str, Callable[[Scene], Holding]] = {
    "closed": lambda s: s.gone,
    "closed, its ids live on with another": lambda s: s.past,
    "of another request": lambda s: replace(s.one, request=2),
    "in a row that nobody has": lambda s: replace(s.one, row=s.gone.row),
    "in another request's row": lambda s: replace(s.past, is_open=True),
    "that says it is closed": lambda s: replace(s.one, is_open=False),
    "in row -1": lambda s: replace(s.one, row=-1),
}
METHODS: dict[str, Callable[[Scene, Holding], object]] = {
    "adopt": lambda s, held: s.pool.adopt(held, ids(), ids()),
    "grow": lambda s, held: s.pool.grow(held, 1, query=0),
    "commit": lambda s, held: s.pool.commit(held, 0),
    "evict_window": lambda s, held: s.pool.evict_window(held, 0),
    "extent": lambda s, held: s.pool.extent(held, 1),
    "save": lambda s, held: s.offload.save(held),
    "restore": lambda s, held: s.offload.restore(replace(s.saved, request=held.request), held),
}


@pytest.mark.parametrize("holding", NOT_OPEN)
@pytest.mark.parametrize("method", METHODS)
def test_no_method_takes_a_holding_that_is_not_open(method: str, holding: str, scene: Scene) -> None:
    scene.refuses(lambda s: METHODS[method](s, NOT_OPEN[holding](s)), ForeignAccess)


def longer(s: Scene) -> object:
    pages = np.concatenate((s.one.pages, s.two.pages, s.heir.pages[:1]))
    assert len(pages) == LONGEST + 1
    return s.pool.adopt(s.none, pages, ids())


def of_two(s: Scene, **changes: object) -> object:
    return s.pool.close(replace(s.two, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.pool.close(s.gone), DoubleFree),
        (lambda s: s.pool.close(s.past), DoubleFree),
        (lambda s: s.pool.close(replace(s.past, is_open=True)), ForeignAccess),
        (lambda s: of_two(s, is_open=False), DoubleFree),
        (lambda s: of_two(s, request=1), ForeignAccess),
        (lambda s: of_two(s, pages=s.one.pages), ForeignAccess),
        (lambda s: of_two(s, pages=np.concatenate((s.two.pages, s.one.pages[:1]))), ForeignAccess),
        (lambda s: of_two(s, pages=s.two.pages.repeat(2)), DoubleFree),
        (lambda s: s.pool.adopt(s.two, s.one.pages[:1], ids()), LengthMismatch),
        (lambda s: s.pool.adopt(s.none, ids(0, int(s.one.pages[0])), ids()), ForeignAccess),
        (lambda s: s.pool.adopt(s.none, ids(int(s.one.pages[0]), PAGES + 1), ids()), ForeignAccess),
        (lambda s: s.pool.adopt(s.none, s.gone.pages, ids()), ForeignAccess),
        (longer, LengthMismatch),
        (lambda s: s.pool.commit(s.one, -1), LengthMismatch),
        (lambda s: s.pool.commit(s.one, 2 * s.page + 1), LengthMismatch),
    ],
)
def test_a_pool_refuses_pages_that_are_not_the_holdings(call: Call, error: Error, scene: Scene) -> None:
    scene.refuses(call, error)


def test_other_spaces_are_looked_at_like_pages() -> None:
    windows, states = Scene("gpt-oss-tiny"), Scene("qwen3-next-tiny")
    windows.refuses(lambda s: of_two(s, window_pages=s.one.window_pages[:1]), ForeignAccess)
    states.refuses(lambda s: of_two(s, state_slot=s.one.state_slot), ForeignAccess)


def test_a_holding_adopts_as_many_pages_as_the_longest_request_has(scene: Scene) -> None:
    pages = np.concatenate((scene.one.pages, scene.two.pages))
    assert len(pages) == LONGEST
    scene.pool.adopt(scene.none, pages, np.zeros(LONGEST, dtype=np.int64) if scene.pool.has_window else ids())
    assert (scene.none.committed, scene.none.shared) == (LONGEST * scene.page, LONGEST)


def test_a_pool_has_a_row_for_each_request_and_no_more(scene: Scene) -> None:
    last = scene.pool.open(9)
    assert last is not None and scene.pool.open(10) is None
    scene.pool.close(last)
    assert scene.pool.allocators["rows"].live == ROWS - 1


# Values


def value(s: Scene, **changes: object) -> object:
    return s.offload.restore(replace(s.saved, **changes), s.one)  # type: ignore[arg-type]


def into(s: Scene, **changes: object) -> object:
    """Restore the value into a holding that differs from its own."""
    return s.offload.restore(s.saved, replace(s.one, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: value(s, layout=s.saved.layout[:-1]), LayoutMismatch),
        (lambda s: value(s, page_size=s.page + 1), LayoutMismatch),
        (lambda s: value(s, tokens=2 * s.page + 1), LengthMismatch),
        (lambda s: value(s, tokens=s.page), LengthMismatch),
        (lambda s: value(s, window_start=1), LengthMismatch),
        (lambda s: value(s, request=2), ForeignAccess),
        (lambda s: value(s, number=1 << 20), ForeignAccess),
        (lambda s: s.offload.restore(s.dropped, s.one), ForeignAccess),
        (lambda s: s.offload.restore(s.saved, s.heir), ForeignAccess),
        (lambda s: s.offload.restore(s.saved, replace(s.heir, request=1)), ForeignAccess),
        (lambda s: into(s, shared=1), ForeignAccess),
        (lambda s: into(s, pages=np.concatenate((s.one.pages[:1], s.two.pages))), ForeignAccess),
        (lambda s: into(s, pages=np.concatenate((s.one.pages[:1], s.gone.pages))), ForeignAccess),
        (lambda s: into(s, pages=s.one.pages[:1]), LengthMismatch),
        (lambda s: s.offload.discard(s.dropped), DoubleFree),
        (lambda s: s.offload.discard(replace(s.saved, number=1 << 20)), DoubleFree),
        (lambda s: s.offload.save(replace(s.one, committed=-1)), LengthMismatch),
        (lambda s: s.offload.save(replace(s.one, committed=2 * s.page + 1)), LengthMismatch),
    ],
)
def test_an_offload_refuses_what_does_not_fit(call: Call, error: Error, scene: Scene) -> None:
    scene.refuses(call, error)


def test_window_pages_that_are_gone_elsewhere_than_at_the_front_are_refused() -> None:
    scene = Scene("gpt-oss-tiny")
    first, second = scene.one.window_pages.tolist()
    scene.refuses(lambda s: s.offload.save(replace(s.one, window_pages=ids(first, 0))), LengthMismatch)
    for pages in (ids(0, second), ids(first, 0)):
        scene.refuses(lambda s, pages=pages: into(s, window_pages=pages), LengthMismatch)  # type: ignore[misc]


def test_all_tokens_that_the_pages_hold_are_saved_and_come_back(scene: Scene) -> None:
    scene.pool.commit(scene.one, 2 * scene.page)
    saved = scene.offload.save(scene.one)
    scene.offload.restore(saved, scene.one)
    scene.offload.discard(saved)
    scene.pool.close(scene.one)


# In flight


def pending(name: str = "llama-3-tiny") -> tuple[SimulatedBackend, KVPool, Offload, Holding]:
    """A pool whose copies wait until they are waited for, and a holding of two pages."""
    backend = SimulatedBackend(LazyStrategy())
    window = PAGES if shape(name).window_layers else 0
    sizes = PoolSizes(pages=PAGES, requests=3, max_tokens=4 * shape(name).page_size, window_pages=window)
    pool = KVPool(shape(name), sizes, backend=backend)
    holding = holding_of(pool, 1)
    backend.drain()
    return backend, pool, Offload(pool, backend), holding


def holding_of(pool: KVPool, request: int, pages: int = 2) -> Holding:
    holding = pool.open(request)
    assert holding is not None
    assert pool.grow(holding, pages * pool.page_size, query=0)
    pool.commit(holding, pages * pool.page_size)
    return holding


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_what_a_save_reads_and_a_restore_writes_cannot_be_freed_before_it_has_run(name: str) -> None:
    backend, pool, offload, old = pending(name)
    value = offload.save(old)
    with pytest.raises(FreeInFlight):
        pool.close(old)
    assert old.is_open
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
    scene = Scene("llama-3-tiny")
    for _ in range(3):
        scene.offload.discard(scene.offload.save(scene.two))
    scene.refuses(lambda s: s.pool.allocators["full"].unpin(s.two.pages), LengthMismatch)


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_value_is_not_discarded_while_its_save_or_its_restore_is_pending(name: str) -> None:
    backend, _, offload, holding = pending(name)
    value = offload.save(holding)
    held = backend.allocated()
    with pytest.raises(FreeInFlight):
        offload.discard(value)
    backend.wait(value.saved)
    restored = offload.restore(value, holding)
    with pytest.raises(FreeInFlight):
        offload.discard(value)
    assert backend.allocated() == held
    backend.wait(restored)
    offload.discard(value)
    assert not any(memory.startswith("offload.") for memory in backend.allocated())


def test_bytes_of_a_dropped_value_read_as_never_written() -> None:
    backend, pool, offload, holding = pending()
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


@pytest.mark.parametrize(
    "change", [{"kv_dtype": torch.float16}, {"page_size": 8}, {"num_kv_heads": 4}, {"full_layers": (0,)}]
)
def test_a_value_of_another_layout_under_the_same_names_is_refused(change: dict[str, object]) -> None:
    saved = Scene("llama-3-tiny").saved
    preset = replace(shape("llama-3-tiny"), **change)  # type: ignore[arg-type]
    other = KVPool(preset, PoolSizes(pages=8, requests=2, max_tokens=64), backend=EagerBackend())
    holding = holding_of(other, 1)
    with pytest.raises(LayoutMismatch):
        Offload(other, other.backend).restore(saved, holding)


def test_two_offloads_of_one_backend_keep_their_values_apart() -> None:
    pool = pool_of("llama-3-tiny")
    first, second = Offload(pool, pool.backend), Offload(pool, pool.backend)
    holding = holding_of(pool, 1)
    held = pool.backend.allocated()
    mine, theirs = first.save(holding), second.save(holding)
    assert len({kept.memory for value in (mine, theirs) for kept in value.buffers}) == 4
    first.discard(mine)
    again = first.save(holding)
    assert len(pool.backend.allocated()) == len(held) + 4
    with pytest.raises(DoubleFree):
        first.discard(mine)
    first.discard(again)
    second.discard(theirs)
    assert pool.backend.allocated() == held


# Shapes and sizes that no pool can have, each bad in one thing, and those just inside the bound

SMALL = ModelShape(name="small", family="mha", page_size=1, full_layers=(0,))
WINDOWED = replace(SMALL, window_layers=(1,), window=1)
STATED = shape("qwen3-next-tiny")


@pytest.mark.parametrize(
    "call",
    [
        lambda: replace(SMALL, full_layers=()),
        lambda: replace(SMALL, full_layers=(0, 2)),
        lambda: replace(SMALL, full_layers=(0, 0)),
        lambda: replace(SMALL, page_size=0),
        lambda: replace(WINDOWED, window=0),
        lambda: replace(SMALL, index_head_dim=12, index_quant_block=8),
        lambda: POOLS.load("mamba")(replace(STATED, ssm_heads=0)),
        lambda: POOLS.load("mamba")(replace(STATED, ssm_heads=2, conv_dim=3)),
        lambda: pool_of("llama-3-tiny", pages=0),
        lambda: pool_of("gpt-oss-tiny", window_pages=0),
        lambda: pool_of("qwen3-next-tiny", state_slots=-1),
        lambda: pool_of("llama-3-tiny").sets["full"].buffer("no such buffer"),
    ],
)
def test_what_no_pool_can_be_made_of_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(LayoutMismatch):
        call()


def test_the_least_sizes_are_accepted() -> None:
    assert WINDOWED.num_layers == 2 and SMALL.window == 0
    assert replace(SMALL, index_head_dim=16, index_quant_block=8).num_layers == 1
    assert pool_of("gpt-oss-tiny", pages=1, window_pages=1).pages_free == 1
    assert pool_of("qwen3-next-tiny", requests=1, state_slots=1).spare("state") == 0
