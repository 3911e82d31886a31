"""The storage tier: what comes back from a store is served whole, no further than its companions, and not before."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest
from cache.hicache.test_ranks import Collective
from rigs.cache import Rig, rig_of

from kvcheck.core.base.paging import pages_for
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.hicache.memory_store import MemoryStore
from kvcheck.core.cache.hicache.storage import Namespace
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.stress.history import History
from kvcheck.core.stress.strategies import DelayStrategy

TEXT = "abcdef"
REQUEST = 9
SHAPES = ("llama-3-tiny", "glm-5.1-tiny", "gpt-oss-tiny", "qwen3-next-tiny")


def stored(name: str, agree: Callable[[int], int] = int) -> tuple[Rig, MemoryStore, Namespace]:
    """A prefix of six pages that the store alone has; the store works when the host waits for it."""
    history = History(keep=True)
    rig = rig_of(name, SimulatedBackend(DelayStrategy(["storage"]), history.emit), history=history, agree=agree)
    store = MemoryStore()
    shape = rig.pool.shape
    namespace = Namespace(model=name, dtype="any", layout="units", page_size=shape.page_size, rank=0, ranks=1)
    reach = pages_for(shape.window - 1, shape.page_size) if rig.pool.has_window else 0
    tier = StorageTier(
        rig.residency,
        rig.host,
        store,
        namespace,
        rig.backend,
        window_pages=reach,
        has_state=rig.pool.has_state,
        agree=agree,
    )
    rig.cache.connect(tier)
    rig.serve(TEXT)
    rig.cache.settle()
    rig.cache.evict("full", 99)
    rig.residency.evict_host("full", 99)
    assert [*rig.tree.nodes()] == [] and store.keys()
    rig.spoil()
    rig.words.clear()
    return rig, store, namespace


def fetched(rig: Rig) -> int:
    """Fetch the prompt, then serve it; how many of its pages were cached."""
    tokens = rig.tokens(TEXT)
    if not rig.cache.fetch(tokens, REQUEST):
        assert rig.tree.match(tokens).pages == 0, "nothing is published before it has arrived"
        assert rig.cache.locked() == 0, "the root alone is locked"
    rig.cache.settle()
    assert rig.cache.fetch(tokens, REQUEST)
    served = rig.serve(TEXT)
    rig.close()
    return served


@pytest.mark.parametrize("name", SHAPES)
def test_a_prefix_comes_back_from_the_store_bit_for_bit(name: str) -> None:
    rig, _, _ = stored(name)
    assert fetched(rig) == len(TEXT)
    assert set(rig.words) == {f"{space}.{each.name}" for space, each in rig.pool.buffers()}


def damaged(store: MemoryStore, key: str) -> None:
    store.corrupt(key, at=-1)


@pytest.mark.parametrize("harm", [MemoryStore.drop, damaged])
@pytest.mark.parametrize(
    ("name", "space", "page", "without", "spoiled"),
    [
        ("llama-3-tiny", "full", 0, 0, 0),
        ("llama-3-tiny", "full", 4, 4, 4),
        ("glm-5.1-tiny", "full", 3, 3, 3),
        ("gpt-oss-tiny", "full", 2, 2, 0),  # windows were fetched for the promised end; a shorter prefix has none
        ("gpt-oss-tiny", "window", 5, 5, 0),  # what is damaged leaves a gap in the window
        ("qwen3-next-tiny", "state", 5, 0, 0),
    ],
)
def test_a_prefix_is_no_longer_than_what_arrived_of_every_space(
    name: str, space: str, page: int, without: int, spoiled: int, harm: Callable[[MemoryStore, str], None]
) -> None:
    rig, store, namespace = stored(name)
    harm(store, namespace.key(space, rig.tree.chain(rig.tokens(TEXT))[page]))
    assert fetched(rig) == (spoiled if harm is damaged else without)


def test_what_arrives_for_an_aborted_request_is_given_back() -> None:
    rig, _, _ = stored("llama-3-tiny")
    free = rig.host.allocators["full"].available
    assert not rig.cache.fetch(rig.tokens(TEXT), REQUEST)
    assert rig.host.allocators["full"].available == free - len(TEXT)
    rig.cache.forget(REQUEST)
    rig.cache.settle()
    assert rig.host.allocators["full"].available == free and [*rig.tree.nodes()] == []
    rig.close()


def test_a_request_that_is_sent_again_asks_the_store_again() -> None:
    rig, _, _ = stored("llama-3-tiny")
    assert not rig.cache.fetch(rig.tokens(TEXT), REQUEST)
    rig.cache.forget(REQUEST)
    rig.cache.settle()
    assert not rig.cache.fetch(rig.tokens(TEXT), REQUEST)
    rig.cache.settle()
    assert rig.cache.fetch(rig.tokens(TEXT), REQUEST)
    rig.requests = REQUEST - 1
    lease = rig.admit(TEXT)
    assert lease.holding.request == REQUEST and lease.holding.shared == len(TEXT)
    assert not rig.cache._fetched, "nothing is kept of requests that are under way"
    rig.abort(lease)
    rig.cache.settle()
    rig.close()


@pytest.mark.parametrize("moment", ["asked", "read"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_store_that_does_not_answer_has_nothing(name: str, moment: str) -> None:
    rig, store, _ = stored(name)
    free = {space: each.available for space, each in rig.host.allocators.items()}
    if moment == "asked":
        store.close()
    assert rig.cache.fetch(rig.tokens(TEXT), REQUEST) == (moment != "read")
    store.close()
    rig.cache.settle()
    assert [*rig.tree.nodes()] == []
    assert {space: each.available for space, each in rig.host.allocators.items()} == free
    assert rig.cache.storage is not None and rig.cache.storage.failures
    assert rig.serve(TEXT) == 0
    rig.close()


@pytest.mark.parametrize("harm", [MemoryStore.drop, damaged])
@pytest.mark.parametrize(("name", "space", "page"), [("llama-3-tiny", "full", 2), ("gpt-oss-tiny", "window", 4)])
def test_a_page_that_one_rank_lost_is_published_by_none(
    name: str, space: str, page: int, harm: Callable[[MemoryStore, str], None]
) -> None:
    meeting = Collective(2)
    served: dict[int, object] = {}

    def serve(rank: int) -> None:
        try:
            rig, store, namespace = stored(name, meeting.agree(rank))
            if rank == 1:
                harm(store, namespace.key(space, rig.tree.chain(rig.tokens(TEXT))[page]))
            rig.cache.fetch(rig.tokens(TEXT), REQUEST)
            rig.cache.settle()
            held = [(node.chain, node.host.ids(space).tolist()) for node in rig.tree.nodes()]
            served[rank] = (rig.tree.match(rig.tokens(TEXT)).pages, held, rig.host.allocators[space].available)
            rig.close()
        except BaseException:
            meeting.leave()  # the other rank fails too, and what is missing below says so
            raise

    threads = [Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served[0] == served[1]
