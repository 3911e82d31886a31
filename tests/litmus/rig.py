"""A rig: a backend with the few verbs that litmus programs are written in.

Invariants:
- Every verb is one call of the Backend Protocol; nothing reaches past it.
- `hold` makes a lane or the host slow on real hardware and does nothing on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from kvcheck.core.cache.backend.backend import Backend, ChunkWork, Footprint, Graph, Operation, Place, Signal


@dataclass(frozen=True, slots=True)
class Rig:
    """A backend, and a way to slow down one actor: "a", "b", "c" or "host"."""

    backend: Backend
    hold: Callable[[str], None]

    def cells(self, *values: int) -> torch.Tensor:
        """Ints on the device, written before the program starts."""
        return self.backend.index(np.array(values, dtype=np.int64))

    def host_cell(self, name: str, value: int, place: Place) -> torch.Tensor:
        return self.backend.empty(name, (1,), torch.int64, place).fill_(value)

    def run(
        self,
        lane: str,
        *chunks: ChunkWork,
        after: Sequence[Signal] = (),
        reads: Place = Place.DEVICE,
        writes: Place = Place.DEVICE,
        stage: Callable[[], tuple[ChunkWork, ...]] | None = None,
    ) -> Signal:
        """Submit one operation of these chunks; each chunk first holds its lane."""
        operation = Operation("litmus", tuple(self._held(lane, chunk) for chunk in chunks), stage=stage)
        return self.backend.submit(
            operation,
            lane=self.backend.lane(lane),
            reads=[_footprint(reads)],
            writes=[_footprint(writes)],
            after=after,
        )

    def store(self, lane: str, cell: torch.Tensor, value: int, *, after: Sequence[Signal] = ()) -> Signal:
        """Submit: cell = value."""
        return self.run(lane, lambda: fill(cell, value), after=after)

    def copy(self, lane: str, source: torch.Tensor, target: torch.Tensor, *, after: Sequence[Signal] = ()) -> Signal:
        """Submit: target = source, both on the device or pinned."""
        return self.run(lane, lambda: copy(source, target), after=after)

    def record(self, signal: Signal, lane: str) -> None:
        """Record the signal behind what the lane holds."""
        self.backend.record(signal, lane=self.backend.lane(lane))

    def wait(self, signal: Signal, lane: str) -> None:
        self.backend.wait(signal, lane=self.backend.lane(lane))

    def capture(self, lane: str) -> AbstractContextManager[Graph]:
        """A graph of what the lane is given inside the block."""
        return self.backend.capture(self.backend.lane(lane))

    def outcome(self, *results: torch.Tensor) -> str:
        """Drain, then the results."""
        self.backend.drain()
        return " ".join(str(value) for result in results for value in result.tolist())

    def _held(self, lane: str, chunk: ChunkWork) -> ChunkWork:
        def held() -> None:
            self.hold(lane)
            chunk()

        return held


def _footprint(place: Place) -> Footprint:
    return Footprint("litmus", ("cell",), (0, 1), np.zeros(1, dtype=np.int64), place=place)


def fill(cell: torch.Tensor, value: int) -> None:
    cell.fill_(value)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
