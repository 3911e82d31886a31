"""Clocks: which events of which lane are over before another begins, from the edges that a backend tells.

The actors are the hosts and the lanes. A process is a host; most runs have one. A lane counts its events (operations
and records) from 1; a clock holds, for each lane by its number, the last event that is over. Edges:

    host -> operation     what the host knew when it submitted
    lane -> operation     everything queued in the lane before, and what the lane was told to wait for
    record -> lane, host  what the record covers, for whoever waits for it

Invariants:
- Clocks are closed: one that holds an event holds everything that this event is behind.
- A wait joins the waiter and nobody else; freeing, allocating and an order that merely happened are no edges.
- What every host has joined is behind everything that is submitted later, so nothing older is kept.
- The host without a name is the harness: others begin with what it knows, and when it acts again it knows all they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Clock = tuple[int, ...]


class Clocks:
    """The clock of the host that acts, the lanes' clocks, and those of the records that can still tell somebody."""

    def __init__(self) -> None:
        self.host: Clock = ()
        self._acting = ""
        self._others: dict[str, Clock] = {}
        self._least: Clock | None = None
        self._over: Clock = ()
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._lanes: list[Clock] = []
        self._records: dict[int, Clock] = {}
        self._kept: list[deque[tuple[int, int]]] = []

    def act(self, host: str) -> None:
        """From now on it is that host that submits and waits."""
        self._least = None
        self._others[self._acting] = self.host
        if host in self._others:
            self.host = self._others.pop(host)
        elif "" in self._others:
            self.host = self._others[""]
        self._acting = host
        if not host:
            for clock in self._others.values():
                self.host = joined(self.host, clock)

    def known_to_all(self, lane: int) -> int:
        """The last event of that lane that every host has joined; the harness too, with whose clock new hosts begin."""
        return min(at(self.host, lane), at(self._least_of_others(), lane)) if self._others else at(self.host, lane)

    def common(self) -> Clock:
        """What every host has joined, of all lanes; where it is what it was, nothing more is over."""
        return tuple(map(min, self.host, self._least_of_others())) if self._others else self.host

    def _least_of_others(self) -> Clock:
        """Only a change of the acting host changes it, not the joins of that host."""
        if self._least is None:
            first, *rest = self._others.values()
            self._least = tuple(map(min, first, *rest)) if rest else first
        return self._least

    def lane(self, name: str) -> int:
        """The number of a lane."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
            self._lanes.append(())
            self._kept.append(deque())
        return self._numbers[name]

    def advance(self, lane: int, record: int | None) -> Clock:
        """One more event of a lane, which `record` stands for. Returns its clock, itself included."""
        clock = _reaching(joined(self._lanes[lane], self.host), lane)
        clock = (*clock[:lane], clock[lane] + 1, *clock[lane + 1 :])
        self._lanes[lane] = clock
        if record is not None:
            self._records[record] = clock
            self._kept[lane].append((clock[lane], record))
        return clock

    def lane_waits(self, record: int, lane: int) -> None:
        """What is queued in the lane from now on is behind the record."""
        self._lanes[lane] = joined(self._lanes[lane], self._of(record))

    def host_joins(self, record: int) -> None:
        """The host is behind the record."""
        self._join_host((self._of(record),))

    def host_drains(self) -> None:
        """The host is behind everything."""
        self._join_host(self._lanes)

    def _of(self, record: int) -> Clock:
        """A record's clock; one that is not kept says nothing that the host, and so everybody, does not know."""
        return self._records.get(record, ())

    def _join_host(self, clocks: Iterable[Clock]) -> None:
        for clock in clocks:
            self.host = joined(self.host, clock)
        common = self.common()
        if common == self._over:
            return
        self._over = common
        for over, kept in zip(common, self._kept, strict=False):
            while kept and kept[0][0] <= over:
                del self._records[kept.popleft()[1]]


def joined(one: Clock, other: Clock) -> Clock:
    """The later of the two, lane by lane."""
    if one == other or not other:
        return one
    if len(one) < len(other):
        one, other = other, one
    return tuple(map(max, one, other)) + one[len(other) :]


def at(clock: Clock, lane: int) -> int:
    """The last event of that lane that is over; 0: none."""
    return clock[lane] if lane < len(clock) else 0


def _reaching(clock: Clock, lane: int) -> Clock:
    return clock + (0,) * (lane + 1 - len(clock))
