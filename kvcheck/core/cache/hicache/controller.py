"""TransferController: copies between the device pool and the host pool, merged, acknowledged in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcheck.core.cache.backend.backend import Backend, Footprint, Lane, Operation, Signal
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.hicache.node import SpaceCopy, Transfer, make_copy, merge
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.pool import KVPool

LOAD_ENGINES = 2
"""Pairs of lanes that loads alternate on, as a device has several copy engines. With one pair, the events of a later
load would imply those of an earlier one, and a gate that waits for the wrong load would be right by accident."""


def leading_reached(backend: Backend, queue: Iterable[Sequence[Signal]]) -> int:
    count = 0
    for signals in queue:
        if not all(backend.query(signal) for signal in signals):
            break
        count += 1
    return count


# queue    load(nodes of A) load(nodes of B)          one request each
# start    one merged Transfer, layer by layer:       h2d.0       L0 L1 L2 ...
#                                                     h2d.0.side  L0 L1 L2 ...   index pages, window, state
# ack      when the last operation of every lane has run, first in, first out
class TransferController:
    def __init__(
        self, pool: KVPool, host: HostPool, backend: Backend, *, ring: int = 3, gate: type[LayerGate] = LayerGate
    ) -> None:
        self.pool = pool
        self.host = host
        self._backend = backend
        self._d2h = (backend.lane("hicache.d2h"), backend.lane("hicache.d2h.side"))
        self._h2d = tuple(
            (backend.lane(f"hicache.h2d.{engine}"), backend.lane(f"hicache.h2d.{engine}.side"))
            for engine in range(LOAD_ENGINES)
        )
        self._started = 0
        self.gate = gate(backend, lanes=2, layers=pool.shape.num_layers, entries=ring)
        pool.connect(self.gate)
        self._queued: list[Transfer] = []
        self.backups: list[Transfer] = []
        self.loads: list[tuple[Transfer, ...]] = []

    @property
    def can_load(self) -> bool:
        return self.gate.has_room

    @property
    def load_lanes(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(lane.name for lane in lanes) for lanes in self._h2d)

    def backup(self, transfer: Transfer) -> None:
        behind = self._behind_forward()
        used = []
        for copy in self.move(transfer.copies):
            for buffers, lane in self._groups(copy.space, self._d2h):
                owner = self.pool.sets[copy.space]
                layers = len(owner.spec.layers)
                words = {name: owner.read_view(name, (), lane) for name in buffers}
                self._backend.submit(
                    Operation(
                        "hicache.backup",
                        self.host.backup_chunks(copy.space, buffers, host=copy.host, device=copy.device, words=words),
                    ),
                    lane=lane,
                    reads=(self._on_device(copy, buffers, (0, layers)),),
                    writes=(self._on_host(copy, buffers, (0, layers)),),
                    after=behind,
                )
                used.append(lane)
        transfer.done = self._marks(used)
        self.backups.append(transfer)

    def queue_load(self, transfer: Transfer) -> None:
        self._queued.append(transfer)

    def start_loads(self) -> None:
        """Merge all queued loads into one. They stay queued while the ring is full."""
        if not self._queued:
            return
        producer = self.gate.begin()
        if producer is None:
            return
        started, self._queued = tuple(self._queued), []
        copies = self.move(merge([copy for transfer in started for copy in transfer.copies]))
        behind = self._behind_forward()
        used: list[Lane] = []
        lanes = self._h2d[self._started % LOAD_ENGINES]
        self._started += 1
        for layer in range(self.pool.shape.num_layers):
            for copy in copies:
                layers = self.pool.sets[copy.space].spec.layers
                if layer in layers:
                    used += self._load_layer(copy, layers.index(layer), behind, lanes)
            self.gate.layer_done(producer, layer, lanes)
        done = self._marks(used)
        for transfer in started:
            transfer.producer, transfer.done = producer, done
        self.loads.append(started)

    def finished_backups(self) -> int:
        return self._finished([(transfer,) for transfer in self.backups])

    def finished_loads(self) -> int:
        return self._finished(self.loads)

    def take_backup(self) -> Transfer:
        return self.backups.pop(0)

    def take_load(self) -> tuple[Transfer, ...]:
        started = self.loads.pop(0)
        assert started[0].producer is not None
        self.gate.retire(started[0].producer)
        return started

    def wait(self, transfer: Transfer) -> None:
        for signal in self._acknowledged_by(transfer):
            self._backend.wait(signal)

    def move(self, copies: tuple[SpaceCopy, ...]) -> tuple[SpaceCopy, ...]:
        """Sort indices for direct copies, so that host pages form runs; never in place.

        SGLang's move_hybrid_indices changed values that nodes keep (#23427, #23429). (mutant: move-changes-indices)
        """
        if self.host.method != "direct":
            return copies
        moved = []
        for copy in copies:
            order = np.argsort(copy.host, kind="stable")
            chain = [copy.chain[at] for at in order]
            ids = copy.host[order], copy.device[order]
            moved.append(make_copy(copy.space, *ids, chain, owners=copy.owners[order]))
        return tuple(moved)

    def _load_layer(
        self, copy: SpaceCopy, local: int, behind: tuple[Signal, ...], lanes: tuple[Lane, ...]
    ) -> list[Lane]:
        used = []
        for buffers, lane in self._groups(copy.space, lanes):
            owner = self.pool.sets[copy.space]
            words = {name: owner.write_view(name) for name in buffers}
            self._backend.submit(
                Operation(
                    "hicache.load",
                    self.host.load_chunks(
                        copy.space, buffers, layer=local, host=copy.host, device=copy.device, words=words
                    ),
                ),
                lane=lane,
                reads=(self._on_host(copy, buffers, (local, local + 1)),),
                writes=(self._on_device(copy, buffers, (local, local + 1)),),
                after=behind,
            )
            used.append(lane)
        return used

    def _on_device(self, copy: SpaceCopy, buffers: Sequence[str], layers: tuple[int, int]) -> Footprint:
        return Footprint(copy.space, tuple(buffers), layers, copy.device, owners=copy.owners)

    def _on_host(self, copy: SpaceCopy, buffers: Sequence[str], layers: tuple[int, int]) -> Footprint:
        return self.host.footprint(copy.space, buffers, copy.host, layers=layers, owners=copy.owners)

    def _groups(self, space: str, lanes: tuple[Lane, ...]) -> list[tuple[list[str], Lane]]:
        """Buffers by lane: token rows of the full space on the first, companions on the second."""
        main: list[str] = []
        side: list[str] = []
        for buffer in self.pool.sets[space].spec.buffers:
            group = main if space == "full" and buffer.rows is Granularity.TOKEN else side
            group.append(buffer.name)
        return [(names, lane) for names, lane in ((main, lanes[0]), (side, lanes[1])) if names]

    def _behind_forward(self) -> tuple[Signal, ...]:
        """The signal of all work of the forward lane so far. (mutant: backup-before-forward)"""
        behind = self._backend.signal()
        self._backend.record(behind, lane=self.pool.forward)
        return (behind,)

    def _marks(self, used: Sequence[Lane]) -> tuple[Signal, ...]:
        marks = []
        for lane in dict.fromkeys(used):
            mark = self._backend.signal()
            self._backend.record(mark, lane=lane)
            marks.append(mark)
        return tuple(marks)

    def _acknowledged_by(self, transfer: Transfer) -> tuple[Signal, ...]:
        """The signals of all lanes, those of companions too. (mutant: ack-by-kv-alone)"""
        return transfer.done

    def _finished(self, queue: Sequence[tuple[Transfer, ...]]) -> int:
        return leading_reached(self._backend, (self._acknowledged_by(group[0]) for group in queue))
