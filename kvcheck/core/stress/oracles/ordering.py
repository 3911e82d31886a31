"""The ordering oracle: if two operations touch one place and one of them writes, one must wait for the other.

Invariants:
- Only edges order operations, not the actual order. So a missing wait is found in any run, also in an eager one.
- A read behind no edge from an earlier write is KV201; a write behind no edge from an earlier read or write is KV202.
- Freeing and allocating are neither edges nor writes: stream-ordered reuse is legal, reuse without an edge is not.
- A read that checks its data may race: torn bytes do not pass its check.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import (
    Footprint,
    LaneWaited,
    Place,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Submitted,
)
from kvcheck.core.stress.access_log import AccessLog, Overlap
from kvcheck.core.stress.clocks import Clock, Clocks, at
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, Oracle, tier_of, unit_word
from kvcheck.core.stress.workload.events import ProcessActs


@dataclass(slots=True)
class _Buffer:
    reads: dict[int, AccessLog] = field(default_factory=dict)
    writes: dict[int, AccessLog] = field(default_factory=dict)

    def only_writes(self) -> tuple[tuple[dict[int, AccessLog], str], ...]:
        return ((self.writes, "writes"),)

    def both(self) -> tuple[tuple[dict[int, AccessLog], str], ...]:
        return ((self.writes, "writes"), (self.reads, "reads"))


class OrderingOracle(Oracle):
    name = "ordering"
    clocks = Clocks
    log = AccessLog

    def __init__(self) -> None:
        super().__init__()
        self._clocks = self.clocks()
        self._buffers: dict[tuple[str, str], _Buffer] = {}
        self._operations: list[deque[tuple[int, Submitted]]] = []
        self._told: set[tuple[str, ...]] = set()
        self._over: Clock = ()

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Submitted, self._submitted),
            (Recorded, self._recorded),
            (LaneWaited, self._lane_waited),
            (ProcessJoined, self._process_joined),
            (ProcessDrained, self._process_drained),
            (ProcessActs, self._process_acts),
        )

    # Edges

    def _recorded(self, event: Recorded) -> None:
        self._clocks.advance(self._clocks.lane(event.lane), event.record)

    def _lane_waited(self, event: LaneWaited) -> None:
        self._clocks.lane_waits(event.record, self._clocks.lane(event.lane))

    def _process_joined(self, event: ProcessJoined) -> None:
        self._clocks.process_joins(event.record)
        self._forget()

    def _process_acts(self, event: ProcessActs) -> None:
        self._clocks.act(event.process)

    def _process_drained(self, event: ProcessDrained) -> None:
        self._clocks.process_drains()
        self._forget()

    def _forget(self) -> None:
        common = self._clocks.common()
        if common == self._over:
            return
        self._over = common
        for over, operations in zip(common, self._operations, strict=False):
            while operations and operations[0][0] <= over:
                operations.popleft()

    # Touches

    def _submitted(self, event: Submitted) -> None:
        lane = self._clocks.lane(event.lane)
        known = self._clocks.process
        clock = self._clocks.advance(lane, event.record)
        while len(self._operations) <= lane:
            self._operations.append(deque())
        self._operations[lane].append((clock[lane], event))
        over = self._clocks.known_to_all(lane)
        for footprint in event.reads:
            if footprint.is_checked:
                continue
            if footprint.place is Place.PAGEABLE:
                # The process reads a pageable source before `submit` returns, whatever the lane waits for.
                self._judge(event, lane, known, footprint, is_write=False)
                continue
            for touched in self._judge(event, lane, clock, footprint, is_write=False):
                self._log_of(touched.reads, lane).touch(clock[lane], footprint, over=over)
        for footprint in event.writes:
            for touched in self._judge(event, lane, clock, footprint, is_write=True):
                self._log_of(touched.writes, lane).touch(clock[lane], footprint, over=over)

    def _judge(
        self, event: Submitted, lane: int, clock: Clock, footprint: Footprint, *, is_write: bool
    ) -> list[_Buffer]:
        """Report touches of other operations without an edge to this one. Return the footprint's buffers."""
        found = []
        for buffer in footprint.buffers:
            touched = self._buffers.get((footprint.space, buffer))
            if touched is None:
                touched = self._buffers[footprint.space, buffer] = _Buffer()
            found.append(touched)
            for by_lane, doing in touched.both() if is_write else touched.only_writes():
                for other, log in by_lane.items():
                    bound = at(clock, other)
                    if other != lane:
                        self.judged += len(footprint.rows)
                    if log.latest > bound and (overlap := log.after(bound, footprint)) is not None:
                        self._report(event, footprint, buffer, other, overlap, is_write, doing)
        return found

    def _log_of(self, by_lane: dict[int, AccessLog], lane: int) -> AccessLog:
        if lane not in by_lane:
            by_lane[lane] = self.log()
        return by_lane[lane]

    # Findings

    def _report(
        self,
        event: Submitted,
        footprint: Footprint,
        buffer: str,
        other_lane: int,
        overlap: Overlap,
        is_write: bool,
        doing: str,
    ) -> None:
        other = next(each for number, each in self._operations[other_lane] if number == overlap.event)
        code, verb = ("KV202", "writes") if is_write else ("KV201", "reads")
        kind = (code, event.name, event.lane, other.name, other.lane, footprint.space, buffer)
        if kind in self._told or len(self.findings) >= MAX_FINDINGS:
            return
        self._told.add(kind)
        mine = _request(event, (footprint,), overlap.unit)
        touching = other.writes if doing == "writes" else other.reads
        same = (each for each in touching if each.space == footprint.space and buffer in each.buffers)
        theirs = _request(other, same, overlap.unit)
        tier = tier_of(footprint.space)
        self.findings.append(
            Finding(
                code=code,
                oracle=self.name,
                tier=tier,
                buffer=buffer,
                layer=overlap.layer,
                page=overlap.unit,
                row=overlap.token,
                request=mine,
                seen_request=theirs,
                lane=event.lane,
                message=f"{_named(event, mine)} {verb} {_place(footprint.space, buffer, overlap)} ({tier}), which "
                f"{_named(other, theirs)} {doing}: {event.lane} does not wait for {other.lane} #{other.ordinal}",
                minimal={"earlier": _operation(other), "later": _operation(event)},
            )
        )


def _request(event: Submitted, footprints: Iterable[Footprint], unit: int) -> int | None:
    for footprint in footprints:
        if footprint.owners is not None:
            for owner in footprint.owners[footprint.rows == unit]:
                return int(owner)
    return event.request


def _operation(event: Submitted) -> dict[str, object]:
    return {"ordinal": event.ordinal, "operation": event.name, "lane": event.lane}


def _named(event: Submitted, request: int | None) -> str:
    whose = "" if request is None else f" for request {request}"
    return f"{event.name} ({event.lane} #{event.ordinal}{whose})"


def _place(space: str, buffer: str, overlap: Overlap) -> str:
    unit = unit_word(space)
    row = "" if overlap.token is None else f", {'column' if unit == 'row' else 'row'} {overlap.token}"
    more = "" if overlap.count == 1 else f" and {overlap.count - 1} more cells"
    return f"{space}.{buffer}, layer {overlap.layer}, {unit} {overlap.unit}{row}{more}"
