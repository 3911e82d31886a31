"""Turns: runs cells in this process, one schedule of each in turn. Its tasks, limits and reports are values.

Invariants:
- The first small cell runs FLOOR schedules first, for an early verdict. Then cells take turns up to their floors: two
  rounds of the small cells, then one of the others. Then the cell with the least weighed CPU time is next.
- Only a given limit of wall time ends a cell below its floor.
- A schedule that loses the device ends its cell. Open cells are left.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvcheck.core.base.causes import CALL
from kvcheck.core.base.deadline import TimeUp, time_limit
from kvcheck.core.base.errors import HardwareError, UnknownVerdict, UsageError, machine_trouble
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, Finding, to_plain
from kvcheck.core.run.outcome import Outcome, Runner, TargetOf
from kvcheck.core.run.plan import ANSWERS, FLOOR, NO_EXTRAS, Plan, further_workloads, workload_seed
from kvcheck.core.run.runners import row_of

MOST_ANSWERS = 100_000
_ANSWER = re.compile("m?(0|[1-9][0-9]{0,8})")
DIED = "died"
"""Fact of a finding whose schedule ended its process: such a schedule is not repeated automatically."""
UNKNOWNS = 12
"""A cell is given up after so many schedules without a judgement. All settings have been tried by then."""
LOSSES = 2
"""A cell is given up after it has lost so many processes."""
ROUNDS_OF_SMALL = 2
"""Rounds of the small cells before each of the others, up to the floors. With more, a default run would end later."""
WEIGHT = 3.0
"""Weight of the CPU time of other cells than small ones behind the floors: about four rounds of those to one of it."""
BARREN = 24
"""Schedules of one workload in a row without a new host trace, after which more would hardly bring one."""
MORE_WORKLOADS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTask:
    """before: evidence of an interrupted run. confirms: also run unordered operations of the first failing schedule in
    the other order. fails_on_conditional: a conditional finding ends the cell. within: run all schedules within so many
    answers, of `schedules` workloads; None: one of each."""

    plan: Plan
    schedules: int
    floor: int = 1
    before: Evidence = field(default_factory=Evidence)
    confirms: bool = False
    fails_on_conditional: bool = False
    within: int | None = None
    is_exercised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """cpu_s: of each process; after it only cells below their floors continue. until: the time.monotonic() at which all
    processes end."""

    cpu_s: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one schedule, or the end of a cell (`evidence` is None).

    reason: why it cannot count as a pass. gap: evidence that the cell still lacks. cut: the schedule ended by the wall
    time limit. scope: the schedules explored completely. is_left: the cell goes on in another process; `reason` is then
    its gap. spent: share of the budget of its process. error: why its process stopped; ran: the line of the running
    schedule.
    """

    cell: int = 0
    schedule: int = 0
    findings: tuple[Finding, ...] = ()
    evidence: Evidence | None = None
    duration_s: float = 0.0
    reason: str | None = None
    gap: str | None = None
    divergence: str | None = None
    cut: str | None = None
    scope: str | None = None
    note: str | None = None
    is_note_told: bool = False
    is_device_lost: bool = False
    left_cpu_s: float | None = None
    spent: float | None = None
    is_left: bool = False
    error: str | None = None
    ran: str | None = None
    exit_code: int | None = None

    def line(self) -> str:
        return json.dumps(to_plain(self))


def run_cell(number: int, task: CellTask, target_of: TargetOf, shared: Runner | None = None) -> Iterator[Report]:
    yield from take_turns([(number, task)], Limit(), target_of, shared)


def take_turns(
    share: Sequence[tuple[int, CellTask]],
    limit: Limit,
    target_of: TargetOf,
    shared: Runner | None = None,
    begins: Callable[[int, Plan], None] = lambda number, plan: None,
) -> Iterator[Report]:
    """The last report of a cell marks its end, or that it is left because the device is lost.

    shared: the runner of all cells; None: each has its own.
    """

    def spent() -> float:
        return time.process_time() + (shared.cpu_s if shared is not None else 0.0)

    budget = Budget(limit, spent)
    cells = [
        Turns(number, task, budget, shared or row_of(task.plan).make(task.plan, target_of), begins)
        for number, task in share
    ]
    first = next((cell for cell in cells if cell.is_small), None)
    while cells:
        for cell in [first] if first is not None and first.is_open and first.comes_first else due(cells):
            yield from cell.turn()
            if cell.has_lost_device:
                for other in cells:
                    yield from other.leave()
                return
        cells = [cell for cell in cells if cell.is_open]


def due(cells: Sequence[Turns]) -> Sequence[Turns]:
    if not any(cell.is_below_floor for cell in cells):
        return [min(cells, key=lambda each: each.weighed_s)]
    in_rounds = [cell for cell in cells if cell.is_below_floor or cell.is_small]
    now = min(cell.round for cell in in_rounds)
    return [cell for cell in in_rounds if cell.round == now]


class Budget:
    def __init__(self, limit: Limit, spent: Callable[[], float]) -> None:
        self.until = limit.until
        self.spent = spent
        self._began_s, self._began_cpu_s = time.monotonic(), spent()
        self._cpu_until = None if limit.cpu_s is None else self._began_cpu_s + limit.cpu_s

    def fits(self, *, cpu_s: float, wall_s: float) -> bool:
        """Whether half of such a schedule still fits, so that limits are kept on average."""
        is_in_cpu = self._cpu_until is None or self.spent() + cpu_s / 2 <= self._cpu_until
        return is_in_cpu and (self.until is None or time.monotonic() + wall_s / 2 <= self.until)

    @property
    def left_cpu_s(self) -> float | None:
        return None if self._cpu_until is None else max(0.0, self._cpu_until - self.spent())

    @property
    def spent_share(self) -> float | None:
        """Return the share that is spent of the limit that is nearer; None without a limit."""
        shares = []
        if self._cpu_until is not None:
            shares.append((self.spent() - self._began_cpu_s) / max(self._cpu_until - self._began_cpu_s, 1e-9))
        if self.until is not None:
            shares.append((time.monotonic() - self._began_s) / max(self.until - self._began_s, 1e-9))
        return max(shares, default=None)

    @property
    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() >= self.until


def reported_once(finding: Finding) -> tuple[str, str | None, str | None]:
    return finding.code, finding.message if finding.code == CALL else finding.buffer, finding.condition


class Turns:
    """A running cell. Without evidence at the end of the budget, up to MORE_WORKLOADS schedules with workloads of their
    own follow."""

    def __init__(
        self,
        number: int,
        task: CellTask,
        budget: Budget,
        runner: Runner,
        begins: Callable[[int, Plan], None] = lambda number, plan: None,
    ) -> None:
        self._number, self._task, self._budget, self._runner = number, task, budget, runner
        self._begins = begins
        self._row = row_of(task.plan)
        self._total, self._ran = task.before, task.before.schedules
        self._judged = self._unknown = self._lost = 0
        self._more: Iterator[Plan] | None = None
        self._exploration = (
            None if task.within is None else Exploration(task.plan, workloads=task.schedules, within=task.within)
        )
        self._traces: set[tuple[int, int]] = set()
        self._barren = 0
        self._cpu_s = self._wall_s = self.used_s = 0.0
        self._told: set[tuple[str, str | None, str | None]] = set()
        self._has_wrong_call = False
        self.is_open, self.has_lost_device = True, False

    @property
    def is_small(self) -> bool:
        return self._row.is_small(self._task.plan)

    @property
    def round(self) -> int:
        return self._ran if self.is_small else (self._ran + 1) * ROUNDS_OF_SMALL

    @property
    def weighed_s(self) -> float:
        return self.used_s if self.is_small else self.used_s * WEIGHT

    @property
    def comes_first(self) -> bool:
        return self._ran < min(self._task.floor, FLOOR)

    @property
    def is_below_floor(self) -> bool:
        return self._ran < self._task.floor

    def turn(self) -> Iterator[Report]:
        plan = self._next()
        if plan is None:
            yield self._end(self._gap())
            return
        self._begins(self._number, plan)
        began, spent = time.monotonic(), self._budget.spent()
        try:
            with time_limit(self._budget.until):
                outcome = self._runner.run(plan)
        except TimeUp:
            yield self._end(self._gap(), self._cut(plan, time.monotonic() - began))
            return
        except (UnknownVerdict, OSError, MemoryError, RuntimeError, ImportError) as error:
            why = str(error) if isinstance(error, UnknownVerdict) else machine_trouble(error)
            if why is None:
                raise
            self.has_lost_device = isinstance(error, HardwareError)
            left_cpu_s = self._budget.left_cpu_s if self.has_lost_device else None
            yield replace(self._end(why, why), is_device_lost=self.has_lost_device, left_cpu_s=left_cpu_s)
            return
        self._cpu_s, self._wall_s = self._budget.spent() - spent, time.monotonic() - began
        self.used_s += self._cpu_s
        outcome = replace(outcome, evidence=replace(outcome.evidence, traces=self._new_traces(outcome)))
        self._count(outcome)
        findings = self._news(self._confirmed(outcome))
        yield Report(
            cell=self._number,
            schedule=plan.schedule,
            findings=findings,
            evidence=outcome.evidence,
            duration_s=self._wall_s,
            reason=outcome.unjudged,
            gap=self._gap(),
            divergence=outcome.divergence,
            note=outcome.note,
            is_note_told=self._row.tells_notes,
            is_device_lost=outcome.is_device_lost,
            left_cpu_s=self._budget.left_cpu_s if outcome.is_device_lost else None,
            spent=self._budget.spent_share,
        )
        self.has_lost_device = outcome.is_device_lost
        if self.has_lost_device or self._is_enough(findings):
            yield self._end(None)

    def leave(self) -> Iterator[Report]:
        if not self.is_open:
            return
        is_left, gap = self._next() is not None, self._gap()
        if is_left and not self._total.schedules:
            gap = gap or "not exercised: it has not begun"
        end = self._end(gap)
        if is_left and end.note is not None:
            end = replace(end, note=f"{end.note}, before another cell lost the device")
        yield replace(end, is_left=is_left)

    def _is_enough(self, findings: tuple[Finding, ...]) -> bool:
        """Wrong calls alone end the cell only above its floor: later schedules make other calls."""
        ending = [each for each in findings if each.condition is None or self._task.fails_on_conditional]
        self._has_wrong_call = self._has_wrong_call or any(each.code == CALL for each in ending)
        others = any(each.code != CALL for each in ending)
        return others or (self._has_wrong_call and not self.is_below_floor)

    def _new_traces(self, outcome: Outcome) -> int | None:
        """1 for a host trace that is new for its workload in this cell, else 0; None: not known."""
        if self._exploration is not None:
            return int(self._exploration.took(outcome.refused, outcome.asked, outcome.trace))
        if not outcome.trace:
            return None
        key = workload_seed(outcome.plan), outcome.trace
        is_new = key not in self._traces
        self._traces.add(key)
        self._barren = 0 if is_new else self._barren + 1
        return int(is_new)

    @property
    def _is_exhausted(self) -> bool:
        return self._task.plan.trace is not None and self._barren >= BARREN and not self.is_below_floor

    def _next(self) -> Plan | None:
        task, at = self._task, self._ran
        if self._budget.is_over or self._gives_up or self._is_exhausted:
            return None
        if self._exploration is not None:
            fits = at < task.floor or self._budget.fits(cpu_s=self._cpu_s, wall_s=self._wall_s)
            return self._exploration.next() if fits else None
        behind = replace(task.plan, schedule=task.plan.schedule + at)
        if self._more is None:
            is_due = at < task.floor or self._budget.fits(cpu_s=self._cpu_s, wall_s=self._wall_s)
            if at < task.schedules and is_due:
                return behind
            self._more = further_workloads(behind, min(MORE_WORKLOADS, max(0, task.schedules - at)))
        return None if self._gap() is None else next(self._more, None)

    @property
    def _gives_up(self) -> bool:
        return (self._unknown >= UNKNOWNS and not self._judged) or self._lost >= LOSSES

    def _count(self, outcome: Outcome) -> None:
        self._total, self._ran = self._total.plus(outcome.evidence), self._ran + 1
        self._judged += outcome.unknown is None
        self._unknown += outcome.unknown is not None
        self._lost += outcome.is_lost

    def _gap(self) -> str | None:
        left = None if self._exploration is None else self._exploration.gap
        if self._task.is_exercised:
            return left
        return left or self._runner.gap(self._task.plan, self._total)

    def _confirmed(self, outcome: Outcome) -> tuple[Finding, ...]:
        if not (self._task.confirms and any(reported_once(each) not in self._told for each in outcome.findings)):
            return outcome.findings
        try:
            with time_limit(self._budget.until):
                return self._row.confirmed(self._runner, outcome, lambda: not self._budget.is_over)
        except (TimeUp, UnknownVerdict):
            return outcome.findings

    def _news(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        fresh = [each for each in findings if reported_once(each) not in self._told]
        kept = [each for each in fresh if each.condition is not None or each.code == CALL]
        self._told |= set(map(reported_once, kept))
        return tuple(fresh)

    def _end(self, reason: str | None, cut: str | None = None) -> Report:
        self.is_open = False
        note = self._runner.closing() if self._ran > self._task.before.schedules else None
        if self._is_exhausted and reason is None:
            ran = f"{self._ran} of {counted(self._task.schedules, 'schedule')}"
            note = f"{self._task.plan.cell}: ended after {ran}: the last {BARREN} brought no new host trace"
        scope = None if self._exploration is None else self._exploration.scope
        return Report(cell=self._number, reason=reason, cut=cut, scope=scope, note=note, is_note_told=note is not None)

    def _cut(self, plan: Plan, after_s: float) -> str:
        return f"--max-time cut its schedule {plan.schedule} after {after_s:.1f} s ({self._row.cost(plan)})"


class Exploration:
    """Every schedule of some workloads within so many "no" answers, as a tree of runs.

    The root answers "yes" to everything. A run has a child for each question after its last "no". first: plan of the
    first workload; each further one has the next schedule number, and so the next variant.
    """

    def __init__(self, first: Plan, *, workloads: int, within: int) -> None:
        self._first, self._workloads, self._within = first, workloads, within
        self._begun = 0
        self._left: deque[tuple[str, ...]] = deque()
        self._seen: set[int] = set()
        self.explored = 0

    def next(self) -> Plan | None:
        if not self._left:
            self.explored = self._begun
            if self._begun == self._workloads:
                return None
            self._begun += 1
            self._left.append(())
            self._seen.clear()
        number = self._first.schedule + self._begun - 1
        refused = self._left.popleft()
        return replace(
            self._first,
            schedule=number,
            strategy=ANSWERS,
            choices=answers_text(refused),
            extras=NO_EXTRAS if refused else None,
        )

    def took(self, refused: tuple[str, ...], asked: tuple[str, ...], trace: int) -> bool:
        is_new = trace not in self._seen
        self._seen.add(trace)
        if len(refused) < self._within:
            behind = asked.index(refused[-1]) + 1 if refused else 0
            self._left.extend((*refused, name) for name in asked[behind:])
        return is_new

    @property
    def scope(self) -> str | None:
        return scope_text(self.explored, within=self._within)

    @property
    def gap(self) -> str | None:
        if self.explored == self._workloads:
            return None
        return (
            f"{self.explored} of {counted(self._workloads, 'workload')} were run within "
            f"{counted(self._within, 'answer')}; of the next one, "
            f"{counted(len(self._left), 'schedule')} or more are left"
        )


def scope_text(workloads: int, *, within: int) -> str | None:
    if not workloads:
        return None
    return f"every schedule within {counted(within, 'answer')} of the eager order, of {counted(workloads, 'workload')}"


def answers_text(refused: Collection[str]) -> str:
    return ".".join(refused) or "none"


def parse_answers(text: str) -> tuple[str, ...]:
    """Inverse of answers_text. Raises UsageError."""
    names = () if text == "none" else tuple(text.split("."))
    if len(names) > MOST_ANSWERS or not all(_ANSWER.fullmatch(each) for each in names):
        raise UsageError(
            'choices: expected numbers of questions and messages, such as 12.m345, or "none"; '
            f"got {text[:40]!r}; copy the whole line"
        )
    return names
