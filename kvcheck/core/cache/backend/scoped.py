"""PassingBackend: a backend around another one. ScopedBackend: one rank's view of a shared backend.

Invariants:
- A rank's lanes, memory and footprint spaces become "<scope>:<name>", so that two ranks never share one by accident.
- `drain` drains all ranks, because their operations wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend, Footprint, Graph, Lane, Operation, Place, Signal


def scoped(scope: str, name: str) -> str:
    return f"{scope}:{name}"


class PassingBackend:
    """Forwards every call except `submit`, which subclasses define."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name, self.device = inner.name, inner.device

    def lane(self, name: str) -> Lane:
        return self.inner.lane(name)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        return self.inner.empty(name, shape, dtype, place)

    def release(self, name: str) -> None:
        self.inner.release(name)

    def allocated(self) -> dict[str, int]:
        return self.inner.allocated()

    def index(self, values: IndexArray) -> torch.Tensor:
        return self.inner.index(values)

    def signal(self) -> Signal:
        return self.inner.signal()

    def record(self, signal: Signal, *, lane: Lane) -> None:
        self.inner.record(signal, lane=lane)

    def capture(self, lane: Lane) -> AbstractContextManager[Graph]:
        return self.inner.capture(lane)

    def replay(self, graph: Graph) -> None:
        self.inner.replay(graph)

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        self.inner.wait(signal, lane=lane)

    def query(self, signal: Signal) -> bool:
        return self.inner.query(signal)

    def drain(self) -> None:
        self.inner.drain()

    def idle(self) -> None:
        self.inner.idle()


class ScopedBackend(PassingBackend):
    """split: buffers, by space and name, whose rows several ranks write in parts; footprints name all parts."""

    def __init__(self, inner: Backend, scope: str) -> None:
        super().__init__(inner)
        self.scope = scope
        self.split: Mapping[tuple[str, str], tuple[str, ...]] = {}

    def lane(self, name: str) -> Lane:
        return self.inner.lane(scoped(self.scope, name))

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        return self.inner.empty(scoped(self.scope, name), shape, dtype, place)

    def release(self, name: str) -> None:
        self.inner.release(scoped(self.scope, name))

    def allocated(self) -> dict[str, int]:
        start = scoped(self.scope, "")
        return {
            name.removeprefix(start): held for name, held in self.inner.allocated().items() if name.startswith(start)
        }

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        return self.inner.submit(operation, lane=lane, reads=self.own(reads), writes=self.own(writes), after=after)

    def own(self, footprints: Sequence[Footprint]) -> tuple[Footprint, ...]:
        return tuple(
            replace(
                each,
                space=scoped(self.scope, each.space),
                buffers=tuple(part for name in each.buffers for part in self.split.get((each.space, name), (name,))),
            )
            for each in footprints
        )
