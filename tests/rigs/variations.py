"""Legal variations of the product: other orders, groupings, waits and choices, with every contract kept.

Invariants:
- Each variation counts in TAKEN how often it took place.
- What it changes is never an edge that somebody needs: no oracle may say anything about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from kvcheck.core.cache.backend.backend import Footprint, Lane, Operation, Signal
from kvcheck.core.cache.hicache.cache import WRITE_BACK, HiCache, Lease
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.hicache.movement import Movement
from kvcheck.core.cache.hicache.node import Node, SpaceCopy
from kvcheck.core.cache.hicache.radix_tree import Offer, PrefixTree, Taken, Tokens
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import Given, Holding, KVPool
from kvcheck.core.cache.scheduler.decoder import Decoder
from kvcheck.core.cache.transfer.metadata import MetadataField
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED, Engine, FirstWords, HostTier, Setup, TargetParts
from kvcheck.core.stress.workload.decoder import ContentDecoder
from kvcheck.core.stress.workload.passes import PassPlan
from kvcheck.kernels.page_copy import fill_torch

TAKEN: Counter[str] = Counter()
"""How often each variation took place."""


# The gate


class WholeLoadGate(LayerGate):
    """A read waits for all layers of its loads instead of its own."""

    def _events(self, producer: int, layer: int) -> tuple[Signal, ...]:
        TAKEN["whole-load"] += 1
        return tuple(signal for each in self.ring[producer].layers for signal in each)


class AllEntriesGate(LayerGate):
    """A read waits for every load in flight, its own or not."""

    def _waited_for(self) -> list[int]:
        TAKEN["all-loads"] += bool(super()._waited_for())
        return [producer for producer, entry in enumerate(self.ring) if not entry.finished]


# Copies


class OneLaneController(TransferController):
    """All loads go through one lane instead of two pairs, as it says."""

    @property
    def load_lanes(self) -> tuple[tuple[str, ...], ...]:
        return ((super().load_lanes[0][0],),)

    def start_loads(self) -> None:
        lane = self._h2d[0][0]
        self._h2d = ((lane, lane),) * len(self._h2d)
        TAKEN["one-load-lane"] += bool(self._queued)
        super().start_loads()


class OtherOrderController(TransferController):
    """Buffers and copies of one layer, which are independent, are copied in the other order."""

    def _groups(self, space: str, lanes: tuple[Lane, ...]) -> list[tuple[list[str], Lane]]:
        TAKEN["other-order"] += 1
        return [(names[::-1], lane) for names, lane in reversed(super()._groups(space, lanes))]

    def move(self, copies: tuple[SpaceCopy, ...]) -> tuple[SpaceCopy, ...]:
        return super().move(copies)[::-1]


class UnmergedController(TransferController):
    """Every request's load has a ring entry of its own, as far as there are entries."""

    def start_loads(self) -> None:
        waiting, self._queued = self._queued, []
        TAKEN["unmerged"] += len(waiting) > 1
        while waiting:
            self._queued = [waiting[0]]
            super().start_loads()
            if self._queued:
                break
            waiting = waiting[1:]
        self._queued = waiting


# The cache


class LateAckCache(HiCache):
    """Only every second poll acknowledges anything."""

    def poll(self) -> bool:
        self._polls = getattr(self, "_polls", 0) + 1
        if self._polls % 2:
            TAKEN["late-ack"] += bool(self.controller and (self.controller.backups or self.controller.loads))
            return False
        return super().poll()


class PollingWriteBack(HiCache):
    """Write-back asks once whether the copy is through, and takes another victim where it is not."""

    def _write_back(self, node: Node) -> bool:
        if self.movement is None or self.movement.uses is not None or not self.movement.back_up(node, WRITE_BACK):
            return False
        TAKEN["polling-write-back"] += 1
        self.movement.poll()
        return node.is_backed


class EarlyBackupCache(HiCache):
    """The page behind the cached prompt is read for a backup when it is half full; decoding appends to it meanwhile."""

    def keep(self, lease: Lease, tokens: Tokens) -> None:
        super().keep(lease, tokens)
        holding, size = lease.holding, self._pool.page_size
        filled = holding.committed - len(tokens)
        if not filled or self.controller is None:
            return
        page = holding.pages[len(tokens) // size : len(tokens) // size + 1]
        owner = self._pool.sets["full"]
        names = tuple(each.name for each in owner.spec.buffers if each.rows is Granularity.TOKEN)
        lane, layers = self._backend.lane("hicache.d2h"), (0, len(owner.spec.layers))
        rows = slice(int(page[0]) * size, int(page[0]) * size + filled)
        views = [owner.read_view(name, (), lane)[:, rows] for name in names]
        kept: list[object] = []
        done = self._backend.submit(
            Operation("hicache.early", (lambda: kept.extend(view.clone() for view in views),)),
            lane=lane,
            reads=(Footprint("full", names, layers, page.copy(), np.array([[0, filled]], dtype=np.int64)),),
            after=self.controller._behind_forward(),
        )
        early: dict[int, list[Signal]] = self.__dict__.setdefault("_early", {})
        early.setdefault(holding.request, []).append(done)

    def finish(self, lease: Lease, tokens: Tokens) -> Given:
        self._join(lease)
        return super().finish(lease, tokens)

    def release(self, lease: Lease) -> None:
        self._join(lease)
        super().release(lease)

    def drop(self, lease: Lease) -> None:
        self._join(lease)
        super().drop(lease)

    def _join(self, lease: Lease) -> None:
        """The page is given away only after it has been read."""
        for signal in self.__dict__.get("_early", {}).pop(lease.holding.request, ()):
            TAKEN["early-backup"] += 1
            self._backend.wait(signal)


class YoungestHost(Residency):
    """The host gives up its youngest candidate instead of the oldest, and declares no order."""

    @property
    def orders(self) -> dict[str, str]:
        return {"device": self._declared["device"]}

    @orders.setter
    def orders(self, value: dict[str, str]) -> None:
        self._declared = value

    def host_victim(self, space: str) -> Node | None:
        order = self._order
        self._order = lambda node: tuple(-each for each in order(node))
        victim = super().host_victim(space)
        self._order = order
        TAKEN["youngest-host"] += victim is not None
        return victim


class OtherTies(Residency):
    """Of nodes with equal use, hits or priority the youngest goes first, on both tiers."""

    def device_victim(self, space: str, spared: Iterable[Node] = ()) -> Node | None:
        with self._other_ties():
            victim = super().device_victim(space, spared)
        TAKEN["other-ties"] += victim is not None
        return victim

    def host_victim(self, space: str) -> Node | None:
        with self._other_ties():
            return super().host_victim(space)

    @contextmanager
    def _other_ties(self) -> Iterator[None]:
        order = self._order
        self._order = lambda node: (order(node)[0], *(-each for each in order(node)[1:]))
        yield
        self._order = order


class LookupsAloneUse(PrefixTree):
    """A prefix that is offered once more is not used by that: only lookups make it younger."""

    def insert(self, tokens: Tokens, offer: Offer, *, priority: int = 0) -> Taken:
        before = {node: node.last_used for node in self.nodes(on_device=True)}
        taken = super().insert(tokens, offer, priority=priority)
        for node, last_used in before.items():
            TAKEN["lookups-alone-use"] += node.last_used != last_used
            node.last_used = last_used
        return taken


class OffersAreUses(PrefixTree):
    """A prefix that is offered once more is used by that as well, as a lookup uses it."""

    def insert(self, tokens: Tokens, offer: Offer, *, priority: int = 0) -> Taken:
        known = [node for node in self._walk(self.keys(tokens)) if node.device.is_live]
        for node in known:
            TAKEN["offers-are-uses"] += 1
            node.hits += 1
            node.priority = max(node.priority, priority)
        return super().insert(tokens, offer, priority=priority)


class LateBackups(Movement):
    """Backups that are due wait for the next poll."""

    def back_up_when_due(self, node: Node, request: int) -> None:
        self.__dict__.setdefault("_put_off", {})[node] = request

    def poll(self) -> bool:
        waiting = self.__dict__.pop("_put_off", {})
        for node, request in waiting.items():
            if node.parent is not None and node.parent.children.get(node.keys[0]) is node:
                TAKEN["late-backup"] += 1
                for each in reversed([*node.path()]):  # it may have been split meanwhile
                    super().back_up_when_due(each, request)
        return super().poll()


# Pools and readers


class ScrubbingPool(KVPool):
    """A request's pages are cleared on the forward lane when it gives them back; the host does not wait for that."""

    def close(self, holding: Holding, *, given: Given | None = None) -> None:
        own = np.arange(len(holding.pages)) >= holding.shared
        pages = holding.pages[own if given is None else own & ~given.full]
        if holding.is_open:
            self.check_open(holding)  # what is refused is not cleared
            self.allocators["full"].check_freeable(pages)
            self.allocators["full"].check_owned(pages, holding.request)
            if self.has_window:
                mine = own[: len(holding.window_pages)] & (holding.window_pages > 0)
                mine &= True if given is None else ~given.window[: len(mine)]
                self.allocators["window"].check_owned(holding.window_pages[mine], holding.request)
        if holding.is_open and len(pages):
            TAKEN["stream-ordered-reuse"] += 1
            owner = self.sets["full"]
            chunks = tuple(
                self._scrub(owner.write_view(each.name), each, int(page))
                for each in owner.spec.buffers
                for page in pages
            )
            names = tuple(each.name for each in owner.spec.buffers)
            touched = Footprint("full", names, (0, len(owner.spec.layers)), pages.copy())
            self.backend.submit(Operation("pool.scrub", chunks), lane=self.forward, writes=(touched,))
        super().close(holding, given=given)

    def _scrub(self, words: object, buffer: BufferSpec, page: int) -> Callable[[], None]:
        size = self.page_size if buffer.rows is Granularity.TOKEN else 1
        return lambda: fill_torch(words[:, page * size : (page + 1) * size], 0)  # type: ignore[index]


class TwiceReader(ContentDecoder):
    def _submit(self, name: str, plan: PassPlan, *args: object, **kwargs: object) -> None:
        TAKEN["reads-twice"] += 1
        super()._submit(name, plan, *args, **kwargs)  # type: ignore[arg-type]
        super()._submit(name, plan, *args, **kwargs)  # type: ignore[arg-type]


class SecondLaneReader(ContentDecoder):
    """A second reader, as a draft model is, reads every layer on a lane of its own, with waits of its own.

    It stays away from passes that are replayed as a graph, which is one of one lane.
    """

    def _submit(self, name: str, plan: PassPlan, *args: object, **kwargs: object) -> None:
        if self._is_replayed:
            super()._submit(name, plan, *args, **kwargs)  # type: ignore[arg-type]
            return
        TAKEN["second-lane-reader"] += 1
        forward, draft = self._pool.forward, self._backend.lane("draft")
        self._cross(forward, draft)
        self._pool.forward = draft
        super()._submit(f"draft.{name}", plan, *args, **kwargs)  # type: ignore[arg-type]
        self._pool.forward = forward
        self._cross(draft, forward)
        super()._submit(name, plan, *args, **kwargs)  # type: ignore[arg-type]

    def _cross(self, source: Lane, target: Lane) -> None:
        mark = self._backend.signal()
        self._backend.record(mark, lane=source)
        self._backend.wait(mark, lane=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A target that differs from the fixed one in a legal way. tier: changes the host tier of each schedule."""

    parts: TargetParts = FIXED
    tier: Callable[[HostTier], HostTier] = lambda tier: tier
    decoder: type[ContentDecoder] = ContentDecoder
    schedules: tuple[int, ...] = (0, 1, 4, 7)


class VariedTarget(BuiltinTarget):
    variation = Variation()

    def build(self, setup: Setup) -> Engine:
        assert setup.host is not None

        def decoder(pool: KVPool, fields: tuple[MetadataField, ...], first_words: FirstWords) -> Decoder:
            made = setup.decoder(pool, fields, first_words)
            if self.variation.decoder is not ContentDecoder:
                made.__class__ = self.variation.decoder  # the scenario keeps the one that it made
            return made

        host = self.variation.tier(setup.host)
        return BuiltinTarget(self.variation.parts).build(replace(setup, host=host, decoder=decoder))


def ring_of_8(tier: HostTier) -> HostTier:
    TAKEN["ring-of-8"] += 1
    return replace(tier, ring=8)


def write_back(tier: HostTier) -> HostTier:
    return replace(tier, write_policy="write-back")


VARIATIONS: dict[str, Variation] = {
    "whole-load": Variation(parts=replace(FIXED, gate=WholeLoadGate)),
    "all-loads": Variation(parts=replace(FIXED, gate=AllEntriesGate)),
    "one-load-lane": Variation(parts=replace(FIXED, controller=OneLaneController)),
    "other-order": Variation(parts=replace(FIXED, controller=OtherOrderController)),
    "unmerged": Variation(parts=replace(FIXED, controller=UnmergedController)),
    "late-ack": Variation(parts=replace(FIXED, cache=LateAckCache)),
    "polling-write-back": Variation(parts=replace(FIXED, cache=PollingWriteBack), tier=write_back),
    "early-backup": Variation(parts=replace(FIXED, cache=EarlyBackupCache), schedules=(1, 3, 6, 7)),
    "youngest-host": Variation(parts=replace(FIXED, residency=YoungestHost)),
    "other-ties": Variation(parts=replace(FIXED, residency=OtherTies)),
    "lookups-alone-use": Variation(parts=replace(FIXED, tree=LookupsAloneUse), schedules=(0, 1, 3, 4)),
    "offers-are-uses": Variation(parts=replace(FIXED, tree=OffersAreUses), schedules=(0, 2, 5, 7)),
    "late-backup": Variation(parts=replace(FIXED, movement=LateBackups)),
    "stream-ordered-reuse": Variation(parts=replace(FIXED, pool=ScrubbingPool), schedules=(1, 2, 6, 7)),
    "reads-twice": Variation(decoder=TwiceReader),
    "second-lane-reader": Variation(decoder=SecondLaneReader),
    "ring-of-8": Variation(tier=ring_of_8),
}
