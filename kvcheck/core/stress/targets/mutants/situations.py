"""Mutants that only a rare situation shows: an abort, a split or a second owner during a transfer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvcheck.core.cache.hicache.node import Node
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.hicache.storage import Namespace
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.cache.scheduler.request import RunningRequest
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED


class DtypeFreeKeys(StorageTier):
    @staticmethod
    def key_of(namespace: Namespace, space: str, chain: bytes) -> str:
        return replace(namespace, dtype="any").key(space, chain)


class RankFreeKeys(StorageTier):
    @staticmethod
    def key_of(namespace: Namespace, space: str, chain: bytes) -> str:
        return replace(namespace, rank=0).key(space, chain)


class ForgottenFetch(StorageTier):
    def forget(self, request: int) -> None:
        self._prefetches = [each for each in self._prefetches if each.request != request]


class SplitForgetsLoad(PrefixTree):
    def _split(self, node: Node, at: int) -> Node:
        upper = super()._split(node, at)
        for transfer in upper.loading:
            transfer.nodes.remove(upper)
        upper.loading = ()
        return upper


class ReplacingTree(PrefixTree):
    def _path_now(self, keys: list[bytes], start: int) -> list[Node]:
        return self._walk(keys[:start])


class ReadyStays(Scheduler):
    def _unqueue(self, active: RunningRequest) -> None:
        if active not in self._ready:
            super()._unqueue(active)


_FOREIGN = (
    "Half of the engines on a shared store serve the bytes of another: of another dtype, or another rank's heads."
)


_mutant = partial(
    Mutant,
    bug="b",
    scenario="hicache",
    shape="llama-3-tiny",
    killed_by="accounting",
    code="KV401",
    example="a hazard of the same family",
)
SITUATIONS = (
    _mutant(
        name="key-forgets-dtype",
        parts=replace(FIXED, storage=DtypeFreeKeys),
        shows="Two engines of one model and different dtypes find each other's pages in a store.",
        matters=_FOREIGN,
        killed_by="content",
        code="KV105",
    ),
    _mutant(
        name="key-forgets-rank",
        parts=replace(FIXED, storage=RankFreeKeys),
        shows="Two ranks of one model find each other's pages in a store.",
        matters=_FOREIGN,
        killed_by="content",
        code="KV105",
    ),
    _mutant(
        name="aborted-fetch-forgotten",
        parts=replace(FIXED, storage=ForgottenFetch),
        shows="A request is aborted while pages come from the store for it, and its fetch is dropped from the list.",
        matters="Its host pages are lost for good, and the prefix below which they were to hang stays locked.",
    ),
    _mutant(
        name="split-forgets-load",
        parts=replace(FIXED, tree=SplitForgetsLoad),
        shows="A node is split while it is being loaded, and readers of its first half do not wait.",
        matters="A request that shares a part of a prefix which is just coming back reads what was in its "
        "pages before.",
        killed_by="ordering",
        code="KV201",
    ),
    _mutant(
        name="fetch-replaces-computed",
        parts=replace(FIXED, tree=ReplacingTree),
        shows="A prefix is computed while it is fetched for another request, and the fetched pages "
        "replace it in the tree.",
        matters="The pages of the first are neither free nor cached, and those that continue it are lost with it.",
    ),
    _mutant(
        name="abort-leaves-ready",
        parts=replace(FIXED, scheduler=ReadyStays),
        shows="A request is aborted after its prompt was computed and before it decodes, and decodes all the same.",
        matters="It writes into pages that it has given back, which are another request's by then.",
        killed_by="liveness",
        code="KV402",
    ),
)
