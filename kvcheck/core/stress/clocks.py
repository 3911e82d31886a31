"""Clocks: vector clocks of lanes and processes, from the backend's edges.

A lane counts its events (operations and records) from 1. A clock holds the last finished event of each lane. Edges:

    process -> operation     the process's clock at the submission
    lane -> operation        everything queued in the lane before, and the lane's waits
    record -> lane, process  everything the record covers, for its waiters

Invariants:
- A wait makes an edge for the waiter alone. Freeing, allocating and the order of completion are no edges.
- Events that every process has joined are dropped, because all later operations come after them.
- The process without a name is the harness. Other processes begin with its clock. When it acts again, it has joined
  theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Clock = tuple[int, ...]


class Clocks:
    def __init__(self) -> None:
        self.process: Clock = ()
        self._acting = ""
        self._others: dict[str, Clock] = {}
        self._least: Clock | None = None
        self._over: Clock = ()
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._lanes: list[Clock] = []
        self._records: dict[int, Clock] = {}
        self._kept: list[deque[tuple[int, int]]] = []

    def act(self, process: str) -> None:
        self._least = None
        self._others[self._acting] = self.process
        if process in self._others:
            self.process = self._others.pop(process)
        elif "" in self._others:
            self.process = self._others[""]
        self._acting = process
        if not process:
            for clock in self._others.values():
                self.process = joined(self.process, clock)

    def known_to_all(self, lane: int) -> int:
        """The last event of that lane that every process, the harness included, has joined."""
        return (
            min(at(self.process, lane), at(self._least_of_others(), lane)) if self._others else at(self.process, lane)
        )

    def common(self) -> Clock:
        return tuple(map(min, self.process, self._least_of_others())) if self._others else self.process

    def _least_of_others(self) -> Clock:
        if self._least is None:
            first, *rest = self._others.values()
            self._least = tuple(map(min, first, *rest)) if rest else first
        return self._least

    def lane(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
            self._lanes.append(())
            self._kept.append(deque())
        return self._numbers[name]

    def advance(self, lane: int, record: int | None) -> Clock:
        after = [*_reaching(joined(self._lanes[lane], self.process), lane)]
        after[lane] += 1
        clock = tuple(after)
        self._lanes[lane] = clock
        if record is not None:
            self._records[record] = clock
            self._kept[lane].append((clock[lane], record))
        return clock

    def lane_waits(self, record: int, lane: int) -> None:
        self._lanes[lane] = joined(self._lanes[lane], self._of(record))

    def process_joins(self, record: int) -> None:
        self._join_process((self._of(record),))

    def process_drains(self) -> None:
        self._join_process(self._lanes)

    def _of(self, record: int) -> Clock:
        return self._records.get(record, ())

    def _join_process(self, clocks: Iterable[Clock]) -> None:
        for clock in clocks:
            self.process = joined(self.process, clock)
        common = self.common()
        if common == self._over:
            return
        self._over = common
        for over, kept in zip(common, self._kept, strict=False):
            while kept and kept[0][0] <= over:
                del self._records[kept.popleft()[1]]


def joined(one: Clock, other: Clock) -> Clock:
    if one == other or not other:
        return one
    if len(one) < len(other):
        one, other = other, one
    return tuple(map(max, one, other)) + one[len(other) :]


def at(clock: Clock, lane: int) -> int:
    return clock[lane] if lane < len(clock) else 0


def _reaching(clock: Clock, lane: int) -> Clock:
    return clock + (0,) * (lane + 1 - len(clock))
