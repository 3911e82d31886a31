"""The reports oracle: a scheduler's reports of its requests fit earlier reports and the events of the run.

    waiting -> admitted -> joined -> resting (retracted, not resumed) -> joined -> ended (finished or failed)

A prefill end reports an attempt as joined after its handover, and as failed if it fails, perhaps later. It may refuse a
later attempt while an earlier one is in progress, so a failure may be of either. All readings are followed.

Invariants:
- An attempt is admitted, joins and ends once, after it was sent.
- Each retraction saved the request, and each resume restored it, on every rank of the end.
- Only admitted requests are computed, and no retracted one.
- An aborted request does not finish. With two ends it is reported as failed.
- Counters of evictions equal the pages that left the tiers, and the victims chosen beside them.
- After ranks have decided differently, nothing more is judged: one of them reports for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvcheck.core.cache.events import Chosen, Evicted, TierChanged
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.workload.events import (
    Aborted,
    Broke,
    Decided,
    EvictionsCounted,
    Forward,
    ProcessActs,
    Reported,
    Restored,
    Saved,
    Sent,
)

UNSENT, WAITING, ADMITTED, JOINED, RESTING, ENDED = "unsent", "waiting", "admitted", "joined", "retracted", "ended"
PREFILL, DECODE = "prefill", "decode"
GROUPS = ("admitted", "joined", "retracted", "resumed", "finished", "failed")


@dataclass(slots=True)
class _Life:
    """One reading of a request at an end. sent: later attempts that have not begun."""

    stage: str = UNSENT
    sent: int = 0
    is_aborted: bool = False


@dataclass(slots=True)
class _ReportedEnd:
    """lives: by request, all readings. processes: its ranks. Other fields: since its last report."""

    lives: dict[int, list[_Life]] = field(default_factory=dict)
    processes: dict[str, None] = field(default_factory=dict)
    computed: dict[int, None] = field(default_factory=dict)
    saved: Counter[tuple[str, int]] = field(default_factory=Counter)
    restored: Counter[tuple[str, int]] = field(default_factory=Counter)
    aborted: set[int] = field(default_factory=set)


class ReportsOracle(Oracle):
    name = "reports"

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[str, _ReportedEnd] = {}
        self._sent: Counter[int] = Counter()
        self._process = ""
        self._told: Counter[str] = Counter()
        self._evicted: Counter[str] = Counter()
        self._chosen: tuple[str, str] | None = None
        self._broke = False

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Sent, self._was_sent),
            (Reported, self._reported),
            (Aborted, self._was_aborted),
            (ProcessActs, self._process_acts),
            (Forward, self._forward),
            (Saved, self._was_saved),
            (Restored, self._was_restored),
            (Chosen, self._was_chosen),
            (TierChanged, self._has_changed),
            (Evicted, self._was_told),
            (EvictionsCounted, self._counted),
            (Decided, self._decided),
            (Broke, self._broken),
        )

    def finish(self) -> None:
        if self._broke:
            return
        for request, lives in self._ends.get(PREFILL, _ReportedEnd()).lives.items():
            if all(life.stage not in (JOINED, ENDED) or life.sent for life in lives):
                self._add(request, f"the prefill end never reported request {request} as handed over or failed")
        for request, lives in self._ends.get(DECODE, _ReportedEnd()).lives.items():
            if all(life.is_aborted and life.stage != ENDED for life in lives):
                self._add(request, f"request {request} was aborted, and the decode end never reported that it failed")

    # Events

    def _was_sent(self, event: Sent) -> None:
        self._sent[event.request] += 1
        for name, end in self._ends.items():
            self._begin(name, end, event.request)

    def _begin(self, name: str, end: _ReportedEnd, request: int) -> None:
        for life in end.lives.setdefault(request, [_Life()]):
            life.sent += 1
            if life.stage in (UNSENT, ENDED):
                self._next(life)

    @staticmethod
    def _next(life: _Life) -> None:
        life.sent -= 1
        life.stage, life.is_aborted = WAITING, False

    def _end(self, name: str) -> _ReportedEnd:
        if name not in self._ends:
            end = self._ends[name] = _ReportedEnd()
            for request, count in self._sent.items():
                for _ in range(count):
                    self._begin(name, end, request)
        return self._ends[name]

    def _process_acts(self, event: ProcessActs) -> None:
        self._process = event.process
        if event.process:
            self._end(event.process.rpartition("-")[0]).processes[event.process] = None

    def _acting(self) -> _ReportedEnd:
        return self._end(self._process.rpartition("-")[0])

    def _forward(self, event: Forward) -> None:
        self._acting().computed[event.request] = None

    def _was_saved(self, event: Saved) -> None:
        self._acting().saved[self._process, event.request] += 1

    def _was_restored(self, event: Restored) -> None:
        self._acting().restored[self._process, event.request] += 1

    def _was_aborted(self, event: Aborted) -> None:
        for name, end in self._ends.items():
            for life in end.lives.get(event.request, ()):
                if name == DECODE and life.stage != ENDED:
                    life.is_aborted = True
                elif not name:
                    life.stage = ENDED
                    end.aborted.add(event.request)

    def _broken(self, event: Broke) -> None:
        self._broke = True

    def _decided(self, event: Decided) -> None:
        self._broke = self._broke or len(set(event.decisions)) > 1

    # Reports

    def _reported(self, event: Reported) -> None:
        if self._broke:
            return
        end = self._end(event.end)
        told: dict[int, Counter[str]] = {}
        for group in GROUPS:
            for request in getattr(event, group):
                told.setdefault(request, Counter())[group] += 1
        self.judged += len(told) + len(end.computed) + len(end.aborted)
        for request in end.computed:
            self._judge_computed(event.end, end, request, told.get(request, Counter()))
        for request, counts in told.items():
            if odd := self._judge(event.end, end, request, counts):
                self._add(request, f"{_name(event.end)}reported request {request} as {_told(counts)}: {odd}")
        for what, done, reported in (
            ("saved", end.saved, event.retracted),
            ("restored", end.restored, event.resumed),
        ):
            for process in end.processes or {"": None}:
                self._judge_moved(process, what, done, reported)
            done.clear()
        end.computed.clear()
        end.aborted.clear()

    def _judge_computed(self, name: str, end: _ReportedEnd, request: int, counts: Mapping[str, int]) -> None:
        stages = [life.stage for life in end.lives.setdefault(request, [_Life()])]
        begun = (ADMITTED, JOINED) if not name else (ADMITTED,) if name == PREFILL else (JOINED,)
        entry = "joined" if name == DECODE else "admitted"
        if {*stages} & {*begun} or counts.get(entry) or counts.get("resumed"):
            return
        stage = stages[0]
        want = "a resume" if stage == RESTING else "an admission" if entry == "admitted" else "that it joined"
        self._add(request, f"{_name(name)}computed request {request}, which is {stage}; expected {want} to be reported")

    def _judge(self, name: str, end: _ReportedEnd, request: int, counts: Counter[str]) -> str | None:
        """The fault of a report of a request. Fitting readings are kept; if none fits, the first goes on."""
        if request in end.aborted and set(counts) == {"retracted"} and counts["retracted"] == 1:
            return None  # it was retracted before it was aborted, both between two rounds
        lives = end.lives.setdefault(request, [_Life()])
        read = [(life, counts) for life in lives]
        if name == PREFILL and counts["failed"]:
            later = [replace(life, sent=life.sent - 1) for life in lives if life.sent]
            read += [(life, counts - Counter({"failed": 1})) for life in later]
        wrong = [self._judge_reading(name, life, rest) for life, rest in read]
        kept = [life for (life, _), each in zip(read, wrong, strict=True) if each is None]
        end.lives[request] = kept or [read[0][0]]
        return None if kept else wrong[0]

    def _judge_reading(self, name: str, life: _Life, counts: Counter[str]) -> str | None:
        if counts["admitted"] and not self._is_new(name, life):
            return f"it is {life.stage}, so it cannot be admitted"
        if counts["admitted"] > 1:
            return "an attempt is admitted once"
        if counts["admitted"]:
            life.stage = ADMITTED
        return self._judge_joins(life, counts) or self._judge_end(name, life, counts)

    def _is_new(self, name: str, life: _Life) -> bool:
        """A prefill end reports nothing of an attempt that it handed over and that was taken."""
        if life.sent and life.stage in (UNSENT, ENDED, *((JOINED,) if name == PREFILL else ())):
            self._next(life)
        return life.stage == WAITING

    @staticmethod
    def _judge_joins(life: _Life, counts: Counter[str]) -> str | None:
        retracted, resumed = counts["retracted"], counts["resumed"]
        first = counts["joined"] - resumed
        if first < 0:
            return "a request that is resumed joins by that"
        if first > 1 or (first and life.stage != ADMITTED):
            return f"it is {life.stage}, so it cannot join{'' if first < 2 else ' twice'}"
        if first:
            life.stage = JOINED
        if not retracted and not resumed:
            return None
        resting = (life.stage == RESTING) + retracted - resumed
        if life.stage not in (JOINED, RESTING) or resting not in (0, 1):
            return f"it was {life.stage}; retractions and resumes of a running request take turns"
        life.stage = RESTING if resting else JOINED
        return None

    @staticmethod
    def _judge_end(name: str, life: _Life, counts: Counter[str]) -> str | None:
        finished, failed = counts["finished"], counts["failed"]
        if finished and (life.stage != JOINED or name == PREFILL):
            return f"it is {life.stage}, so it cannot finish"
        if finished and life.is_aborted:
            return "it was aborted, so it cannot finish"
        if failed and life.stage in (UNSENT, ENDED):
            if not life.sent:
                return f"it is {life.stage}, so it cannot fail"
            life.sent -= 1
        if finished + failed > 1:
            return "an attempt ends once"
        if finished or failed:
            life.stage = ENDED
            if life.sent:
                ReportsOracle._next(life)
        return None

    def _judge_moved(
        self, process: str, what: str, done: Mapping[tuple[str, int], int], reported: tuple[int, ...]
    ) -> None:
        mine = Counter({request: count for (who, request), count in done.items() if who == process})
        verb = "retracted" if what == "saved" else "resumed"
        for request in dict.fromkeys((*mine, *reported)):
            self.judged += 1
            if mine[request] != reported.count(request):
                text = (
                    f"{process + ': ' if process else ''}request {request} was {what} {mine[request]} times in a round"
                )
                self._add(request, f"{text}, and reported as {verb} {reported.count(request)} times")

    # Counters

    def _was_chosen(self, event: Chosen) -> None:
        self._chosen = event.tier, event.space

    def _has_changed(self, event: TierChanged) -> None:
        """A companion that leaves with its pages is no eviction of its own."""
        if not event.added and (event.space == "full" or self._chosen == (event.tier, event.space)):
            self._evicted[event.tier] += 1
            self._chosen = None

    def _was_told(self, event: Evicted) -> None:
        self._told[event.tier] += 1

    def _counted(self, event: EvictionsCounted) -> None:
        self.judged += 1
        happened = self._evicted[event.tier]
        for verb, count in (("counts", event.count), ("reports", self._told[event.tier])):
            if count != happened:
                text = f"the engine {verb} {count} evictions from the {event.tier} tier"
                self._add(None, f"{text}; expected the {happened} that happened")
                return

    def _add(self, request: int | None, message: str) -> None:
        self.add("KV605", message, request=request)


def _name(end: str) -> str:
    return f"the {end} end " if end else "the scheduler "


def _told(counts: Mapping[str, int]) -> str:
    return " and ".join(group if count == 1 else f"{group} {count} times" for group, count in counts.items() if count)
