"""The builtin target: kvcheck's own complete implementation, assembled from a table of parts.

Invariants:
- FIXED names every part; a mutant is FIXED with one part replaced, and nothing else differs.
- Watching is done from outside the parts: they contain no reporting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcheck.core.backend.backend import Signal
from kvcheck.core.hicache.cache import CacheConfig, HiCache
from kvcheck.core.hicache.controller import Leg, TransferController
from kvcheck.core.hicache.eviction import Residency
from kvcheck.core.hicache.host_pool import HostPool
from kvcheck.core.hicache.prefetch import StorageTier
from kvcheck.core.hicache.radix_tree import PrefixTree
from kvcheck.core.hicache.storage import Namespace
from kvcheck.core.offload import Offload, OffloadedKV
from kvcheck.core.paging import IndexArray, pages_for
from kvcheck.core.pools.buffers import BufferSpec, Granularity
from kvcheck.core.pools.pool import Holding, KVPool
from kvcheck.core.scheduler.decoder import Decoder
from kvcheck.core.scheduler.request import Generation, StepReport
from kvcheck.core.scheduler.scheduler import EngineParts, Scheduler
from kvcheck.core.targets.target import Engine, EventSink, Setup, SpaceCount, TierInspector, digest
from kvcheck.core.transfer import TRANSPORTS
from kvcheck.core.transfer.metadata import MetadataBuffers, MetadataRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The classes an engine is made of."""

    pool: type[KVPool] = KVPool
    offload: type[Offload] = Offload
    metadata: type[MetadataBuffers] = MetadataBuffers
    scheduler: type[Scheduler] = Scheduler
    tree: type[PrefixTree] = PrefixTree
    residency: type[Residency] = Residency
    controller: type[TransferController] = TransferController
    cache: type[HiCache] = HiCache
    storage: type[StorageTier] = StorageTier


FIXED = Parts()


class BuiltinTarget:
    """Builds engines from parts."""

    name = "builtin"
    capabilities = frozenset({"retract-resume", "prefix-tree", "hicache", "metadata", "loopback"})

    def __init__(self, parts: Parts = FIXED) -> None:
        self._parts = parts

    def build(self, setup: Setup) -> Engine:
        """Assemble one engine."""
        return BuiltinEngine(self._parts, setup)


class BuiltinEngine:
    """A scheduler with its parts, watched."""

    def __init__(self, parts: Parts, setup: Setup) -> None:
        backend, sink = setup.backend, setup.sink
        self._watch = _Watch(sink)
        self.pool = parts.pool(setup.shape, setup.sizes, backend=backend, listener=self._watch)
        self._bystander = _Bystander(self.pool, sink)
        lane = backend.lane("forward")
        ends = [
            parts.metadata(
                end,
                slots=setup.metadata_slots,
                hidden_size=setup.shape.hidden_size,
                backend=backend,
                lane=lane,
                listener=self._watch,
            )
            for end in ("prefill", "decode")
        ]
        self._watch.metadata = {end.space: end for end in ends}
        decoder = setup.decoder(self.pool, ends[1].fields)
        self._watch.inspector = setup.inspector() if setup.inspector is not None else None
        self.host: HostPool | None = None
        self.cache = self._make_cache(parts, setup)
        self.scheduler = parts.scheduler(
            EngineParts(
                backend=backend,
                pool=self.pool,
                offload=WatchedOffload(parts.offload(self.pool, backend), sink),
                cache=self.cache,
                prefill_metadata=ends[0],
                decode_metadata=ends[1],
                transport=TRANSPORTS.load(setup.transport)(backend, ends[0], ends[1]),
                decoder=WatchedDecoder(decoder, ends[1], sink),
            ),
            setup.config,
        )
        self._ends = ends

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do."""
        return self.scheduler.is_idle

    def submit(self, generation: Generation) -> None:
        """Queue a request."""
        self.scheduler.submit(generation)

    def abort(self, request: int) -> bool:
        """End a request wherever it is."""
        return self.scheduler.abort(request)

    def step(self) -> StepReport:
        """One scheduling round."""
        return self.scheduler.step()

    def counts(self) -> tuple[SpaceCount, ...]:
        """Accounting of pages, slots, rows and metadata slots."""
        cache = self.cache
        if cache is not None:
            cache.settle()
        rows = [
            SpaceCount(name, each.available, cache.cached("device", name) if cache is not None else 0, each.count)
            for name, each in self.pool.allocators.items()
        ]
        if self.host is not None and cache is not None:
            rows += [
                SpaceCount(each.space, each.available, cache.cached("host", name), each.count)
                for name, each in self.host.allocators.items()
            ]
        if cache is not None:
            # Idle, so every lock that is left was forgotten: free and cached of them must be all.
            rows.append(SpaceCount("locks on cached prefixes", 0, 0, cache.locked()))
        rows += [SpaceCount(end.space, end.slots.available, 0, end.slots.count) for end in self._ends]
        return tuple(rows)

    def evictions(self) -> int:
        """Prefix tree nodes evicted from the device."""
        return self.cache.residency.device_evictions if self.cache is not None else 0

    def close(self) -> None:
        """Look at what nobody may have touched, then give everything back."""
        if self.cache is not None:
            self.cache.close()
        self.scheduler.parts.backend.drain()
        self._bystander.look()
        self.scheduler.close()
        if self.host is not None:
            self.host.free()

    def _make_cache(self, parts: Parts, setup: Setup) -> HiCache | None:
        """The prefix cache: both tiers with a host tier; else the device tier, for pools of one paged space."""
        tier = setup.host
        if not setup.share_prefixes or (tier is None and (self.pool.has_window or self.pool.has_state)):
            return None
        controller = None
        config = CacheConfig()
        if tier is not None:
            self.host = HostPool(
                self.pool.specs,
                units=tier.units,
                page_size=self.pool.page_size,
                layout=tier.layout,
                method=tier.method,
                backend=setup.backend,
                listener=self._watch,
            )
            self._watch.host = self.host
            config = CacheConfig(
                write_policy=tier.write_policy, order=tier.order, ack_period=tier.ack_period, ring=tier.ring
            )
            controller = parts.controller(self.pool, self.host, setup.backend, ring=config.ring)
        window = setup.shape.window if self.pool.has_window else 0
        tree = parts.tree(self.pool.page_size, window=window, has_state=self.pool.has_state)
        residency = parts.residency(tree, self.pool, self.host, order=config.order, listener=self._watch)
        cache = parts.cache(tree, residency, controller, setup.backend, config=config, listener=self._watch)
        if tier is not None and tier.store is not None and self.host is not None:
            namespace = Namespace(
                model=setup.shape.name,
                dtype=str(setup.shape.kv_dtype),
                layout="units",  # what HostPool.pack makes does not depend on the host's layout
                page_size=setup.shape.page_size,
                rank=0,
                ranks=1,
            )
            cache.connect(
                parts.storage(
                    residency,
                    self.host,
                    tier.store,
                    namespace,
                    setup.backend,
                    window_pages=pages_for(window - 1, self.pool.page_size) if window else 0,
                    has_state=self.pool.has_state,
                    listener=self._watch,
                )
            )
        return cache


class _Watch:
    """Passes events on; looks at metadata slots when they are handed out, and at host pages when they have arrived."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self.metadata: dict[str, MetadataBuffers] = {}
        self.host: HostPool | None = None
        self.inspector: TierInspector | None = None
        self.looked_up = sink.looked_up
        self.tier_changed = sink.tier_changed
        self.evicted = sink.evicted
        self._moving: dict[int, bytes] = {}

    def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
        self._sink.allocated(space, ids, owner)
        if (end := self.metadata.get(space)) is not None:
            slot = int(ids[0])
            self._sink.leased(
                request=owner, space=space, slot=slot, row=end.row_view(slot).detach().cpu(), fields=end.fields
            )

    def freed(self, space: str, ids: IndexArray) -> None:
        self._sink.freed(space, ids)

    def fetched(self, *, request: int, legs: tuple[Leg, ...]) -> None:
        if self.host is not None and self.inspector is not None:
            for leg in legs:
                self.inspector.inspect(self.host, leg.space, leg.chain, leg.host, tier="storage")
        pages = sum(len(leg.host) for leg in legs if leg.space == "full")
        self._sink.transferred(kind="prefetch", request=request, pages=pages, frozen=True)

    def moving(self, *, number: int, legs: tuple[Leg, ...]) -> None:
        self._moving[number] = _index_values(legs)

    def computed(self, *, request: int, chain: tuple[bytes, ...]) -> None:
        if self.inspector is not None:
            self.inspector.computed(request, chain)

    def transferred(self, *, number: int, kind: str, request: int, legs: tuple[Leg, ...]) -> None:
        if kind == "backup" and self.host is not None and self.inspector is not None:
            for leg in legs:
                self.inspector.inspect(self.host, leg.space, leg.chain, leg.host, tier="host")
        pages = sum(len(leg.host) for leg in legs if leg.space == "full")
        frozen = self._moving.pop(number, None) == _index_values(legs)
        self._sink.transferred(kind=kind, request=request, pages=pages, frozen=frozen)


class _Bystander:
    """Looks at what no request owns: padding units must be as they were made, and maps empty when all is idle."""

    def __init__(self, pool: KVPool, sink: EventSink) -> None:
        self._pool = pool
        self._sink = sink
        self._made = {(space, buffer.name): self._padding(space, buffer) for space, buffer in pool.buffers()}

    def look(self) -> None:
        """Report; call when idle, before the memory is given back."""
        for space, buffer in self._pool.buffers():
            self._report_padding(space, buffer)
        if self._pool.has_window:
            entries = self._pool.tables["full_to_window"].read_view()[0].cpu()
            held = torch.nonzero(entries).view(-1)
            pairs = zip(held.tolist(), entries[held].tolist(), strict=True)
            self._sink.mapped(table="full_to_window", entries=tuple(pairs))

    def _padding(self, space: str, buffer: BufferSpec) -> torch.Tensor:
        """A copy of page or slot 0, [L, rows, W]."""
        rows = self._pool.page_size if buffer.rows is Granularity.TOKEN else 1
        layers = range(len(self._pool.sets[space].spec.layers))
        return self._pool.sets[space].read_view(buffer.name, layers, self._pool.forward)[:, :rows].cpu().clone()

    def _report_padding(self, space: str, buffer: BufferSpec) -> None:
        seen, made = self._padding(space, buffer), self._made[space, buffer.name]
        layer, row, at, words = 0, 0, 0, torch.zeros(0, dtype=torch.int64)
        if not torch.equal(seen, made):
            layer, row, at = torch.nonzero(seen != made)[0].tolist()
            words = seen[layer, row]
        piece = next((p for p in reversed(buffer.pieces) if p.offset <= at * 8), None)
        self._sink.padding(
            space=space,
            buffer=buffer.name,
            piece=piece.name if piece is not None else "",
            layer=self._pool.sets[space].spec.layers[layer],
            row=row,
            words=tuple(words[:64].tolist()),
        )


class WatchedOffload(Offload):
    """An Offload that reports what it saved and restored, and whether the value is owned."""

    def __init__(self, inner: Offload, sink: EventSink) -> None:
        self.pool = inner.pool
        self._inner = inner
        self._sink = sink

    def save(self, holding: Holding) -> OffloadedKV:
        """Save, then compare storages and index values."""
        before = digest(holding)
        value = self._inner.save(holding)
        request = holding.request
        self._sink.descriptor(request=request, what="offload.save", before=before, after=digest(holding))
        self._report_storage(value, holding)
        self._sink.saved(
            request=request,
            tokens=value.tokens,
            buffers=tuple(f"{kept.space}.{kept.name}" for kept in value.buffers),
            table=self._table_names(),
        )
        return value

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        """Restore, then report pages and buffers."""
        before = digest(holding)
        written = tuple(f"{kept.space}.{kept.name}" for kept in self._inner.restored_buffers(offloaded))
        signal = self._inner.restore(offloaded, holding)
        self._sink.descriptor(request=holding.request, what="offload.restore", before=before, after=digest(holding))
        self._sink.restored(
            request=holding.request,
            tokens=offloaded.tokens,
            pages=self.pool.unit_ids(holding, "full", offloaded.tokens),
            buffers=written,
            table=self._table_names(),
        )
        return signal

    def discard(self, offloaded: OffloadedKV) -> None:
        """Pass on."""
        self._inner.discard(offloaded)

    def _table_names(self) -> tuple[str, ...]:
        return tuple(f"{space}.{buffer.name}" for space, buffer in self.pool.buffers())

    def _report_storage(self, value: OffloadedKV, holding: Holding) -> None:
        for kept in value.buffers:
            first, last = self.pool.sets[kept.space].storage_ranges()[kept.name]
            if kept.words.numel() and first <= kept.words.untyped_storage().data_ptr() < last:
                pages = self.pool.unit_ids(holding, kept.space, value.tokens)
                self._sink.aliased(
                    request=holding.request,
                    what="offloaded KV",
                    buffer=kept.name,
                    page=int(pages[0]) if len(pages) else None,
                )
            else:
                self._sink.owned("offloaded KV")


class WatchedDecoder:
    """A Decoder that looks at metadata rows when requests join."""

    def __init__(self, inner: Decoder, end: MetadataBuffers, sink: EventSink) -> None:
        self._inner = inner
        self._end = end
        self._sink = sink
        self.forward = inner.forward
        self.collect = inner.collect
        self.metadata = inner.metadata

    def join(self, request: int, row: MetadataRow) -> None:
        """Compare storages, then pass on."""
        first, last = self._end.storage_range()
        address = row.packed.data_ptr()
        if first <= address < last:
            slot = (address - first) // self._end.row_bytes
            self._sink.aliased(request=request, what="metadata row", buffer=self._end.space, page=slot)
        else:
            self._sink.owned("metadata row")
        self._inner.join(request, row)


def _index_values(legs: tuple[Leg, ...]) -> bytes:
    """The index values of a transfer, as bytes to compare."""
    return b"|".join(leg.space.encode() + b":" + leg.host.tobytes() + b"," + leg.device.tobytes() for leg in legs)
