"""StoryNotes: notes on the place or the request of one finding, taken while the schedule runs once more.

Invariants:
- The moment is the event at which the oracle of the finding reports it.
- Orders come from the backend's edges, as for the ordering oracle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcheck.core.base.content import RowSites
from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import (
    Completed,
    Footprint,
    LaneWaited,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Submitted,
)
from kvcheck.core.cache.events import Allocated, Event, Freed, RoomChanged, SealsFitted, TierChanged
from kvcheck.core.stress.clocks import Clock, Clocks
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle, tier_of
from kvcheck.core.stress.workload.events import (
    Aborted,
    Broke,
    Failed,
    Faulted,
    Finished,
    Forward,
    Leased,
    MessageEmitted,
    ProcessActs,
    Restored,
    Resumed,
    Retracted,
    Saved,
    Saw,
    Sent,
    SitesKnown,
)
from kvcheck.core.stress.workload.mismatch import Mismatch

MOST_NOTES = 4000
"""Notes of one space, and of requests. Older ones are dropped, and the history then begins later."""
AFTER = 12
"""Notes that are kept after the moment."""

ACTS = (Retracted, Resumed, Saved, Restored, Aborted, Failed, Faulted, Finished, RoomChanged, SealsFitted, Sent, Leased)


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """span: rows of the unit, half-open; None: all of it. units: the first ids that it names."""

    is_write: bool
    space: str
    unit: int
    owner: int | None
    buffers: tuple[str, ...]
    layers: tuple[int, int]
    span: tuple[int, int] | None
    units: tuple[int, ...]

    def has_row(self, row: int | None) -> bool:
        return row is None or self.span is None or self.span[0] <= row < self.span[1]


@dataclass(slots=True, kw_only=True)
class Note:
    """ended: when it had run. clock: of the host's acts, the events of each lane that the process had joined."""

    at: int
    event: Event
    process: str
    lane: str = ""
    lane_number: int = 0
    count: int = 0
    clock: Clock = ()
    ended: int | None = None
    touches: tuple[Touch, ...] = ()

    @property
    def ordinal(self) -> int | None:
        return self.event.ordinal if isinstance(self.event, Submitted) else None


@dataclass(slots=True)
class StoryNotes:
    """oracle: a fresh one, which makes the finding again. saw: mismatches of reads, the finding's first."""

    finding: Finding
    oracle: Oracle
    places: dict[str, deque[Note]] = field(default_factory=dict)
    acts: deque[Note] = field(default_factory=lambda: deque(maxlen=MOST_NOTES))
    sites: dict[tuple[str, str, str], RowSites] = field(default_factory=dict)
    saw: list[Mismatch] = field(default_factory=list)
    requests: int = 1
    moment: int | None = None
    cause: Event | None = None
    process: str = ""
    _clocks: Clocks = field(default_factory=Clocks)
    _acting: str = ""
    _now: int = 0
    _pending: dict[int, Note] = field(default_factory=dict)
    _after: int = 0
    _seen: int = 0

    @property
    def now(self) -> int:
        return self._now

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        own: dict[type, Handler] = {
            Submitted: self._submitted,
            Completed: self._completed,
            Recorded: self._recorded,
            LaneWaited: self._lane_waited,
            ProcessJoined: self._process_joined,
            ProcessDrained: self._process_drained,
            ProcessActs: self._process_acts,
            Allocated: self._handed_over,
            Freed: self._handed_over,
            TierChanged: self._handed_over,
            SitesKnown: self._sites_known,
            Forward: self._learn,
            Saw: self._saw,
            MessageEmitted: self._told,
            Broke: self._act,
            **dict.fromkeys(ACTS, self._act),
        }
        judging: dict[type, list[Handler]] = {}
        for kind, handler in self.oracle.handlers():
            judging.setdefault(kind, []).append(handler)
        for kind in dict.fromkeys((*own, *judging)):
            yield kind, self._heard(own.get(kind), judging.get(kind, []))

    def finish(self) -> None:
        if self.moment is None:
            self.oracle.finish()
            self._look(None)

    def _heard(self, own: Handler | None, judging: list[Handler]) -> Handler:
        def hear(event: Event) -> None:
            self._now += 1
            if own is not None:
                own(event)
            if self.moment is None:
                for handler in judging:
                    handler(event)
                self._look(event)

        return hear

    def _look(self, event: Event | None) -> None:
        made = self.oracle.findings[self._seen :]
        self._seen = len(self.oracle.findings)
        if any(_is_same(each, self.finding) for each in made):
            self.moment, self.cause, self.process = self._now, event, self._acting
            if isinstance(event, Saw):
                self.saw = [event.mismatch]

    # Edges

    def _recorded(self, event: Recorded) -> None:
        self._clocks.advance(self._clocks.lane(event.lane), event.record)

    def _lane_waited(self, event: LaneWaited) -> None:
        self._clocks.lane_waits(event.record, self._clocks.lane(event.lane))

    def _process_joined(self, event: ProcessJoined) -> None:
        self._clocks.process_joins(event.record)

    def _process_drained(self, event: ProcessDrained) -> None:
        self._clocks.process_drains()

    def _process_acts(self, event: ProcessActs) -> None:
        self._acting = event.process
        self._clocks.act(event.process)

    # Events

    def _submitted(self, event: Submitted) -> None:
        lane = self._clocks.lane(event.lane)
        clock = self._clocks.advance(lane, event.record)
        touches = (*self._touches(event.writes, is_write=True), *self._touches(event.reads, is_write=False))
        mine = self._is_mine(event.request) or any(self._is_mine(each.owner) for each in touches)
        placed = [each for each in touches if each.unit == self.finding.page]
        if not mine and not placed:
            return
        note = Note(
            at=self._now,
            event=event,
            process=self._acting,
            lane=event.lane,
            lane_number=lane,
            count=clock[lane],
            clock=clock,
            touches=touches,
        )
        kept = False
        for space in dict.fromkeys(each.space for each in placed):
            kept |= self._keep(self._place(space), note)
        if mine:
            kept |= self._keep(self.acts, note)
        if kept:
            self._pending[event.ordinal] = note

    def _touches(self, footprints: Iterable[Footprint], *, is_write: bool) -> Iterable[Touch]:
        page = self.finding.page
        for each in footprints:
            rows = each.rows.tolist()
            owners = [None] * len(rows) if each.owners is None else each.owners.tolist()
            if not rows:
                continue
            if page in rows and tier_of(each.space) == (self.finding.tier or tier_of(each.space)):
                at = rows.index(page)
            else:  # the request's own row, if it has one there
                at = next((at for at, owner in enumerate(owners) if self._is_mine(owner)), 0)
            yield Touch(
                is_write=is_write,
                space=each.space,
                unit=rows[at],
                owner=owners[at],
                buffers=each.buffers,
                layers=each.layers,
                span=None if each.spans is None else (int(each.spans[at][0]), int(each.spans[at][1])),
                units=tuple(rows[:8]),
            )

    def _completed(self, event: Completed) -> None:
        note = self._pending.pop(event.ordinal, None)
        if note is not None:
            note.ended = self._now

    def _handed_over(self, event: Allocated | Freed | TierChanged) -> None:
        space = f"{event.tier}.{event.space}" if isinstance(event, TierChanged) and event.tier != "device" else ""
        note = Note(at=self._now, event=event, process=self._acting, clock=self._clocks.process)
        if self.finding.page in event.ids:
            self._keep(self._place(space or event.space), note)
        if isinstance(event, Allocated) and self._is_mine(event.owner):
            self._keep(self.acts, note)

    def _act(self, event: Event) -> None:
        self._learn(event)
        request = getattr(event, "request", None)
        if isinstance(event, Broke) or self._is_mine(request):
            self._keep(self.acts, Note(at=self._now, event=event, process=self._acting, clock=self._clocks.process))

    def _told(self, event: MessageEmitted) -> None:
        self._act(event)

    def _saw(self, event: Saw) -> None:
        self._learn(event.mismatch)
        found = event.mismatch
        if len(self.saw) < MOST_NOTES and (self.finding.buffer is None or found.buffer == self.finding.buffer):
            self.saw.append(found)

    def _sites_known(self, event: SitesKnown) -> None:
        self.sites |= {(row.space, row.buffer, row.piece): row for row in event.rows}

    def _learn(self, event: object) -> None:
        self.requests = max(self.requests, getattr(event, "request", 0) or 0, getattr(event, "author", 0))

    def _is_mine(self, request: int | None) -> bool:
        return request is not None and request in (self.finding.request, self.finding.seen_request)

    def _place(self, space: str) -> deque[Note]:
        return self.places.setdefault(space, deque(maxlen=MOST_NOTES))

    def _keep(self, notes: deque[Note], note: Note) -> bool:
        if self.moment is not None:
            self._after += 1
            if self._after > AFTER:
                return False
        notes.append(note)
        return True


def _is_same(made: Finding, wanted: Finding) -> bool:
    names = ("code", "oracle", "tier", "buffer", "layer", "page", "row", "request", "seen_request", "message")
    return all(getattr(made, name) == getattr(wanted, name) for name in names)
