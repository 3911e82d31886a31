"""Outcome: a run or a gate as cases that passed, failed or could not be judged, with reasons, for CI systems.

Invariants:
- UNKNOWN is an error and never a pass. So is an interrupted run, and a run without a case.
- If the exit code is not 0, some case is no pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvcheck.core.base.causes import bugs
from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow, Interval, MutantResult, RunRecord, ScenarioResult, Verdict
from kvcheck.core.report.ci.trouble import CiTrouble, TroubleKind, of_bug, title_of
from kvcheck.core.report.gate.baseline import BaselineResult, EntryStatus
from kvcheck.core.report.gate.judge import GatedRow, Overhead
from kvcheck.core.report.gate.result import GateResult, Problem
from kvcheck.core.report.gate.text import cells as row_cells
from kvcheck.core.report.gate.text import row_text, run_text, summary_text
from kvcheck.core.report.prices import is_check
from kvcheck.core.report.view import verdicts_text
from kvcheck.core.report.wording import conditional_text, coverage_text, evidence_text

RUN = "run"
"""The case of troubles that belong to no cell."""
BUDGETS = "budgets"
"""The case of problems of the gate's budgets."""
FAILS = (TroubleKind.FINDING, TroubleKind.SLOWER)
LET_PASS = (EntryStatus.KNOWN.value, EntryStatus.UNDECIDED.value)
NO_REASON = "no reason was recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test in CI. group: its class name. details: lines of evidence.

    let_pass: the row of a baseline that accepts a failing or unjudged case.
    """

    id: str
    group: str
    duration_s: float = 0.0
    details: tuple[str, ...] = ()
    troubles: tuple[CiTrouble, ...] = ()
    let_pass: str | None = None

    @property
    def verdict(self) -> Verdict:
        """FAIL over UNKNOWN over PASS; a conditional finding changes nothing."""
        kinds = {each.kind for each in self.troubles}
        if kinds & {*FAILS}:
            return Verdict.FAIL
        return Verdict.UNKNOWN if TroubleKind.GAP in kinds else Verdict.PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class CiOutcome:
    """name: the command. facts: values common to all cases."""

    name: str
    verdict: str
    exit_code: int
    summary: str
    cases: tuple[Case, ...]
    warnings: tuple[str, ...]
    facts: dict[str, str]
    duration_s: float
    started_at: str | None
    version: str
    is_complete: bool

    @property
    def troubles(self) -> tuple[CiTrouble, ...]:
        """All troubles, each once: failures, then gaps, then conditional findings."""
        found = dict.fromkeys(each for case in self.cases for each in case.troubles)
        order = (*FAILS, TroubleKind.GAP, TroubleKind.CONDITIONAL)
        return tuple(sorted(found, key=lambda each: order.index(each.kind)))


def of_record(record: RunRecord) -> CiOutcome:
    causes = _causes(record)
    cases = [_scenario_case(record, row, _of_cell(causes, row.id)) for row in record.scenarios]
    cases += [_mutant_case(record, row) for row in record.mutants]
    named = {case.id for case in cases}
    # Cells with a cause and without a row in the record.
    for cell in dict.fromkeys(cell for each in causes for cell in each.cells if cell not in named):
        cases.append(Case(id=cell, group=_group(cell), troubles=_of_cell(causes, cell)))
    missing = []
    if not record.complete:
        missing.append(_gap(record, "run cut short", "the run is not complete: what it had not judged is unknown"))
    if not cases:
        missing.append(_gap(record, "nothing judged", "the run judged and measured nothing"))
    name = f"kvcheck {record.argv[0]}" if record.argv and record.argv[0] != "kvcheck" else "kvcheck"
    counts = verdicts_text(case.verdict for case in cases)
    judged = evidence_text(record.evidence)
    return CiOutcome(
        name=name,
        verdict=record.verdict.value.upper(),
        exit_code=record.exit_code,
        summary="; ".join(part for part in (counts, judged and f"judged: {judged}") if part),
        cases=_closed(cases, missing, record.exit_code, record.repro),
        warnings=record.warnings,
        facts=_facts(record),
        duration_s=record.duration_s,
        started_at=record.started_at,
        version=record.tool.get("version", ""),
        is_complete=record.complete,
    )


def of_gate(result: GateResult) -> CiOutcome:
    """Make a case for each run, gated row and baseline row about these runs, and one for budgets without a row."""
    repro = " ".join(("kvcheck", *result.argv))
    conditional = () if result.fail_on_conditional else result.conditional
    told = [
        *((each, TroubleKind.FINDING) for each in result.integrity),
        *((each, TroubleKind.CONDITIONAL) for each in conditional),
        *((each, TroubleKind.GAP) for each in result.evidence),
    ]
    cases = [
        Case(
            id=run.run_id,
            group="kvcheck.gate",
            details=(run_text(run),),
            troubles=tuple(_of_problem(each, kind, repro) for each, kind in told if each.run_id == run.run_id),
        )
        for run in result.runs
    ]
    # Problems outside the listed runs, such as those of budgets, whose run_id is None.
    shown = {case.id for case in cases}
    for name in dict.fromkeys(each.run_id for each, _ in told if each.run_id not in shown):
        others = tuple(_of_problem(each, kind, repro) for each, kind in told if each.run_id == name)
        cases.append(Case(id=name or BUDGETS, group="kvcheck.gate", troubles=others))
    cases += [_row_case(row, result, repro) for row in result.rows]
    cases += [] if result.baseline is None else _baseline_cases(result.baseline, repro)
    text = "the gate was interrupted: what it had not judged is unknown"
    cut = CiTrouble(
        kind=TroubleKind.GAP, code=None, title="gate cut short", cells=(), place="", message=text, replay=repro
    )
    return CiOutcome(
        name="kvcheck gate",
        verdict=result.verdict,
        exit_code=result.exit_code,
        summary=summary_text(result),
        cases=_closed(cases, [] if result.complete else [cut], result.exit_code, repro),
        warnings=result.warnings,
        facts={
            "command": repro,
            "verdict": result.verdict.lower(),
            "exit_code": str(result.exit_code),
            "code": short(result.code),
            "runs": " ".join(run.run_id for run in result.runs),
        },
        duration_s=result.duration_s,
        started_at=None,
        version=result.tool.get("version", ""),
        is_complete=result.complete,
    )


def _causes(record: RunRecord) -> list[CiTrouble]:
    """Causes of a run. A cell fails by conditional findings alone only under --fail-on-conditional."""
    found = bugs(record.findings)
    proven = {cell for bug in found if bug.cause.condition is None for cell in bug.cells}
    failed = {row.id for row in record.scenarios if row.verdict is Verdict.FAIL} - proven
    return [of_bug(record, bug, fails_on_conditional=not failed.isdisjoint(bug.cells)) for bug in found]


def _of_cell(causes: Iterable[CiTrouble], cell: str) -> tuple[CiTrouble, ...]:
    return tuple(each for each in causes if cell in each.cells)


def _scenario_case(record: RunRecord, row: ScenarioResult, found: tuple[CiTrouble, ...]) -> Case:
    details = [text] if (text := conditional_text(row.id, record.findings)) else []
    details.append(f"evidence: {evidence_text(row.evidence) or 'nothing counted'}")
    if row.coverage is not None:
        details.append(f"planned {counted(row.coverage.wanted, 'schedule')}; {coverage_text(row.coverage)}")
    details += [_price_text(each) for each in record.bench if each.case == row.id]
    case = Case(id=row.id, group=_group(row.id), duration_s=row.duration_s, details=tuple(details), troubles=found)
    if row.verdict is Verdict.PASS or case.verdict is Verdict.FAIL:
        return case
    why = row.reason or NO_REASON
    if row.verdict is Verdict.FAIL:
        more = _own(record, TroubleKind.FINDING, row.code, title_of(row.code, "failed"), row.id, why)
    else:
        more = _own(record, TroubleKind.GAP, row.code, title_of(row.code, "unknown"), row.id, why)
    return replace(case, troubles=(more, *found))


def _mutant_case(record: RunRecord, row: MutantResult) -> Case:
    name = f"mutant/{row.name}"
    details = (f"bug {row.bug}, outcome {row.outcome}, found by {row.killed_by or 'nothing'}",)
    case = Case(id=name, group="kvcheck.mutant", details=details)
    if row.verdict is Verdict.PASS:
        return case
    kind = TroubleKind.FINDING if row.verdict is Verdict.FAIL else TroubleKind.GAP
    message = f"{row.name}: {row.outcome}; {row.message or f'{row.killer} has to find it'}"
    trouble = _own(record, kind, None, f"mutant {row.outcome}", name, message)
    return replace(case, troubles=(replace(trouble, replay=row.replay or record.repro),))


def _row_case(row: GatedRow, result: GateResult, repro: str) -> Case:
    verdict, named, budget, measured, *_ = row_cells(row)
    details = (f"{verdict}: {named}, budget {budget}, measured {measured}",)
    case = Case(id=row.id, group="kvcheck.gate.overhead", details=details)
    if row.verdict is Overhead.OK:
        return case
    if row.verdict is Overhead.INCONCLUSIVE and result.on_inconclusive != "fail":
        return case
    kind = TroubleKind.SLOWER if row.verdict is Overhead.SLOWER else TroubleKind.GAP
    title = "slower than its budget" if kind is TroubleKind.SLOWER else "price not told from noise"
    text = details[0]
    trouble = CiTrouble(kind=kind, code=None, title=title, cells=(row.id,), place="", message=text, replay=repro)
    return replace(case, troubles=(trouble,))


def _baseline_cases(found: BaselineResult, repro: str) -> list[Case]:
    """Cases of baseline rows about these runs' engines. A row that fails the gate is a failure."""
    cases = []
    for row in found.rows:
        if row.status == EntryStatus.ELSEWHERE.value:
            continue
        text = row_text(row)
        case = Case(id=row.what, group="kvcheck.gate.baseline", details=(text,))
        if row in found.failing:
            title = f"{row.status} row of the baseline"
            trouble = CiTrouble(
                kind=TroubleKind.FINDING, code=None, title=title, cells=(), place=row.what, message=text, replay=repro
            )
            case = replace(case, troubles=(trouble,))
        elif row.status in LET_PASS:
            case = replace(case, let_pass=text)
        cases.append(case)
    return cases


def _of_problem(problem: Problem, kind: TroubleKind, repro: str) -> CiTrouble:
    if problem.trouble is not None:
        return replace(problem.trouble, kind=kind)
    title = "gap in the evidence" if kind is TroubleKind.GAP else "failed"
    return CiTrouble(kind=kind, code=None, title=title, cells=(), place="", message=problem.message, replay=repro)


def _closed(cases: Sequence[Case], missing: Sequence[CiTrouble], exit_code: int, repro: str) -> tuple[Case, ...]:
    """Add a case for the run if it did not pass for a reason that no case has."""
    troubles = list(missing)
    verdicts = {case.verdict for case in cases}
    if exit_code == 1 and Verdict.FAIL not in verdicts:
        troubles.append(_exit_trouble(TroubleKind.FINDING, exit_code, repro))
    elif exit_code and not troubles and verdicts <= {Verdict.PASS}:
        troubles.append(_exit_trouble(TroubleKind.GAP, exit_code, repro))
    if not troubles:
        return tuple(cases)
    return (*cases, Case(id=RUN, group="kvcheck", troubles=tuple(troubles)))


def _exit_trouble(kind: TroubleKind, exit_code: int, repro: str) -> CiTrouble:
    text = f"it ended with exit {exit_code}, and no cell says why"
    return CiTrouble(kind=kind, code=None, title=f"exit {exit_code}", cells=(), place="", message=text, replay=repro)


def _own(record: RunRecord, kind: TroubleKind, code: str | None, title: str, cell: str, message: str) -> CiTrouble:
    return CiTrouble(kind=kind, code=code, title=title, cells=(cell,), place="", message=message, replay=record.repro)


def _gap(record: RunRecord, title: str, message: str) -> CiTrouble:
    return CiTrouble(
        kind=TroubleKind.GAP, code=None, title=title, cells=(), place="", message=message, replay=record.repro
    )


def _group(cell: str) -> str:
    return f"kvcheck.{cell.partition('/')[0]}"


def _price_text(row: BenchRow) -> str:
    if is_check(row):
        return f"{row.id} over {row.baseline}: right in {counted(len(row.ratios), 'round')}; {row.note}"

    def text(interval: Interval) -> str:
        if interval.lo is None or interval.hi is None:
            return f"{interval.est:.3g}, n/a (rounds<6)"
        return f"{interval.est:.3g}, {interval.lo:.3g} to {interval.hi:.3g}"

    return f"{row.id} over {row.baseline}: ratio {text(row.ratio)}; noise floor {row.floor:.1%}; {row.status}"


def _facts(record: RunRecord) -> dict[str, str]:
    identity = record.identity
    facts = {
        "run": record.run_id,
        "command": record.repro,
        "seed": None if record.seed is None else str(record.seed),
        "verdict": record.verdict.value,
        "exit_code": str(record.exit_code),
        "complete": str(record.complete).lower(),
        "code": None if identity is None or identity.code is None else short(identity.code),
        "target": None if identity is None or identity.target is None else short(identity.target),
        "evidence": evidence_text(record.evidence) or "nothing counted",
        **{f"words_verified.{name}": str(count) for name, count in record.evidence.words_verified.items()},
        **{f"observed.{name}": str(count) for name, count in record.evidence.observed.items()},
    }
    return {name: value for name, value in facts.items() if value is not None}
