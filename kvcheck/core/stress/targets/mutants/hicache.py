"""Bugs b and d put back, others of their class, and caches that lose hits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Lane, Signal
from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.hicache.movement import Gap, Movement
from kvcheck.core.cache.hicache.node import Node, SpaceCopy, Transfer
from kvcheck.core.cache.hicache.radix_tree import Match, Tokens
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.cache.pools.buffers import BufferSet
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED

INDEX = "index_k_with_scale"


class UngatedReader(BufferSet):
    piece = ""

    def read_view(self, name: str, layers: Sequence[int], lane: Lane, *, piece: str = "") -> torch.Tensor:
        if name == INDEX and piece == self.piece and lane.name == "forward":
            return self._words[name]
        return super().read_view(name, layers, lane, piece=piece)


class UngatedKeyReader(UngatedReader):
    piece = "key"


class UngatedScaleReader(UngatedReader):
    piece = "scale"


class UnguardedReplayPool(KVPool):
    def before_replay(self, lane: Lane) -> None:
        """No wait."""


class NeighbourGate(LayerGate):
    def _events(self, producer: int, layer: int) -> tuple[Signal, ...]:
        return super()._events(producer, max(0, layer - 1))


class WrongEntryGate(LayerGate):
    def _waited_for(self) -> list[int]:
        return [(producer - 1) % len(self.ring) for producer in super()._waited_for()]


class LoadLaneGate(LayerGate):
    def _waiting_lane(self, lane: Lane) -> Lane:
        return self._backend.lane("hicache.h2d.0")


class EagerRing(LayerGate):
    @property
    def has_room(self) -> bool:
        return True


class UnorderedBackup(TransferController):
    def _behind_forward(self) -> tuple[Signal, ...]:
        return ()


class KvAloneController(TransferController):
    def _acknowledged_by(self, transfer: Transfer) -> tuple[Signal, ...]:
        return transfer.done[:1]


class InPlaceController(TransferController):
    def move(self, copies: tuple[SpaceCopy, ...]) -> tuple[SpaceCopy, ...]:
        if self.host.method == "direct":
            for copy in copies:
                order = np.argsort(copy.host, kind="stable")
                for ids in (copy.host, copy.device):
                    ids.setflags(write=True)
                    ids[:] = ids[order]
        return copies


class NoLoadPin(Movement):
    def _pin(self, transfer: Transfer) -> None:
        if transfer.kind != "load":
            super()._pin(transfer)

    def _unpin(self, transfer: Transfer) -> None:
        if transfer.kind != "load":
            super()._unpin(transfer)


class NoBackupPin(Movement):
    def _pin(self, transfer: Transfer) -> None:
        if transfer.kind != "backup":
            super()._pin(transfer)

    def _unpin(self, transfer: Transfer) -> None:
        if transfer.kind != "backup":
            super()._unpin(transfer)


class NoPutPin(StorageTier):
    """A put pins the root, which is never evicted, in the place of its pages."""

    def store(self, node: Node, request: int) -> None:
        begun = len(self._writes)
        super().store(node, request)
        for write in self._writes[begun:]:
            self._tree.unlock_host(node)
            write.node = self._tree.root
            self._tree.lock_host(write.node)


class KeptLock(Movement):
    def _abandon(self, transfer: Transfer) -> None:
        """Nothing is undone."""


class QueueView(Movement):
    """A node keeps a view of the tensor that is reused for the next operation's ids."""

    _queue: IndexArray = np.zeros(0, dtype=np.int64)

    def _host_ids(self, space: str, count: int, request: int) -> IndexArray | None:
        ids = super()._host_ids(space, count, request)
        if ids is None or space != "full":
            return ids
        if len(self._queue) < count:
            self._queue = np.zeros(4096, dtype=np.int64)
        self._queue[:count] = ids
        return self._queue[:count]

    def _place_host(self, node: Node, space: str, host: IndexArray) -> None:
        if space == "full":
            node.host.full = host
        else:
            super()._place_host(node, space, host)


class TwiceFreedHost(Residency):
    def _free_host(self, space: str, ids: IndexArray) -> None:
        super()._free_host(space, ids)
        super()._free_host(space, ids)


class MostRecentFirst(Residency):
    def device_victim(self, space: str, spared: Iterable[Node] = ()) -> Node | None:
        order = self._order
        self._order = lambda node: tuple(-each for each in order(node))
        victim = super().device_victim(space, spared)
        self._order = order
        return victim


class HalvedHostHits(HiCache):
    def _adopt(self, holding: Holding, match: Match) -> None:
        kept = match.pages - (match.pages - match.device_pages + 1) // 2
        if kept:
            pages = np.concatenate([node.device.ids("full") for node in match.nodes])
            self._pool.adopt(holding, pages[:kept], np.zeros(0, dtype=np.int64))


class SkippedBackup(Movement):
    def back_up_when_due(self, node: Node, request: int) -> None:
        if node.ordinal % 2:
            super().back_up_when_due(node, request)


class NoHostEviction(Movement):
    def _host_ids(self, space: str, count: int, request: int) -> IndexArray | None:
        return self.controller.host.allocators[space].allocate(count, request)


class NoDeviceEviction(Movement):
    def _device_ids(self, gaps: list[Gap], request: int) -> list[IndexArray] | None:
        self._make_room = lambda space, count: 0
        return super()._device_ids(gaps, request)


class NoPrefetch(StorageTier):
    def begin(self, tokens: Tokens, request: int) -> None:
        """Nothing."""


_READ = "SGLang #22811 (index reads without the layer wait)"
_HAZARD = "a hazard of the same family"


_EARLY = "Attention or the indexer works on what was in the page before: another request's prefix, in a few answers."
_SLOW = "Prompts are computed that the cache holds; no answer is wrong, and the time to the first token goes up."
_REUSED = "The copy carries another request's bytes into the cache, where every later hit reads them."

_mutant = partial(
    Mutant,
    bug="b",
    scenario="hicache",
    shape="glm-5.1-tiny",
    killed_by="ordering",
    code="KV201",
    example=_HAZARD,
)
HICACHE = (
    _mutant(
        name="index-key-reader-without-wait",
        parts=replace(FIXED, buffers=UngatedKeyReader),
        shows="Index keys of a layer are read before that layer has been loaded.",
        matters=_EARLY,
        example=_READ,
    ),
    _mutant(
        name="index-scale-reader-without-wait",
        parts=replace(FIXED, buffers=UngatedScaleReader),
        shows="Index scales of a layer are read before that layer has been loaded.",
        matters=_EARLY,
        example=_READ,
    ),
    _mutant(
        name="index-pair-reader-without-wait",
        parts=replace(FIXED, buffers=UngatedReader),
        shows="The fused reader takes keys and scales before the layer has been loaded.",
        matters=_EARLY,
        example=_READ,
    ),
    _mutant(
        name="replay-without-whole-wait",
        parts=replace(FIXED, pool=UnguardedReplayPool),
        shows="A captured graph is replayed while the load of what it reads is in flight.",
        matters=_EARLY,
        shape="llama-3-tiny",
        example="SGLang's open note: no graph replay while a host load is pending",
    ),
    _mutant(
        name="gate-waits-neighbour-layer",
        parts=replace(FIXED, gate=NeighbourGate),
        shows="A read of layer l waits for the load of layer l - 1.",
        matters=_EARLY,
        shape="llama-3-tiny",
    ),
    _mutant(
        name="gate-waits-wrong-entry",
        parts=replace(FIXED, gate=WrongEntryGate),
        shows="A read waits for a load other than the one of its pages.",
        matters=_EARLY,
        shape="llama-3-tiny",
    ),
    _mutant(
        name="gate-waits-on-load-lane",
        parts=replace(FIXED, gate=LoadLaneGate),
        shows="The wait is queued on the lane that loads, so the reader goes on.",
        matters=_EARLY,
        shape="llama-3-tiny",
    ),
    _mutant(
        name="ring-rearmed-early",
        parts=replace(FIXED, gate=EagerRing),
        shows="An entry of the ring stands for two loads; when the first ends, readers of the second stop waiting.",
        matters=_EARLY,
        shape="llama-3-tiny",
    ),
    _mutant(
        name="load-without-pin",
        parts=replace(FIXED, movement=NoLoadPin),
        shows="Host pages are evicted and overwritten while a load still reads them.",
        matters=_REUSED,
        shape="deepseek-v3-tiny",
        code="KV202",
    ),
    _mutant(
        name="write-back-without-pin",
        parts=replace(FIXED, movement=NoBackupPin),
        shows="Device pages are evicted and reused while their backup still reads them.",
        matters=_REUSED,
        shape="llama-3-tiny",
        code="KV202",
    ),
    _mutant(
        name="put-without-pin",
        parts=replace(FIXED, storage=NoPutPin),
        shows="Host pages are evicted and overwritten while a put into the page store still reads them.",
        matters="The store keeps another prefix's bytes under this prefix's key, for every engine that fetches them.",
        bug="d",
        shape="llama-3-tiny",
        code="KV202",
    ),
    _mutant(
        name="backup-before-forward",
        parts=replace(FIXED, controller=UnorderedBackup),
        shows="A backup reads pages that the forward pass is still writing.",
        matters="The host keeps half a page; every later hit on it reads old bytes.",
        shape="llama-3-tiny",
    ),
    _mutant(
        name="move-changes-indices",
        parts=replace(FIXED, controller=InPlaceController),
        shows="A transfer sorts the index values it was given in place.",
        matters="The tree node that shares them now names other pages, and evicts or loads those.",
        bug="d",
        killed_by="residency",
        code="KV303",
        example="SGLang #23427 (move_hybrid_indices)",
    ),
    _mutant(
        name="node-keeps-queue-view",
        parts=replace(FIXED, movement=QueueView),
        shows="A node's host pages change when the next operation is queued.",
        matters="A hit loads another prefix's pages; an eviction frees them under their owner.",
        bug="d",
        shape="llama-3-tiny",
        killed_by="residency",
        code="KV303",
        example="SGLang #23429 (device tensors in tree nodes)",
    ),
    _mutant(
        name="host-slot-freed-twice",
        parts=replace(FIXED, residency=TwiceFreedHost),
        shows="An evicted node's host pages are given back twice.",
        matters="Two prefixes get the same host page and overwrite each other.",
        bug="d",
        shape="llama-3-tiny",
        killed_by="liveness",
        code="KV402",
    ),
    _mutant(
        name="ack-by-kv-alone",
        parts=replace(FIXED, controller=KvAloneController),
        shows="A copy is acknowledged when its KV rows have landed, whatever its companions do.",
        matters="Pages are written again under a copy, and readers stop waiting for index pages that are "
        "still on their way.",
        code="KV202",
    ),
    _mutant(
        name="partial-load-keeps-lock",
        parts=replace(FIXED, movement=KeptLock),
        shows="A load-back that does not fit keeps the locks it took.",
        matters="The prefix can never be evicted again; the pool fills up until nothing is admitted.",
        scenario="hicache-hybrid",
        shape="qwen3-next-tiny",
        killed_by="accounting",
        code="KV401",
    ),
    _mutant(
        name="eviction-most-recent-first",
        parts=replace(FIXED, residency=MostRecentFirst),
        shows="The device gives up the prefix that was used last.",
        matters="The prefixes that come back soonest are the ones that are gone; every answer is right, and slow.",
        shape="llama-3-tiny",
        killed_by="caching",
        code="KV701",
    ),
    _mutant(
        name="host-hits-halved",
        parts=replace(FIXED, cache=HalvedHostHits),
        shows="Half of the pages that were loaded back for a request are computed again.",
        matters=_SLOW,
        shape="llama-3-tiny",
        killed_by="caching",
        code="KV703",
    ),
    _mutant(
        name="backup-of-every-second-node",
        parts=replace(FIXED, movement=SkippedBackup),
        shows="Every second node is never backed up when its use is reached.",
        matters=_SLOW,
        shape="llama-3-tiny",
        killed_by="caching",
        code="KV704",
    ),
    _mutant(
        name="backup-without-eviction",
        parts=replace(FIXED, movement=NoHostEviction),
        shows="A backup is given up once the host is full, though prefixes there could be evicted.",
        matters="The host tier keeps what came first for ever, and the hits on it go down to none.",
        shape="llama-3-tiny",
        killed_by="caching",
        code="KV702",
    ),
    _mutant(
        name="load-without-eviction",
        parts=replace(FIXED, movement=NoDeviceEviction),
        shows="A load is given up where the device is full, though prefixes there could be evicted.",
        matters=_SLOW,
        shape="llama-3-tiny",
        killed_by="caching",
        code="KV702",
    ),
    _mutant(
        name="prefetch-skipped",
        parts=replace(FIXED, storage=NoPrefetch),
        shows="Pages that only the store holds are never fetched.",
        matters=_SLOW,
        shape="llama-3-tiny",
        killed_by="caching",
        code="KV704",
    ),
)
