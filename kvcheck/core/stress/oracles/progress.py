"""The progress oracle: a scheduler uses the room that there is.

Invariants:
- If a decode end has room for the request that waits longest, and no request rests, it admits within two rounds.
- If every running request can get a free page, some of them are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcheck.core.base.paging import pages_for
from kvcheck.core.cache.events import Allocated, Freed
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.workload.events import Aborted, Forward, ProcessActs, Reported, Sent, Sized

DECODE = "decode"
PAGED = ("full", "window")
LATE = 2
"""Rounds in which a request may wait although there is room."""


@dataclass(slots=True)
class _ProgressEnd:
    """waiting: in order. coming: admitted, and not joined. running: joined, and not retracted or ended. head: the first
    of `waiting`; late: rounds in which it could have been admitted."""

    waiting: dict[int, int] = field(default_factory=dict)  # request -> attempt
    coming: dict[int, None] = field(default_factory=dict)
    running: dict[int, None] = field(default_factory=dict)
    resting: dict[int, None] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)
    head: int | None = None
    late: int = 0


class ProgressOracle(Oracle):
    name = "progress"

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[str, _ProgressEnd] = {}
        self._sent: dict[int, Sent] = {}
        self._sizes: dict[str, Sized] = {}
        self._used: Counter[tuple[str, str]] = Counter()  # process, space
        self._process = ""

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Sized, self._sized),
            (Sent, self._was_sent),
            (ProcessActs, self._process_acts),
            (Allocated, self._allocated),
            (Freed, self._freed),
            (Forward, self._forward),
            (Aborted, self._aborted),
            (Reported, self._reported),
        )

    def _sized(self, event: Sized) -> None:
        self._sizes[event.process] = event
        self._ends.setdefault(_end_of(event.process), _ProgressEnd())

    def _was_sent(self, event: Sent) -> None:
        self._sent[event.request] = event
        for end in self._ends.values():
            end.waiting[event.request] = event.attempt

    def _process_acts(self, event: ProcessActs) -> None:
        self._process = event.process

    def _forward(self, event: Forward) -> None:
        if (end := self._ends.get(_end_of(self._process))) is not None:
            end.computed.add(event.request)

    def _aborted(self, event: Aborted) -> None:
        for name, end in self._ends.items():
            end.waiting.pop(event.request, None)
            end.running.pop(event.request, None)
            if not name:
                end.coming.pop(event.request, None)
                end.resting.pop(event.request, None)

    def _allocated(self, event: Allocated) -> None:
        process, space = _split(event.space)
        self._used[process, space] += len(event.ids)

    def _freed(self, event: Freed) -> None:
        process, space = _split(event.space)
        self._used[process, space] -= len(event.ids)

    def _reported(self, event: Reported) -> None:
        end = self._ends.get(event.end)
        if end is None:
            return
        before = dict(end.running)
        self._move(end, event)
        self._judge_running(event.end, end, before)
        if event.end == DECODE:
            self._judge_head(end, event)
        end.computed.clear()

    @staticmethod
    def _move(end: _ProgressEnd, event: Reported) -> None:
        rested = set(end.resting)
        for request in event.admitted:
            end.waiting.pop(request, None)
            end.coming[request] = None
        for request in event.joined:
            end.coming.pop(request, None)
            end.resting.pop(request, None)
            end.running[request] = None
        turns = Counter(event.retracted)
        turns.subtract(event.resumed)
        for request in (*event.retracted, *event.resumed):
            if turns[request] + (request in rested) > 0:
                end.running.pop(request, None)
                end.resting[request] = None
        for request in (*event.finished, *event.failed):
            for stage in (end.waiting, end.coming, end.running, end.resting):
                stage.pop(request, None)

    def _judge_running(self, name: str, end: _ProgressEnd, before: dict[int, None]) -> None:
        kept = [request for request in before if request in end.running]
        if not kept or name not in ("", DECODE):
            return
        self.judged += 1
        if end.computed or not self._has_room(name, {space: len(kept) for space in PAGED}):
            return
        self._add(kept[0], f"{len(kept)} requests run, each finds a free page, and a round computed none of them")

    def _judge_head(self, end: _ProgressEnd, event: Reported) -> None:
        head = next(iter(end.waiting), None)
        if event.admitted or head != end.head:
            end.late = 0
        end.head = head
        if head is None or end.resting or end.waiting[head] or not self._may_admit(end, head):
            end.late = 0  # of one that was sent again, the earlier attempt may not be over
            return
        self.judged += 1
        end.late += 1
        if end.late > LATE:
            end.late = 0
            text = f"request {head} waits at the decode end for {LATE} rounds"
            self._add(head, f"{text}, with a row, a slot and all pages of its prompt free; expected it to be admitted")

    def _may_admit(self, end: _ProgressEnd, head: int) -> bool:
        sizes = [each for each in self._sizes.values() if _end_of(each.process) == DECODE]
        if any(len(end.coming) >= each.max_prefilling for each in sizes):
            return False
        pages = pages_for(self._sent[head].prompt + 1, sizes[0].page_size)
        return self._has_room(DECODE, dict.fromkeys(PAGED, pages))

    def _has_room(self, name: str, wanted: dict[str, int]) -> bool:
        return all(
            total - self._used[sizes.process, space] >= wanted.get(space, 1)
            for sizes in self._sizes.values()
            if _end_of(sizes.process) == name
            for space, total in sizes.units
            if name == DECODE or space in wanted
        )

    def _add(self, request: int, message: str) -> None:
        self.add("KV607", message, tier="device", request=request)


def _end_of(process: str) -> str:
    return process.rpartition("-")[0]


def _split(space: str) -> tuple[str, str]:
    process, _, own = space.rpartition(":")
    return process, own
