"""Owners on one store: each keeps its own pages, and an engine whose keys forget a field would find a neighbour's."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvcheck.core.cache.hicache.memory_store import MemoryStore
from kvcheck.core.cache.hicache.storage import Namespace
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.stress.targets.mutants.situations import DtypeFreeKeys, RankFreeKeys
from kvcheck.core.stress.targets.prefixes import Neighbours, others_of

MINE = Namespace(model="m", dtype="bf16", layout="units", page_size=16, rank=1, ranks=2)
CHAIN = (b"a" * 32, b"b" * 32)
SIZES = {"full": 100, "state": 7}


def found(store: MemoryStore, tier: type[StorageTier], space: str, chain: bytes) -> bytes | None:
    return store.get(tier.key_of(MINE, space, chain), SIZES[space])


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
    assert all(found(store, StorageTier, space, each) is None for space in SIZES for each in CHAIN)
    theirs = others_of(MINE)[turn]
    assert {len(store.get(theirs.key("full", each), 100) or b"") for each in CHAIN} == {100}


@pytest.mark.parametrize(("tier", "turn"), [(DtypeFreeKeys, 1), (RankFreeKeys, 3)])
def test_keys_that_forget_a_field_lead_to_that_neighbour(tier: type[StorageTier], turn: int) -> None:
    for each in range(4):
        store = MemoryStore()
        Neighbours(store, MINE, tier.key_of, SIZES).serve(CHAIN, each)
        assert (found(store, tier, "state", CHAIN[0]) is not None) == (each == turn)
