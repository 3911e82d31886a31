"""Waits: a wait that the code under test does not make, added by a backend around the one that runs the schedule.

    lane       decode.read on forward waits for hicache.load on h2d
    lane       every operation on forward waits for hicache.load on h2d
    process    the process waits for hicache.load on h2d before it submits decode.read on forward
    process    the process waits for hicache.load on h2d before it submits anything on forward

A wait names operations and lanes as the code does, never by number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvcheck.core.cache.backend.backend import Backend, Footprint, Graph, Lane, Operation, Signal
from kvcheck.core.cache.backend.scoped import PassingBackend


class Waiter(Enum):
    """A lane's wait holds back less than the process's."""

    LANE = "lane"
    PROCESS = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """`later` waits for the latest `earlier` in each lane. earlier_lane, later_lane: see `kind_of`. later: None: every
    operation on that lane."""

    earlier: str
    earlier_lane: str
    later: str | None
    later_lane: str
    waiter: Waiter = Waiter.LANE

    def text(self) -> str:
        earlier = f"{self.earlier} on {self.earlier_lane}"
        if self.waiter is Waiter.LANE:
            what = "every operation" if self.later is None else self.later
            return f"{what} on {self.later_lane} waits for {earlier}"
        what = "anything" if self.later is None else self.later
        return f"the process waits for {earlier} before it submits {what} on {self.later_lane}"

    def stronger(self) -> Iterator[Wait]:
        """This wait and those that hold back more, in the order of trial."""
        for waiter in Waiter:
            for later in (self.later, None):
                yield replace(self, later=later, waiter=waiter)


_WHICH = re.compile(r"(\.[0-9]+)?(\.side)?$")
"""End of a lane's name that numbers the copy lanes of one kind."""


def kind_of(lane: str) -> str:
    return _WHICH.sub("", lane.rpartition(":")[2])


class WaitingBackend(PassingBackend):
    def __init__(self, inner: Backend, wait: Wait) -> None:
        super().__init__(inner)
        self.made = 0
        self._wait = wait
        self._latest: dict[int, Signal] = {}

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        """A captured operation waits at its replay."""
        if self._is_later(operation, lane):
            self._make(lane)
        signal = self.inner.submit(operation, lane=lane, reads=reads, writes=writes, after=after)
        if signal.handle is not None and self._is_earlier(operation, lane):
            self._latest[lane.index] = signal
        return signal

    def replay(self, graph: Graph) -> None:
        if any(self._is_later(each.operation, graph.lane) for each in graph.operations):
            self._make(graph.lane)
        self.inner.replay(graph)
        if any(self._is_earlier(each.operation, graph.lane) for each in graph.operations):
            self._latest[graph.lane.index] = signal = self.inner.signal()
            self.inner.record(signal, lane=graph.lane)

    def _make(self, lane: Lane) -> None:
        for at, signal in self._latest.items():
            if at != lane.index:
                self.made += 1
                self.inner.wait(signal, lane=lane if self._wait.waiter is Waiter.LANE else None)

    def _is_later(self, operation: Operation, lane: Lane) -> bool:
        return kind_of(lane.name) == self._wait.later_lane and self._wait.later in (None, operation.name)

    def _is_earlier(self, operation: Operation, lane: Lane) -> bool:
        return kind_of(lane.name) == self._wait.earlier_lane and operation.name == self._wait.earlier
