"""Pools of every family: exact buffer tables, who gets which page, and that what is taken is given back once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from kvcheck.core.base.errors import FreeInFlight, LayoutMismatch
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.events import Allocated, Event, Freed
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, Piece
from kvcheck.core.cache.pools.pool import Given, Holding, KVPool, PoolSizes
from kvcheck.core.stress.workload.shapes import TINY_SHAPES, shape

Table = dict[str, tuple[int, dict[str, tuple[str, int]]]]


def kv(row_bytes: int, scale_bytes: int = 0) -> dict[str, tuple[str, int]]:
    rows = {"k": ("token", row_bytes), "v": ("token", row_bytes)}
    return rows | ({"k_scale": ("token", scale_bytes), "v_scale": ("token", scale_bytes)} if scale_bytes else {})


def nsa(layers: int, latent_bytes: int) -> Table:
    """Latent rows, and index pages that have one size in all models."""
    return {"full": (layers, {"latent": ("token", latent_bytes), "index_k_with_scale": ("page", 8448)})}


# shape: {space: (number of layers, {buffer: (what a row belongs to, bytes of a row)})}
TABLES: dict[str, Table] = {
    "glm-5.1-tiny": nsa(2, 32),
    "deepseek-v3.2-tiny": nsa(2, 40),
    "deepseek-v3-tiny": {"full": (2, {"latent": ("token", 32)})},
    "llama-3-tiny": {"full": (2, kv(32))},
    "llama-3-fp8-tiny": {"full": (2, kv(64, 32))},
    "gpt-oss-tiny": {"full": (2, kv(32)), "window": (2, kv(32))},
    "qwen3-next-tiny": {"full": (1, kv(32)), "state": (3, {"conv": ("slot", 96), "ssm": ("slot", 128)})},
    "glm-5.1": nsa(78, 1152),
    "deepseek-v3.2": nsa(61, 656),
    "deepseek-v3": {"full": (61, {"latent": ("token", 1152)})},
    "llama-3-8b": {"full": (32, kv(2048))},
    "llama-3-70b": {"full": (80, kv(2048))},
    "llama-3-8b-fp8": {"full": (32, kv(1024, 32))},
    "gpt-oss-20b": {"full": (12, kv(1024)), "window": (12, kv(1024))},
    "gpt-oss-120b": {"full": (18, kv(1024)), "window": (18, kv(1024))},
    "qwen3-next-80b": {"full": (12, kv(1024)), "state": (36, {"conv": ("slot", 49152), "ssm": ("slot", 2097152)})},
}
PAGES, WINDOW_PAGES, REQUESTS = 9, 5, 3


class Ledger:
    """Who holds which ids of a space, by what the allocators say."""

    def __init__(self) -> None:
        self.held: dict[str, dict[int, int]] = {}
        self.freed_ids: list[tuple[str, int]] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Allocated):
            for each in event.ids:
                assert each not in self.held.setdefault(event.space, {})
                self.held[event.space][each] = event.owner
        elif isinstance(event, Freed):
            for each in event.ids:
                del self.held[event.space][each]
                self.freed_ids.append((event.space, each))

    def of(self, space: str, owner: int) -> set[int]:
        return {each for each, whose in self.held.get(space, {}).items() if whose == owner}


def pool_of(name: str, *, window_pages: int = WINDOW_PAGES) -> tuple[KVPool, Ledger, EagerBackend]:
    """A small pool of a tiny shape, in which one request may take all pages."""
    backend, ledger = EagerBackend(), Ledger()
    longest = PAGES * shape(name).page_size
    sizes = PoolSizes(pages=PAGES, requests=REQUESTS, max_tokens=longest, window_pages=window_pages)
    return KVPool(shape(name), sizes, backend=backend, emit=ledger), ledger, backend


def opened(pool: KVPool, request: int) -> Holding:
    holding = pool.open(request)
    assert holding is not None
    return holding


def everything(pool: KVPool, holding: Holding) -> list[object]:
    return [
        {name: (each.available, each.live) for name, each in pool.allocators.items()},
        {name: table.read_view().tolist() for name, table in pool.tables.items()},
        (holding.pages.tolist(), holding.window_pages.tolist(), holding.committed, holding.shared),
    ]


@pytest.mark.parametrize("name", TABLES)
def test_the_buffer_table_of_a_shape_is_exactly_this(name: str) -> None:
    spaces = POOLS.load(shape(name).family)(shape(name))
    got = {spec.name: {each.name: (each.rows.value, each.row_bytes) for each in spec.buffers} for spec in spaces}
    assert {spec.name: (len(spec.layers), got[spec.name]) for spec in spaces} == TABLES[name]
    assert sorted(layer for spec in spaces for layer in spec.layers) == list(range(shape(name).num_layers))
    assert all(spec.unit.value == ("slot" if spec.name == "state" else "page") for spec in spaces)


@pytest.mark.parametrize(
    ("name", "rows", "key", "scale"),
    [*((name, 64, 128, 4) for name in ("glm-5.1-tiny", "deepseek-v3.2")), ("glm-5.1-micro", 2, 8, 4)],
)
def test_an_index_page_holds_its_keys_and_then_its_scales(name: str, rows: int, key: int, scale: int) -> None:
    index = POOLS.load("nsa")(shape(name))[0].buffers[1]
    assert (index.row_bytes, index.dtype) == (rows * (key + scale), torch.uint8)
    assert index.pieces == (Piece("key", 0, key), Piece("scale", rows * key, scale))


@pytest.mark.parametrize(
    ("rows", "size", "named"), [("token", 6, 0), ("token", 64, 1), ("page", 6, 1), ("page", 64, 0), ("slot", 64, 1)]
)
def test_a_buffer_of_broken_words_or_pieces_is_refused(rows: str, size: int, named: int) -> None:
    with pytest.raises(LayoutMismatch):
        BufferSpec(
            name="b",
            rows=Granularity(rows),
            item_shape=(size,),
            dtype=torch.uint8,
            pieces=(Piece("key", 0, 8),) * named,
        )


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_memory_is_one_padding_unit_more_than_asked_for_and_all_of_it_comes_back(name: str) -> None:
    pool, _, backend = pool_of(name)
    units = {"full": PAGES, "window": WINDOW_PAGES, "state": REQUESTS}
    for space, (layers, buffers) in TABLES[name].items():
        assert pool.allocators[space].count == units[space]
        for buffer, (rows, row_bytes) in buffers.items():
            per_unit = shape(name).page_size if rows == "token" else 1
            expected = layers * (units[space] + 1) * per_unit * row_bytes
            assert backend.allocated()[f"device.{space}.{buffer}"] == expected
    ranges = sorted(span for owned in pool.sets.values() for span in owned.storage_ranges().values())
    assert all(left[1] <= right[0] for left, right in pairwise(ranges))
    pool.free()
    assert backend.allocated() == {}


def test_opening_zeroes_the_state_slot_and_no_other() -> None:
    pool, _, backend = pool_of("qwen3-next-tiny")
    state = pool.sets["state"]
    for buffer in ("conv", "ssm"):
        state.write_view(buffer).fill_(7)
    holding = opened(pool, 1)
    for buffer in ("conv", "ssm"):
        kept = (state.read_view(buffer, range(3), backend.lane("forward")) == 7).all(2).all(0)
        assert kept.tolist() == [slot != holding.state_slot for slot in range(REQUESTS + 1)]
        assert not state.read_view(buffer, range(3), backend.lane("forward"))[:, holding.state_slot].any()
    assert pool.tables["req_to_state"].read_view()[0, holding.row].item() == holding.state_slot


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_growing_fills_the_tables_with_the_locs_of_the_pages_held(name: str) -> None:
    pool, ledger, _ = pool_of(name)
    size, holding = pool.page_size, opened(pool, 1)
    for tokens in (size + 1, 2 * size, 2 * size + 1):  # the second fits the pages it has
        assert pool.grow(holding, tokens, query=0)
    assert set(holding.pages.tolist()) == ledger.of("full", 1)
    assert len(holding.pages) == 3
    row = pool.tables["req_to_token"].read_view()[holding.row].tolist()
    assert row[: 3 * size] == [page * size + offset for page in holding.pages for offset in range(size)]
    if pool.has_window:
        assert set(holding.window_pages.tolist()) == ledger.of("window", 1)
        mapped = pool.tables["full_to_window"].read_view()[0]
        assert [mapped[page].item() for page in holding.pages] == holding.window_pages.tolist()


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_growing_past_the_last_free_page_changes_nothing_in_any_space(name: str) -> None:
    pool, _, _ = pool_of(name, window_pages=3 * PAGES)
    size, other, holding = pool.page_size, opened(pool, 1), opened(pool, 2)
    assert pool.grow(other, 6 * size, query=0) and pool.grow(holding, 2 * size, query=0)
    before = everything(pool, holding)
    assert not pool.grow(holding, 3 * size + 1, query=0)
    assert pool.pages_short(holding, 3 * size + 1, query=0) == {"full": 1}
    assert not pool.grow(holding, pool.sizes.max_tokens + 1, query=pool.sizes.max_tokens)  # longer than any may be
    assert everything(pool, holding) == before
    assert pool.grow(holding, 3 * size, query=0)


def test_a_full_window_pool_refuses_growth_although_the_full_pool_has_pages() -> None:
    pool, _, _ = pool_of("gpt-oss-tiny", window_pages=4)
    holding = opened(pool, 1)
    assert pool.grow(holding, 12, query=0)
    before = everything(pool, holding)
    assert not pool.grow(holding, 20, query=0)
    assert pool.pages_short(holding, 20, query=0) == {"window": 1}
    assert everything(pool, holding) == before
    assert pool.allocators["full"].available == PAGES - 3
    assert pool.pages_free == 1


def test_window_pages_that_the_next_token_cannot_see_are_not_taken() -> None:
    pool, ledger, _ = pool_of("gpt-oss-tiny")
    holding = opened(pool, 1)
    assert pool.grow(holding, 24, query=23)  # token 23 sees 14 .. 23, which lie in pages 3, 4 and 5
    assert holding.window_pages[:3].tolist() == [0, 0, 0]
    assert set(holding.window_pages[3:].tolist()) == ledger.of("window", 1)
    assert len(ledger.of("window", 1)) == 3
    mapped = pool.tables["full_to_window"].read_view()[0]
    assert [mapped[page].item() for page in holding.pages] == holding.window_pages.tolist()


# Pages of 4, window of 10: the token at `tokens` sees positions tokens - 9 .. tokens.
@pytest.mark.parametrize(("tokens", "passed"), [(9, 0), (12, 0), (13, 1), (16, 1), (17, 2), (20, 2), (21, 3)])
def test_evicting_frees_exactly_the_window_pages_that_were_passed(tokens: int, passed: int) -> None:
    pool, ledger, _ = pool_of("gpt-oss-tiny")
    holding = opened(pool, 1)
    assert pool.grow(holding, 20, query=0)
    held, full = holding.window_pages.tolist(), holding.pages.tolist()
    for _ in range(2):  # the second time there is nothing left to free
        pool.evict_window(holding, tokens)
        assert ledger.freed_ids == [("window", page) for page in held[:passed]]
        assert holding.window_pages.tolist() == [0] * passed + held[passed:]
        assert holding.pages.tolist() == full
        mapped = pool.tables["full_to_window"].read_view()[0]
        assert [mapped[page].item() for page in full] == holding.window_pages.tolist()


@pytest.mark.parametrize("name", [name for name in TINY_SHAPES if set(TABLES[name]) == {"full"}])
def test_shared_pages_and_pages_given_away_stay_allocated(name: str) -> None:
    pool, ledger, _ = pool_of(name)
    size, holding, trees = pool.page_size, opened(pool, 1), pool.allocators["full"].allocate(2, 77)
    assert trees is not None
    pool.adopt(holding, trees, np.zeros(0, dtype=np.int64))
    assert (holding.shared, holding.committed) == (2, 2 * size)
    assert pool.grow(holding, 5 * size, query=2 * size)
    given_away = holding.pages[2:4].tolist()
    row = pool.tables["req_to_token"].read_view()[holding.row].tolist()
    assert row[: 2 * size] == [page * size + offset for page in trees for offset in range(size)]
    given = Given.nothing(len(holding.pages))
    given.full[2:4] = True
    pool.close(holding, given=given)
    assert ledger.freed_ids == [("full", int(holding.pages[4])), ("rows", holding.row)]
    assert set(ledger.held["full"]) == {*trees.tolist(), *given_away}


def test_a_holding_owns_the_lists_that_it_adopts() -> None:
    pool, _, _ = pool_of("gpt-oss-tiny")
    holding = opened(pool, 1)
    full, window = (pool.allocators[space].allocate(3, 77) for space in ("full", "window"))
    assert full is not None and window is not None
    seen = np.array([0, *window[1:]])  # the next position no longer sees the first page
    pool.adopt(holding, full, seen)
    full[:], seen[:] = 9, 9
    assert (holding.pages.tolist(), holding.window_pages.tolist()) == ([1, 2, 3], [0, 2, 3])


def test_an_extent_leaves_out_pages_that_the_window_has_passed() -> None:
    pool, _, _ = pool_of("gpt-oss-tiny")  # pages of 4 tokens, a window of 10
    holding = opened(pool, 1)
    assert pool.grow(holding, 16, query=0)
    pool.evict_window(holding, 14)  # the first window page is gone
    extent = pool.extent(holding, 14)
    assert {space: ids.tolist() for space, ids in extent.units.items()} == {"full": [1, 2, 3, 4], "window": [2, 3, 4]}
    rows = {space: extent.rows(space, pool.sets[space].buffer("k")).tolist() for space in extent.units}
    assert rows == {"full": list(range(4, 18)), "window": list(range(8, 18))}


def test_cached_prefixes_may_take_a_state_slot_only_where_every_request_still_finds_one() -> None:
    backend = EagerBackend()
    sizes = PoolSizes(pages=PAGES, requests=2, max_tokens=8, state_slots=3)
    pool = KVPool(shape("qwen3-next-tiny"), sizes, backend=backend)
    assert (pool.spare("state"), pool.spare("full")) == (1, PAGES)
    taken = pool.allocators["state"].allocate(pool.spare("state"), 77)
    assert taken is not None and pool.spare("state") == 0
    assert [pool.open(request) is None for request in (1, 2, 3)] == [False, False, True]
    assert pool.spare("state") == 0


@pytest.mark.parametrize(("name", "space"), [(name, space) for name in TINY_SHAPES for space in TABLES[name]])
def test_a_pinned_page_or_slot_cannot_be_freed_by_closing(name: str, space: str) -> None:
    pool, ledger, _ = pool_of(name)
    holding = opened(pool, 1)
    assert pool.grow(holding, 2 * pool.page_size, query=0)
    ids = pool.extent(holding, 2 * pool.page_size).units[space][-1:]
    pool.allocators[space].pin(ids)
    with pytest.raises(FreeInFlight, match=rf"{space}: freed .* while pinned: \[{ids[0]}\]"):
        pool.close(holding)
    assert (space, int(ids[0])) not in ledger.freed_ids


@pytest.mark.parametrize("name", TINY_SHAPES)
@examples(12)
@given(calls=st.lists(st.tuples(st.sampled_from(["open", "grow", "close"]), st.integers(1, 4)), max_size=25))
def test_what_requests_hold_is_what_the_allocators_gave_them(name: str, calls: list[tuple[str, int]]) -> None:
    pool, ledger, _ = pool_of(name)
    held: dict[int, tuple[Holding, int]] = {}
    for at, (verb, n) in enumerate(calls, start=1):
        if verb == "open":
            made = pool.open(at)
            assert (made is None) == (len(held) == REQUESTS)
            held |= {} if made is None else {at: (made, 0)}
        elif held:
            request = list(held)[n % len(held)]
            holding, tokens = held.pop(request)
            if verb == "close":
                pool.close(holding)
                continue
            more = tokens + n * pool.page_size - 1
            grown = pool.grow(holding, more, query=tokens)
            held[request] = (holding, more if grown else tokens)
            pool.evict_window(holding, held[request][1])
        for request, (holding, _) in held.items():
            assert set(holding.pages.tolist()) == ledger.of("full", request)
            assert {each for each in holding.window_pages.tolist() if each} == ledger.of("window", request)
    for holding, _ in held.values():
        pool.close(holding)
    assert not bool(pool.tables["full_to_window"].read_view().any())
    assert all(allocator.live == 0 for allocator in pool.allocators.values())
    assert not any(ledger.held.values())
