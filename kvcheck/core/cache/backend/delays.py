"""Delays: which lane of a device is held before which operation and until when, and how each delay ended.

held until the lane of a hold goes on when the 3rd "hicache.load" 17th decode.read that operation has run, on another
lane every "hicache.load" - the process waits and nothing else moves all work of lanes "h2d..." - the same

Invariants:
- This module decides from names and counts what to hold and what to release. A device does it.
- A hold ends in one of three ways, and each is counted: overtaken, gave way, or ended by the device's watchdog. A hold
  that the watchdog ended has imposed no order.
- A delay that met no operation was not exercised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.base.errors import InternalError
from kvcheck.core.cache.backend.backend import Lane

FIRED_MOST = 3
"""Holds of one delay that the watchdog may end before no more are placed: each costs its whole time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Submissions: the nth of one operation, from 1, or all of them; or all to lanes whose names begin so.

    A rank's name before the lane's name is ignored.
    """

    operation: str | None = None
    nth: int | None = None
    lanes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.operation is None) == (not self.lanes) or (self.nth is not None and self.operation is None):
            raise InternalError(f"a site is an operation or lanes, and only an operation has a number; got {self}")
        if self.nth is not None and self.nth < 1:
            raise InternalError(f"operations are counted from 1, got {self.nth}")

    def covers(self, operation: str, number: int, lane: Lane) -> bool:
        """True if a submission is one of them. number: of that operation, from 1."""
        if self.operation is None:
            return lane.name.rpartition(":")[2].startswith(self.lanes)
        return operation == self.operation and self.nth in (None, number)

    def __str__(self) -> str:
        if self.operation is None:
            return f"lanes {', '.join(self.lanes)}"
        return self.operation if self.nth is None else f"{self.operation} #{self.nth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """held: where a lane is held. until: the operation that ends the hold when it has run; None: a waiting process ends
    it."""

    held: Site
    until: Site | None = None

    def __str__(self) -> str:
        return f"{self.held} until {self.until or 'the process waits'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayCount:
    """The counts of one delay. met: operations that it is about. placed: holds, each of which ended in one way."""

    delay: Delay
    met: int = 0
    placed: int = 0
    overtaken: int = 0
    gave_way: int = 0
    fired: int = 0

    def plus(self, other: DelayCount) -> DelayCount:
        """The sums of both runs."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return DelayCount(delay=self.delay, **sums)

    def __str__(self) -> str:
        text = f"{self.delay}: {self.placed} holds, {self.overtaken} overtaken, {self.gave_way} gave way"
        return f"{text}, {self.fired} ended by the watchdog" if self.fired else text


_COUNTS = ("met", "placed", "overtaken", "gave_way", "fired")


@dataclass(frozen=True, slots=True)
class DelayReport:
    """The counts of every delay of one run, or of several."""

    rows: tuple[DelayCount, ...]

    def plus(self, other: DelayReport) -> DelayReport:
        """The delays of both. Counts of a delay that both have are added up."""
        rows = {row.delay: row for row in self.rows}
        for row in other.rows:
            rows[row.delay] = rows[row.delay].plus(row) if row.delay in rows else row
        return DelayReport(tuple(rows.values()))

    @property
    def fired(self) -> int:
        """Holds that the watchdog has ended."""
        return sum(row.fired for row in self.rows)

    @property
    def gap(self) -> str | None:
        """What was not exercised, or None: a named operation that never came, or no hold that imposed an order.

        A delayed lane may be missing, because a schedule need not use every leg.
        """
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
        """Holds that imposed nothing, or None."""
        if not self.fired:
            return None
        placed = sum(row.placed for row in self.rows)
        return f"the watchdog of the device ended {self.fired} of {placed} holds; these imposed no order"


class Hold(Protocol):
    """A hold in place, as a device makes it."""

    def release(self) -> None:
        """Let the lane go on."""

    def has_ended(self) -> bool:
        """True once the lane has gone on."""

    def has_fired(self) -> bool:
        """True if the watchdog ended the hold. Call it for a hold that has ended."""


class _Placed:
    """A hold, and what is known of its end."""

    __slots__ = ("gave_way", "hold", "lane", "row")

    def __init__(self, row: int, lane: Lane, hold: Hold) -> None:
        self.row = row
        self.lane = lane
        self.hold = hold
        self.gave_way = False


class Delayer:
    """Follows the submissions of one run under a list of delays."""

    def __init__(self, delays: Sequence[Delay]) -> None:
        self.delays = tuple(delays)
        self._seen: Counter[str] = Counter()
        self._in_place: list[_Placed] = []
        self._released: list[_Placed] = []
        self._counts = [Counter[str]() for _ in self.delays]

    @property
    def is_holding(self) -> bool:
        """Some lane is held."""
        return bool(self._in_place)

    def arrives(self, operation: str, lane: Lane) -> int | None:
        """Count a submission. Returns the delay that has to hold its lane first, or None.

        A lane that is held already needs no second hold.
        """
        self._seen[operation] += 1
        number = self._seen[operation]
        row = next((at for at, each in enumerate(self.delays) if each.held.covers(operation, number, lane)), None)
        if row is None:
            return None
        self._counts[row]["met"] += 1
        is_held = any(each.lane.index == lane.index for each in self._in_place)
        return None if is_held or self._counts[row]["fired"] >= FIRED_MOST else row

    def place(self, row: int, lane: Lane, hold: Hold) -> None:
        """The hold of a delay is in place, before the operation that arrived last."""
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
        """The operation that the hold waited for has run."""
        for each in [each for each in self._in_place if each.hold is hold]:
            self._release(each, gave_way=False)

    def give_way(self) -> None:
        """The process is about to wait, so every lane is released."""
        for each in [*self._in_place]:
            self._release(each, gave_way=True)

    def look(self) -> tuple[Hold, ...]:
        """Count the holds that have ended, and return them. The watchdog has ended those that nobody released."""
        ended = []
        for kept in (self._in_place, self._released):
            for each in [each for each in kept if each.hold.has_ended()]:
                kept.remove(each)
                how = "fired" if each.hold.has_fired() else "gave_way" if each.gave_way else "overtaken"
                self._counts[each.row][how] += 1
                ended.append(each.hold)
        return tuple(ended)

    def report(self) -> DelayReport:
        """The report of the delays. Raises InternalError while a hold has not ended."""
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
