"""Batches: the units of a campaign. A batch is one workload of one cell, or one line that failed before, run again.

    retract-resume:shape=llama-3-micro,strategy=answers,seed=3,schedule=1,requests=3     a workload
    hicache:shape=llama-3-micro,...,choices=none,expect=KV202                            a line that failed before

Invariants:
- A batch's result depends only on its line, the bound and the code, so it may run anywhere, and twice.
- Each workload is in one batch and one shard. Schedules of two workloads are never one trace, so counts of distinct
  traces add up.
- A batch cut by the time limit has no result and runs again.
- Batches travel as JSON. Nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import code_digest
from kvcheck.core.base.record import Evidence, Finding, to_plain, value_from
from kvcheck.core.run.cell_task import CellTask, Limit
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.runners import row_of
from kvcheck.core.run.turns import COSTLY, take_turns
from kvcheck.core.stress.plan_scenario import scenario_of
from kvcheck.core.stress.runner import TargetOf

MOST_SEEDS = 1_000_000
MOST_SHARDS = 10_000
MOST_NOTES = 4
_NUMBER = "(0|[1-9][0-9]{0,17})"
_SEEDS = re.compile(f"{_NUMBER}(?:-{_NUMBER})?")
_SHARD = re.compile("([1-9][0-9]{0,4})/([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True)
class Seeds:
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, seed: int) -> bool:
        return self.first <= seed <= self.last


@dataclass(frozen=True, slots=True)
class Shard:
    """Every count-th batch, from the number-th on; `number` counts from 1."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def has(self, at: int) -> bool:
        return at % self.count == self.number - 1


WHOLE = Shard()


def parse_seeds(text: str) -> Seeds:
    """Parse "N", the seeds from 1 to N, or "A-B". Raises UsageError."""
    found = _SEEDS.fullmatch(text)
    if found is not None:
        first, last = (1, int(found[1])) if found[2] is None else (int(found[1]), int(found[2]))
        if first <= last and last - first < MOST_SEEDS:
            return Seeds(first, last)
    raise UsageError(
        "--seeds: expected a number of seeds such as 100, or the first and the last as 101-200, at most "
        f"{MOST_SEEDS:,} of them; got {text[:40]!r}"
    )


def parse_shard(text: str) -> Shard:
    """Parse "I/N". Raises UsageError."""
    found = _SHARD.fullmatch(text)
    if found is None or not int(found[1]) <= int(found[2]) <= MOST_SHARDS:
        raise UsageError(
            f"--shard: expected I/N with I from 1 to N, such as 1/4, N at most {MOST_SHARDS:,}; got {text!r}"
        )
    return Shard(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One workload, or one line that failed before (`within` is None).

    at: its index in the campaign, which orders results; lines that failed before come first. plan: its first schedule.
    """

    at: int
    plan: Plan
    within: int | None

    @property
    def line(self) -> str:
        """Unique in the campaign."""
        return self.plan.line()

    def text(self, left_s: float | None = None) -> str:
        """Format as one line of JSON. left_s: its time limit in seconds; None: no limit."""
        return json.dumps({"at": self.at, "line": self.line, "within": self.within, "left_s": left_s})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The result of a batch.

    code: the digest of the kvcheck that ran it. is_whole: every schedule within the bound has run. reason: why it
    cannot count as a pass. divergence: of a line that failed before, from its recorded path. notes: for the record.
    """

    at: int
    line: str
    within: int | None
    code: str
    evidence: Evidence = field(default_factory=Evidence)
    findings: tuple[Finding, ...] = ()
    is_whole: bool = False
    reason: str | None = None
    divergence: str | None = None
    notes: tuple[str, ...] = ()
    cpu_s: float = 0.0
    duration_s: float = 0.0

    @property
    def plan(self) -> Plan:
        return parse_line(self.line)

    def text(self) -> str:
        return json.dumps(to_plain(self))


def parse_result(text: str) -> BatchResult:
    """Inverse of BatchResult.text. Raises ValueError."""
    result: BatchResult = value_from(BatchResult, json.loads(text), "batch")
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """The plan of a campaign. cells: the plan of each cell's first schedule.

    workloads: of each cell and seed; None: one of each variant. within: most answers that differ from the eager
    order's.
    """

    cells: tuple[Plan, ...]
    seeds: Seeds
    workloads: int | None
    within: int
    shard: Shard = WHOLE

    def workloads_of(self, cell: Plan) -> int:
        return self.workloads or scenario_of(cell).table.variants

    def batches(self) -> Iterator[Batch]:
        """Yield the shard's batches: a workload of each cell, then the next of each, then the next seed.

        The index of a batch does not depend on the shard. From one round to the next, shards move on by one cell, so
        that each has batches of all cells.
        """
        width = len(self.cells)
        sizes = [self.workloads_of(cell) for cell in self.cells]
        longest = max(sizes)
        for order, seed in enumerate(range(self.seeds.first, self.seeds.last + 1)):
            for number in range(longest):
                turn = order * longest + number
                for place, (cell, size) in enumerate(zip(self.cells, sizes, strict=True)):
                    if number < size and self.shard.has(place + turn):
                        plan = dataclasses.replace(cell, seed=seed, schedule=number)
                        yield Batch(at=turn * width + place, plan=plan, within=self.within)

    def share_of(self, place: int) -> int:
        """Count the shard's batches of the cell at this index."""
        sizes = [self.workloads_of(cell) for cell in self.cells]
        rounds, rest = divmod(len(self.seeds), self.shard.count)  # the shards' parts repeat after so many seeds
        found = 0
        for number in range(sizes[place]):
            firsts = range(place + number, place + number + max(sizes) * self.shard.count, max(sizes))
            hits = [self.shard.has(at) for at in firsts]
            found += rounds * sum(hits) + sum(hits[:rest])
        return found

    def has(self, result: BatchResult) -> bool:
        """Whether the result is of one of the shard's batches, or of a line that failed before in one of its cells."""
        plan = result.plan
        place = next((at for at, cell in enumerate(self.cells) if cell.cell == plan.cell), None)
        if place is None or result.within is None:
            return place is not None
        cell, longest = self.cells[place], max(map(self.workloads_of, self.cells))
        turn = (plan.seed - self.seeds.first) * longest + plan.schedule
        return (
            result.within == self.within
            and plan == dataclasses.replace(cell, seed=plan.seed, schedule=plan.schedule)
            and plan.seed in self.seeds
            and plan.schedule < self.workloads_of(cell)
            and result.at == turn * len(self.cells) + place
            and self.shard.has(place + turn)
        )

    def facts(self) -> dict[str, object]:
        return {
            "answers_within": self.within,
            "seeds": str(self.seeds),
            "workloads": self.workloads,
            "shard": None if self.shard.count == 1 else str(self.shard),
        }


def lines_again(plans: Sequence[Plan]) -> list[Batch]:
    """Make batches of lines that failed before; their indices precede all others."""
    return [Batch(at=at - len(plans), plan=plan, within=None) for at, plan in enumerate(plans)]


def run_batch(batch: Batch, *, until: float | None, target_of: TargetOf) -> BatchResult | None:
    """Run a batch in this process; None if `until`, a time.monotonic(), came before its end."""
    row = row_of(batch.plan)
    task = CellTask(plan=batch.plan, schedules=1, confirms=row.confirms, within=batch.within, goes_on=True)
    began, spent = time.monotonic(), time.process_time()
    evidence, notes = Evidence(), dict[str, None]()
    findings: list[Finding] = []
    reason: str | None = None
    divergence: str | None = None
    is_whole = is_judged = False
    for report in take_turns([(0, task)], Limit(until=until), target_of):
        if report.note:
            notes[report.note] = None
        if report.evidence is not None:
            evidence = evidence.plus(report.evidence)
            findings += report.findings
            reason, divergence = reason or report.reason, divergence or report.divergence
            continue
        is_whole = report.scope is not None
        is_judged = is_whole or (batch.within is None and evidence.schedules > 0)
        if report.cut is not None and report.cut == report.reason:  # something that is no limit of time ended it
            reason, is_judged = reason or report.cut, True
    if not (is_judged or any(each.code in COSTLY for each in findings)):
        return None
    return BatchResult(
        at=batch.at,
        line=batch.line,
        within=batch.within,
        code=code_digest(),
        evidence=evidence,
        findings=tuple(findings),
        is_whole=is_whole,
        reason=reason,
        divergence=divergence,
        notes=tuple(notes)[:MOST_NOTES],
        cpu_s=round(time.process_time() - spent, 4),
        duration_s=round(time.monotonic() - began, 4),
    )


def run_text(text: str, target_of: TargetOf) -> str:
    """Run a batch given as JSON. Return its result as JSON, "" if its time was up first."""
    asked = json.loads(text)
    batch = Batch(at=asked["at"], plan=parse_line(asked["line"]), within=asked["within"])
    until = None if asked["left_s"] is None else time.monotonic() + asked["left_s"]
    result = run_batch(batch, until=until, target_of=target_of)
    return "" if result is None else result.text()


def is_campaign_line(plan: Plan) -> bool:
    """Whether a campaign can run a line again: on the simulated backend, in one process, without a trace."""
    return plan.probe is None and plan.backend == "simulated" and plan.trace is None and plan.transport == "loopback"
