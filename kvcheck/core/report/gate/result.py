"""GateResult: the result of one run of the gate: integrity and evidence of the runs, overhead rows, exit code, JSON.

Invariants:
- Worst wins: 1 integrity, 3 slower, 4 no evidence or inconclusive, 0; 130 if it was interrupted.
- Every problem of every run is kept; no measurement removes one.
- A key that does not apply is None, never 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvcheck.core.base.record import (
    LEFT_OUT,
    BenchRow,
    Evidence,
    Identity,
    RunRecord,
    ScenarioResult,
    Verdict,
    to_plain,
)
from kvcheck.core.base.server_facts import TOKEN, is_requirement, server_name, server_of
from kvcheck.core.report.cards import Card, cards_of
from kvcheck.core.report.ci.trouble import CiTrouble, of_card
from kvcheck.core.report.gate.baseline import NOTHING, BaselineResult, KnownPlaces
from kvcheck.core.report.gate.budgets import BOUNDS, Budget
from kvcheck.core.report.gate.contradictions import build_problems, contradictions
from kvcheck.core.report.gate.judge import ADVISED_ROWS, BudgetedRow, GatedRow, Overhead, StoredRow, fault
from kvcheck.core.report.prices import bench_command, is_check
from kvcheck.core.run.store import write_text

SCHEMA_VERSION = "5"
ON_INCONCLUSIVE = ("pass", "warn", "fail")
INTERRUPTED = 130
NAMED_ROWS = 6


@dataclass(frozen=True, slots=True)
class Problem:
    """run_id: None for a problem of the budgets. trouble: None without a finding. beside: a further place of the card
    before it, which lists for people leave out, since the card counts it."""

    run_id: str | None
    message: str
    trouble: CiTrouble | None = None
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTally:
    """Counts judged. verdicts: without those of measured cases. tokens_judged: of answers of running servers."""

    runs: int
    verdicts: int
    words_verified: int
    tokens_judged: int
    bench_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """server: engine and version; with a server, schedules are rounds. cells: without mutants, prices and requirements.
    fewest: schedules of one cell. floors: the least and the most that a pass needs. wanted: planned schedules; None if
    no cell has a plan. not_tried: strategies and settings, with the number of cells that lack each."""

    run_id: str
    identity: Identity | None
    server: str | None
    cells: int
    schedules: int
    wanted: int | None
    fewest: int | None
    floors: tuple[int, int] | None
    not_tried: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """code: digest of the kvcheck that ran the gate. min_schedules: per cell; None: each has its own floor. integrity,
    conditional and evidence leave out whatever the baseline covers."""

    schema_version: str = SCHEMA_VERSION
    tool: dict[str, str]
    code: str
    argv: tuple[str, ...]
    runs: tuple[RunSummary, ...]
    min_schedules: int | None
    fail_on_conditional: bool
    budget_file: str | None
    tol: float
    fail_over: float
    on_inconclusive: str
    tally: GateTally
    integrity: tuple[Problem, ...]
    conditional: tuple[Problem, ...]
    evidence: tuple[Problem, ...]
    baseline: BaselineResult | None
    rows: tuple[GatedRow, ...]
    warnings: tuple[str, ...]
    complete: bool
    duration_s: float

    @property
    def exit_code(self) -> int:
        if not self.complete:
            return INTERRUPTED
        if self.integrity or (self.baseline is not None and self.baseline.failing):
            return 1
        verdicts = {row.verdict for row in self.rows}
        if Overhead.SLOWER in verdicts:
            return 3
        if self.evidence or (Overhead.INCONCLUSIVE in verdicts and self.on_inconclusive == "fail"):
            return 4
        return 0

    @property
    def verdict(self) -> str:
        return {0: "PASS", 1: "FAIL", 3: "SLOWER"}.get(self.exit_code, "UNKNOWN")

    def plain(self) -> dict[str, object]:
        plain = to_plain(self)
        assert isinstance(plain, dict), "a dataclass becomes a dict"
        return plain | {"verdict": self.verdict.lower(), "exit_code": self.exit_code}

    def to_json(self) -> str:
        return json.dumps(self.plain(), indent=1, allow_nan=False) + "\n"


def write_json(result: GateResult, path: Path) -> None:
    write_text(path / "gate.json" if path.is_dir() else path, result.to_json())


def integrity_problems(
    records: Sequence[RunRecord], *, fail_on_conditional: bool = False, known: KnownPlaces = NOTHING
) -> tuple[Problem, ...]:
    told = [each for record in records for each in _failures(record, known)]
    return (*told, *(conditional_findings(records, known) if fail_on_conditional else ()))


def conditional_findings(records: Sequence[RunRecord], known: KnownPlaces = NOTHING) -> tuple[Problem, ...]:
    return tuple(each for record in records for each in _found(record, known, is_conditional=True))


def evidence_problems(
    records: Sequence[RunRecord], *, code: str, min_schedules: int | None = None, known: KnownPlaces = NOTHING
) -> tuple[Problem, ...]:
    """Return gaps that prevent a pass even without a failure. code: digest of the kvcheck that runs the gate."""
    builds = (Problem(record.run_id, message) for record, message in build_problems(records, code))
    gaps = (
        Problem(record.run_id, message)
        for record in records
        for message in (*contradictions(record), *_gaps(record, known), *_short(record, min_schedules))
    )
    return tuple(dict.fromkeys((*builds, *gaps)))


def has_enough(record: RunRecord, row: ScenarioResult, min_schedules: int | None = None) -> bool:
    return record.complete and row.schedules >= _least(record, row, min_schedules) and _has_judged(row.evidence)


def summaries(records: Sequence[RunRecord]) -> tuple[RunSummary, ...]:
    return tuple(_summary(record, _cells(record)) for record in records)


def tally(records: Sequence[RunRecord]) -> GateTally:
    return GateTally(
        runs=len(records),
        verdicts=sum(len(record.mutants) + len(_cells(record)) for record in records),
        words_verified=sum(sum(record.evidence.words_verified.values()) for record in records),
        tokens_judged=sum(record.evidence.observed.get(TOKEN, 0) for record in records),
        bench_rows=sum(len(record.bench) for record in records),
    )


def gated_rows(
    records: Sequence[RunRecord], budgets: Sequence[Budget]
) -> tuple[tuple[BudgetedRow, ...], tuple[Problem, ...], tuple[str, ...]]:
    """Rows of threads are no prices, so no budget covers them."""
    rows = [StoredRow(record.run_id, row) for record in records for row in record.bench if not is_check(row)]
    gated: list[BudgetedRow] = []
    problems: list[Problem] = []
    for budget in budgets:
        covered = [each for each in rows if budget.covers(each.row)]
        if not covered:
            problems.append(Problem(None, f"budget {budget}: not measured in these runs; {_nearest(budget, rows)}"))
        for each in covered:
            for bound in BOUNDS:
                if (value := getattr(budget, bound)) is None:
                    continue
                if reason := fault(each.row, bound):
                    problems.append(Problem(each.run_id, f"{each.row.id}, {bound}: {reason}"))
                else:
                    gated.append(BudgetedRow(each, bound, value))
    if rows and not budgets and not tally(records).verdicts:
        problems.append(
            Problem(
                None, "nothing was judged: expected a run of kvcheck stress, probe or live, or --budget FILE for these"
            )
        )
    warnings = []
    if len(gated) > ADVISED_ROWS:
        warnings.append(
            f"{len(gated)} rows are gated; over more than {ADVISED_ROWS}, Holm's correction hides what is slower"
        )
    return tuple(gated), tuple(problems), tuple(warnings)


def _failures(record: RunRecord, known: KnownPlaces) -> list[Problem]:
    """Uncovered failures, each once: causes, then failed rows without one, then the run's verdict."""
    found = _found(record, known, is_conditional=False)
    told = [f"{row.name}: {row.outcome}" for row in record.mutants if row.verdict is Verdict.FAIL]
    failed = [row for row in record.scenarios if row.verdict is Verdict.FAIL]
    if not (found or told):
        told = [
            f"{row.id} failed: {row.reason or row.code or 'no reason was recorded'}"
            for row in failed
            if not known.explains(record, row)
        ]
    if not (found or told or failed) and (record.verdict is Verdict.FAIL or record.exit_code == 1):
        told = [f"the run failed, with exit {record.exit_code}"]
    return [*found, *(Problem(record.run_id, text) for text in told)]


def _found(record: RunRecord, known: KnownPlaces, *, is_conditional: bool) -> list[Problem]:
    """Return a problem for each card, in the order of the run's screen, and behind it those of its further places."""
    return [
        replace(_problem(record, each, known), beside=each is not card)
        for card in cards_of(known.new(record))
        if card.is_conditional == is_conditional
        for each in (card, *(Card(bug=bug) for bug in card.bugs[1:]))
    ]


def _problem(record: RunRecord, card: Card, known: KnownPlaces) -> Problem:
    cause, trouble = card.finding, of_card(record, card)
    if known is not NOTHING:
        trouble = replace(trouble, named=f"finding {cause.id}, place {trouble.place!r}")
    condition = "" if cause.condition is None else f", if {cause.condition}"
    seen = f" ({trouble.seen})" if trouble.seen else ""
    named = f"; {trouble.named}" if trouble.named else ""
    return Problem(record.run_id, f"{cause.code} {cause.cell}{condition}: {cause.message}{seen}{named}", trouble)


def _gaps(record: RunRecord, known: KnownPlaces) -> list[str]:
    unknown = [row for row in record.scenarios if row.verdict is Verdict.UNKNOWN]
    told = [
        f"{row.id} is unknown: {row.reason or row.code or 'no reason was recorded'}"
        for row in unknown
        if not known.expects(record, row)
    ]
    if known.is_silent(record):
        told.append(f"{LEFT_OUT}, so nobody knows whether they are known; make a run of fewer cells")
    told += [f"{row.name} is unknown: {row.outcome}" for row in record.mutants if row.verdict is Verdict.UNKNOWN]
    told += [
        f"{row.id} passed without having judged anything"
        for row in _cells(record)
        if row.verdict is Verdict.PASS and not _has_judged(row.evidence)
    ]
    if any(map(is_requirement, record.scenarios)) and not _cells(record):
        told.append("the run judged no answer of its server")
    if not record.complete:
        told.append("the run is not complete: it was cut short")
    if not (record.scenarios or record.mutants or record.bench):
        told.append("the run judged and measured nothing")
    elif not told and not unknown and record.verdict is Verdict.UNKNOWN:
        told.append(f"the run is no pass: verdict unknown, exit {record.exit_code}")
    return told


def _short(record: RunRecord, min_schedules: int | None) -> Iterator[str]:
    is_live = server_of(record) is not None
    # Schedules inside a server are not chosen, so --min-schedules does not apply to it.
    units = "rounds" if is_live else "schedules"
    for row in _cells(record):
        floor, least = _least(record, row, None), _least(record, row, min_schedules)
        if row.verdict is Verdict.PASS and row.schedules < least:
            asked = "--min-schedules asks for" if least > floor else "it needs"
            how = f"{record.repro}, with --schedules {least} or more and a larger --max-time"
            if is_live:
                how = f"{record.repro}, with --rounds {least} or more"
            elif "/" in row.shape and not any(word.startswith("--transport") for word in record.argv):
                how = f"{record.repro} --transport loopback, which leaves this cell over processes out"
            yield f"{row.id} passed after too few {units}: {asked} {least}, got {row.schedules}; next: {how}"


def _least(record: RunRecord, row: ScenarioResult, min_schedules: int | None) -> int:
    floor = 0 if row.coverage is None else row.coverage.floor
    return floor if min_schedules is None or server_of(record) is not None else max(floor, min_schedules)


def _summary(record: RunRecord, cells: Sequence[ScenarioResult]) -> RunSummary:
    covered = [row.coverage for row in cells if row.coverage is not None]
    floors = [each.floor for each in covered]
    return RunSummary(
        run_id=record.run_id,
        identity=record.identity,
        server=None if (server := server_of(record)) is None else server_name(server),
        cells=len(cells),
        schedules=sum(row.schedules for row in cells),
        wanted=sum(each.wanted for each in covered) if covered else None,
        fewest=min((row.schedules for row in cells), default=None),
        floors=(min(floors), max(floors)) if floors else None,
        not_tried=dict(Counter(name for each in covered for name in each.not_tried)),
    )


def _cells(record: RunRecord) -> tuple[ScenarioResult, ...]:
    """Scenarios except benchmark cases and requirements, whose verdicts are not about the cache."""
    measured = {row.case for row in record.bench if row.ratios}
    return tuple(row for row in record.scenarios if row.id not in measured and not is_requirement(row))


def _has_judged(evidence: Evidence) -> bool:
    judged = (*evidence.words_verified.values(), evidence.orderings_checked, evidence.observed.get(TOKEN))
    return evidence.schedules > 0 and any(judged)


def _nearest(budget: Budget, rows: Sequence[StoredRow]) -> str:
    measured = [each.row for each in rows]
    like = [row for row in measured if row.case == budget.case] or measured
    named = [_named(row) for row in like[:NAMED_ROWS]]
    more = f" and {len(like) - NAMED_ROWS} more" if len(like) > NAMED_ROWS else ""
    return f"they hold {'; '.join(named) or 'no benchmark'}{more}; next: {bench_command(budget.case)}"


def _named(row: BenchRow) -> str:
    return f"{row.case}: {row.arm} over {row.baseline}, size {row.size}, shape {row.shape}, device {row.device}"
