"""Each state of a prefix and an object is told as it is, and only what is legal in it can be made to happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
from cache.hicache.test_hicache_life import HeldBack
from rigs.cache import Rig, rig_of

from kvcheck.core.base.paging import pages_for
from kvcheck.core.base.situations import STATES
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.events import Event
from kvcheck.core.cache.hicache.memory_store import MemoryStore
from kvcheck.core.cache.hicache.storage import Namespace
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.stress.history import History
from kvcheck.core.stress.targets.prefixes import CachedPrefixes, Neighbours, others_of
from kvcheck.core.stress.targets.target import Standing
from kvcheck.core.stress.workload.events import Happened

COPIES = ("hicache.d2h*", "hicache.h2d*", "storage")
SHAPES = ("llama-3-tiny", "gpt-oss-tiny", "qwen3-next-tiny")
HAPPENINGS = ("evict", "remove", "pressure", "overwrite", "match", "split", "abort")


class Scene:
    """A cache with a store, whose copies are held back until `lanes` lets them go."""

    def __init__(self, name: str = "llama-3-tiny", *lanes: str, **config: object) -> None:
        self.history, self.chooser = History(keep=True), HeldBack(*lanes)
        backend = SimulatedBackend(self.chooser, self.history.emit)
        self.rig: Rig = rig_of(name, backend, history=self.history, **config)  # type: ignore[arg-type]
        self.store, self.told = MemoryStore(), list[Event]()
        shape = self.rig.pool.shape
        self.tier = StorageTier(
            self.rig.residency,
            self.rig.host,
            self.store,
            Namespace(model=name, dtype="any", layout="units", page_size=shape.page_size, rank=0, ranks=1),
            backend,
            window_pages=pages_for(shape.window - 1, shape.page_size) if self.rig.pool.has_window else 0,
            has_state=self.rig.pool.has_state,
        )
        self.rig.cache.connect(self.tier)
        self.prefixes = CachedPrefixes(self.rig.cache, self.rig.host, self.store, self.told.append)
        self.rig.watch.prefixes = self.prefixes

    def states(self, subject: str = "prefix") -> Counter[str]:
        return Counter(each.state for each in self.prefixes.standings() if each.subject == subject)

    def one(self, state: str) -> Standing:
        return next(each for each in self.prefixes.standings() if each.state == state)

    def make(self, happening: str, state: str) -> bool:
        return self.prefixes.make_happen(happening, self.one(state))

    def happened(self) -> Counter[tuple[str, str]]:
        return Counter((each.state, each.happening) for each in self.told if isinstance(each, Happened))

    def close(self) -> None:
        """All copies end, and everything comes back."""
        self.chooser.lanes.clear()
        self.rig.cache.settle()
        self.prefixes.close()
        self.rig.close()

    # A prefix of three pages in each state

    def on_the_device(self) -> None:
        self.rig.serve("abc")
        assert self.states() == {"on the device": 1}

    def in_use(self) -> None:
        lease = self.rig.admit("abc")
        self.rig.run(lease, "abc")
        self._end = lambda: self.rig.finish(lease, "abc")

    def being_backed_up(self) -> None:
        self.rig.serve("abc")

    def on_both_tiers(self) -> None:
        self.rig.serve("abc")
        self.rig.cache.settle()

    def on_the_host(self) -> None:
        self.on_both_tiers()
        self.rig.demote("abc")

    def being_loaded(self) -> None:
        self.on_the_host()
        self.chooser.lanes.add("hicache.h2d*")
        lease = self.rig.admit("abcd")
        self.rig.cache.start_loads()
        self._end = lambda: self.rig.cache.release(lease) or self.rig.pool.close(lease.holding)

    def being_stored(self) -> None:
        self.rig.serve("abc")
        while self.rig.cache.movement is not None and self.rig.controller.backups:
            self.rig.cache.movement.wait_oldest()

    def _end(self) -> None:
        """The request that the state needs goes."""

    def end(self) -> None:
        self._end()


SCENES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "on the device": ({"write_policy": "write-back"}, ()),
    "in use": ({"write_policy": "write-back"}, ()),
    "being backed up": ({}, ("hicache.d2h*",)),
    "on both tiers": ({}, ()),
    "on the host": ({}, ()),
    "being loaded": ({}, ()),
    "being stored": ({}, ("storage",)),
}
"""By state, how the cache is built and which lanes are held back from the start."""


def scene(name: str, state: str) -> Scene:
    config, lanes = SCENES[state]
    made = Scene(name, *lanes, **config)
    getattr(made, state.replace(" ", "_"))()
    assert made.states()[state] == 1, made.states()
    made.told.clear()
    return made


@pytest.mark.parametrize("state", SCENES)
@pytest.mark.parametrize("name", SHAPES)
def test_each_state_of_a_prefix_is_told_and_allows_what_the_table_says(name: str, state: str) -> None:
    row = next(each for each in STATES if (each.subject, each.name) == ("prefix", state))
    legal = {"evict", "remove"} & set(row.happenings)
    for happening in HAPPENINGS:
        made = scene(name, state)
        before = made.rig.everything()
        is_done = made.make(happening, state)
        assert is_done == (happening in legal), happening
        if is_done:
            assert made.states()[state] == (state == "being stored"), "that one leaves the device alone"
        else:
            assert made.rig.everything() == before
        assert not made.happened(), "whoever asks for it counts it"
        made.end()
        made.close()


def test_every_state_of_the_table_has_a_scene() -> None:
    assert list(SCENES) == [each.name for each in STATES if each.subject == "prefix"]


@pytest.mark.parametrize("state", ["in use", "being backed up", "being loaded", "being stored"])
@pytest.mark.parametrize("name", SHAPES)
def test_pressure_takes_others_and_leaves_the_prefix(name: str, state: str) -> None:
    config, lanes = SCENES[state]
    made = Scene(name, **config)
    made.rig.serve("xy")
    made.rig.cache.settle()
    if state in ("being stored",):
        made.rig.demote("xy")
    made.chooser.lanes.update(lanes)
    getattr(made, state.replace(" ", "_"))()
    evictions = made.rig.residency.device_evictions, made.rig.residency.host_evictions
    kept = made.one(state)
    assert made.make("pressure", state)
    assert kept in made.prefixes.standings()
    assert (made.rig.residency.device_evictions, made.rig.residency.host_evictions) > evictions
    made.end()
    made.close()


def test_what_has_moved_on_is_left_alone() -> None:
    made = scene("llama-3-tiny", "being backed up")
    old = made.one("being backed up")
    made.chooser.lanes.clear()
    made.rig.cache.settle()
    assert made.states() == {"on both tiers": 1}
    assert not made.prefixes.make_happen("evict", old)
    assert not made.prefixes.make_happen("evict", Standing("prefix", "on both tiers", "00"))
    made.close()


def test_a_removed_prefix_takes_what_continues_it_and_not_what_is_in_use() -> None:
    made = Scene()
    made.rig.serve("abcd")
    made.rig.serve("abxy")
    made.rig.cache.settle()
    top = min(made.rig.tree.nodes(), key=lambda node: len([*node.path()]))
    standing = Standing("prefix", "on both tiers", top.chain[-1].hex())
    lease = made.rig.admit("abxyz")
    assert not made.prefixes.make_happen("remove", standing)
    made.rig.cache.release(lease)
    made.rig.pool.close(lease.holding)
    made.rig.cache.settle()
    assert made.prefixes.make_happen("remove", standing)
    assert [*made.rig.tree.nodes()] == []
    made.close()


def test_lookups_splits_and_evictions_are_told_by_the_state_they_met() -> None:
    made = Scene("llama-3-tiny", *COPIES)
    made.rig.serve("abcd")
    made.rig.serve("abxy")
    assert made.happened() == {("being backed up", "split"): 1, ("being backed up", "match"): 1}
    made.chooser.lanes.clear()
    made.rig.cache.settle()
    made.told.clear()
    lease = made.rig.admit("abx")
    assert made.happened() == {("on both tiers", "split"): 1, ("on both tiers", "match"): 2}
    made.told.clear()
    made.rig.cache.evict("full", 1)
    assert made.happened() == {("on both tiers", "evict"): 1, ("in use", "pressure"): 1}
    made.rig.cache.release(lease)
    made.rig.pool.close(lease.holding)
    made.told.clear()
    made.close()
    assert not made.told, "what an engine gives back at its end is no eviction"


# Objects


@pytest.mark.parametrize("name", SHAPES)
def test_an_object_is_told_from_its_write_to_its_read(name: str) -> None:
    made = Scene(name, "storage")
    made.being_stored()
    assert set(made.states("object")) == {"being written"}
    made.chooser.lanes.clear()
    made.rig.cache.settle()
    count = made.states("object")["stored"]
    assert count == len(made.store.keys()) > 0
    made.rig.cache.evict("full", 99)
    made.rig.residency.evict_host("full", 99)
    made.chooser.lanes.add("storage")
    assert not made.rig.cache.fetch(made.rig.tokens("abc"), 9)
    read = made.states("object")
    assert read["being read"] > 0 and read["being written"] == 0 and read.total() == count
    made.close()


@pytest.mark.parametrize("name", SHAPES)
def test_an_object_that_is_written_again_stays_what_it_is(name: str) -> None:
    made = Scene(name, "storage")
    made.being_stored()
    one = made.one("being written")
    assert made.prefixes.make_happen("overwrite", one)
    payload = made.store.get(str(one.name), made.rig.host.unit_bytes("full"))
    assert payload is not None
    made.chooser.lanes.clear()
    made.rig.cache.settle()
    assert made.store.get(str(one.name), len(payload)) == payload
    assert made.make("overwrite", "stored")
    made.close()


def test_an_object_that_is_deleted_while_it_is_read_ends_the_prefix_before_it() -> None:
    made = Scene()
    made.on_the_host()
    made.rig.residency.evict_host("full", 99)
    made.chooser.lanes.add("storage")
    tokens = made.rig.tokens("abc")
    assert not made.rig.cache.fetch(tokens, 9)
    last = made.rig.tree.chain(tokens)[-1]
    key = next(each.key for each in made.tier.reading if each.hash == last)
    assert made.prefixes.make_happen("remove", Standing("object", "being read", key))
    assert not made.prefixes.make_happen("remove", Standing("object", "being read", key)), "it is gone"
    assert not made.prefixes.make_happen("overwrite", Standing("object", "being read", key)), "nobody has it"
    made.chooser.lanes.clear()
    made.rig.cache.settle()
    assert made.rig.tree.match(tokens).pages == 2
    made.close()


# Owners of one store

MINE = Namespace(model="m", dtype="bf16", layout="units", page_size=16, rank=1, ranks=2)
CHAIN = (b"a" * 32, b"b" * 32)
SIZES = {"full": 100, "state": 7}


def test_each_neighbour_differs_in_one_field() -> None:
    names = [row.name for row in fields(Namespace)]
    differing = [[name for name in names if getattr(each, name) != getattr(MINE, name)] for each in others_of(MINE)]
    assert differing == [["model"], ["dtype"], ["layout"], ["rank"]]
    assert all(each.rank < each.ranks for each in others_of(MINE))
    assert len(others_of(replace(MINE, rank=0, ranks=1))) == 3, "an only rank has no other"


@pytest.mark.parametrize("turn", range(4))
def test_their_objects_lie_under_their_own_keys(turn: int) -> None:
    store = MemoryStore()
    neighbours = Neighbours(store, MINE, StorageTier.key_of, SIZES)
    neighbours.serve(CHAIN, turn)
    assert len(store.keys()) == len(CHAIN) * len(SIZES)
    assert all(
        store.get(StorageTier.key_of(MINE, space, each), SIZES[space]) is None for space in SIZES for each in CHAIN
    )
    theirs = others_of(MINE)[turn]
    assert {len(store.get(theirs.key("full", each), 100) or b"") for each in CHAIN} == {100}
