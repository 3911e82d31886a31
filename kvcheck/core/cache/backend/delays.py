"""Delays: rules that hold a lane before an operation until another has run, and the counts of these holds.

Invariants:
- Decisions depend on names and counts alone.
- A hold is overtaken, gives way, or fires (ended by the device's watchdog). One that fired has imposed no order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.base.errors import InternalError
from kvcheck.core.cache.backend.backend import Lane

FIRED_MOST = 3
"""Fired holds after which a delay places no more, since each costs its whole time."""


# held                                  until              the held lane goes on when
# the 3rd "hicache.load"                17th decode.read   that operation has run, on another lane
# every "hicache.load"                  -                  the process waits and nothing else moves
# all work of lanes "h2d..."            -                  the same
@dataclass(frozen=True, slots=True, kw_only=True)
class DelaySite:
    """Submissions: the nth of one operation, from 1, or all; or all to lanes with such a name prefix, after the
    rank's."""

    operation: str | None = None
    nth: int | None = None
    lanes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.operation is None) == (not self.lanes) or (self.nth is not None and self.operation is None):
            raise InternalError(f"a site is an operation or lanes, and only an operation has a number; got {self}")
        if self.nth is not None and self.nth < 1:
            raise InternalError(f"operations are counted from 1, got {self.nth}")

    def covers(self, operation: str, number: int, lane: Lane) -> bool:
        """number: of that operation, from 1."""
        if self.operation is None:
            return lane.name.rpartition(":")[2].startswith(self.lanes)
        return operation == self.operation and self.nth in (None, number)

    def __str__(self) -> str:
        if self.operation is None:
            return f"lanes {', '.join(self.lanes)}"
        return self.operation if self.nth is None else f"{self.operation} #{self.nth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """held: submissions before which the lane is held. until: its end ends the hold; None: a waiting process does."""

    held: DelaySite
    until: DelaySite | None = None

    def __str__(self) -> str:
        return f"{self.held} until {self.until or 'the process waits'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayCount:
    """met: matching submissions. placed: holds."""

    delay: Delay
    met: int = 0
    placed: int = 0
    overtaken: int = 0
    gave_way: int = 0
    fired: int = 0

    def plus(self, other: DelayCount) -> DelayCount:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return DelayCount(delay=self.delay, **sums)

    def __str__(self) -> str:
        text = f"{self.delay}: {self.placed} holds, {self.overtaken} overtaken, {self.gave_way} gave way"
        return f"{text}, {self.fired} ended by the watchdog" if self.fired else text


_COUNTS = ("met", "placed", "overtaken", "gave_way", "fired")


@dataclass(frozen=True, slots=True)
class DelayReport:
    rows: tuple[DelayCount, ...]

    def plus(self, other: DelayReport) -> DelayReport:
        rows = {row.delay: row for row in self.rows}
        for row in other.rows:
            rows[row.delay] = rows[row.delay].plus(row) if row.delay in rows else row
        return DelayReport(tuple(rows.values()))

    @property
    def fired(self) -> int:
        return sum(row.fired for row in self.rows)

    @property
    def gap(self) -> str | None:
        """Reason why the delays tested nothing. A delayed lane may be missing: a schedule need not use every leg."""
        unmet = [row.delay for row in self.rows if row.delay.held.operation is not None and not row.met]
        if unmet:
            return f"not exercised: {unmet[0].held} never came, so the delay {unmet[0]} held nothing"
        if any(row.overtaken + row.gave_way for row in self.rows):
            return None
        if self.fired:
            return f"not exercised: the watchdog ended all {self.fired} holds, so no order was imposed"
        return f"not exercised: nothing was held by {'; '.join(str(row.delay) for row in self.rows)}"

    @property
    def warning(self) -> str | None:
        if not self.fired:
            return None
        placed = sum(row.placed for row in self.rows)
        return f"the watchdog of the device ended {self.fired} of {placed} holds; these imposed no order"


class Hold(Protocol):
    def release(self) -> None: ...

    def has_ended(self) -> bool:
        """True once the lane has gone on."""

    def has_fired(self) -> bool:
        """True if the watchdog ended the hold. Valid once it has ended."""


class _Placed:
    __slots__ = ("gave_way", "hold", "lane", "row")

    def __init__(self, row: int, lane: Lane, hold: Hold) -> None:
        self.row = row
        self.lane = lane
        self.hold = hold
        self.gave_way = False


class Delayer:
    def __init__(self, delays: Sequence[Delay]) -> None:
        self.delays = tuple(delays)
        self._seen: Counter[str] = Counter()
        self._in_place: list[_Placed] = []
        self._released: list[_Placed] = []
        self._counts = [Counter[str]() for _ in self.delays]

    @property
    def is_holding(self) -> bool:
        return bool(self._in_place)

    def arrives(self, operation: str, lane: Lane) -> int | None:
        """Count a submission. Return the delay that has to hold its lane first; None also if the lane is held."""
        self._seen[operation] += 1
        number = self._seen[operation]
        row = next((at for at, each in enumerate(self.delays) if each.held.covers(operation, number, lane)), None)
        if row is None:
            return None
        self._counts[row]["met"] += 1
        is_held = any(each.lane.index == lane.index for each in self._in_place)
        return None if is_held or self._counts[row]["fired"] >= FIRED_MOST else row

    def place(self, row: int, lane: Lane, hold: Hold) -> None:
        self._counts[row]["placed"] += 1
        self._in_place.append(_Placed(row, lane, hold))

    def overtaking(self, operation: str, lane: Lane) -> tuple[Hold, ...]:
        """The holds in place that end when the operation that arrived last has run."""
        number = self._seen[operation]
        return tuple(
            each.hold
            for each in self._in_place
            if (until := self.delays[each.row].until) is not None
            and each.lane.index != lane.index
            and until.covers(operation, number, lane)
        )

    def overtaken(self, hold: Hold) -> None:
        for each in [each for each in self._in_place if each.hold is hold]:
            self._release(each, gave_way=False)

    def give_way(self) -> None:
        for each in [*self._in_place]:
            self._release(each, gave_way=True)

    def look(self) -> tuple[Hold, ...]:
        ended = []
        for kept in (self._in_place, self._released):
            for each in [each for each in kept if each.hold.has_ended()]:
                kept.remove(each)
                how = "fired" if each.hold.has_fired() else "gave_way" if each.gave_way else "overtaken"
                self._counts[each.row][how] += 1
                ended.append(each.hold)
        return tuple(ended)

    def report(self) -> DelayReport:
        """Return the counts. Raise InternalError while a hold has not ended."""
        self.look()
        if self._in_place or self._released:
            raise InternalError("a hold has not ended; give way and wait for the device before the report")
        return DelayReport(
            tuple(DelayCount(delay=delay, **counts) for delay, counts in zip(self.delays, self._counts, strict=True))
        )

    def _release(self, placed: _Placed, *, gave_way: bool) -> None:
        placed.gave_way = gave_way
        self._in_place.remove(placed)
        self._released.append(placed)
        placed.hold.release()
