"""LayerGate: a ring of loads, one event a layer; the read gate of every buffer set waits here.

Invariants:
- A read waits on the lane that reads, for its own layer, of every load that its pass consumes. (mutants:
  gate-waits-neighbour-layer, gate-waits-wrong-entry, gate-waits-on-load-lane)
- An entry is armed again only after the process has seen its load finish, so no reader waits for the old meaning of the
  entry. (mutant: ring-rearmed-early)
- Loads may run on different lanes, so the events of two loads are unordered.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.cache.backend.backend import Backend, Lane, Signal


class RingEntry:
    """layers: by global layer, one event for each load lane. finished: the process has seen the load finish."""

    __slots__ = ("finished", "layers")

    def __init__(self, layers: tuple[tuple[Signal, ...], ...]) -> None:
        self.layers = layers
        self.finished = True


class LayerGate:
    """The ring of one engine, shared by all its buffer sets. Producer ids are places in the ring."""

    def __init__(self, backend: Backend, *, lanes: int, layers: int, entries: int = 3) -> None:
        if layers < 1 or entries < 1:
            raise LengthMismatch(f"layer gate: expected at least 1 layer and 1 entry, got {layers} and {entries}")
        self._backend = backend
        self.ring = tuple(
            RingEntry(tuple(tuple(backend.signal() for _ in range(lanes)) for _ in range(layers)))
            for _ in range(entries)
        )
        self._producer = -1
        self._consumed: tuple[int, ...] = ()

    @property
    def has_room(self) -> bool:
        return self.ring[(self._producer + 1) % len(self.ring)].finished

    def begin(self) -> int | None:
        """Arm the next entry and return its id; None if its last load has not been seen to finish."""
        if not self.has_room:
            return None
        self._producer = (self._producer + 1) % len(self.ring)
        self.ring[self._producer].finished = False
        return self._producer

    def layer_done(self, producer: int, layer: int, lanes: tuple[Lane, ...]) -> None:
        for signal, lane in zip(self.ring[producer].layers[layer], lanes, strict=True):
            self._backend.record(signal, lane=lane)

    def retire(self, producer: int) -> None:
        self.ring[producer].finished = True

    def consume(self, producers: Iterable[int]) -> None:
        self._consumed = tuple(dict.fromkeys(producers))

    def wait(self, layer: int, lane: Lane) -> None:
        for producer in self._waited_for():
            for signal in self._events(producer, layer):
                self._backend.wait(signal, lane=self._waiting_lane(lane))

    def wait_whole(self, lane: Lane) -> None:
        """Make `lane` wait for every layer: a graph replay does not repeat the waits of the capture."""
        for producer in self._waited_for():
            for signal in self._events(producer, len(self.ring[producer].layers) - 1):
                self._backend.wait(signal, lane=lane)

    def _waited_for(self) -> list[int]:
        return [producer for producer in self._consumed if not self.ring[producer].finished]

    def _events(self, producer: int, layer: int) -> tuple[Signal, ...]:
        return self.ring[producer].layers[layer]

    def _waiting_lane(self, lane: Lane) -> Lane:
        return lane
