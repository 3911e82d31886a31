"""Outcome: a run or a gate as cases that passed, failed or could not be judged, with reasons, for CI systems.

Invariants:
- UNKNOWN is an error and never a pass. So is an interrupted run, and a run without a case.
- If the exit code is not 0, some case is no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow, Identity, MutantResult, RunRecord, ScenarioResult, Verdict
from kvcheck.core.report import one_file
from kvcheck.core.report.cards import Card, cards_of
from kvcheck.core.report.ci.trouble import CiTrouble, TroubleKind, of_card, title_of
from kvcheck.core.report.gate.baseline import EntryStatus, JudgedEntry
from kvcheck.core.report.gate.judge import GatedRow, Overhead
from kvcheck.core.report.gate.result import GateResult, Problem
from kvcheck.core.report.gate.text import cells as row_cells
from kvcheck.core.report.gate.text import row_text, run_text, summary_text
from kvcheck.core.report.prices import is_check, ratio_text
from kvcheck.core.report.view import NO_REASON, verdicts_text
from kvcheck.core.report.wording import conditional_text, coverage_text, evidence_text
from kvcheck.core.run.store import write_text

RUN = "run"
"""The case of troubles that belong to no cell."""
BUDGETS = "budgets"
FAILS = (TroubleKind.FINDING, TroubleKind.SLOWER)
LET_PASS = (EntryStatus.KNOWN.value, EntryStatus.UNDECIDED.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """group: its class name. let_pass: the row of a baseline that accepts a failing or unjudged case."""

    id: str
    group: str
    duration_s: float = 0.0
    details: tuple[str, ...] = ()
    troubles: tuple[CiTrouble, ...] = ()
    let_pass: str | None = None

    @property
    def verdict(self) -> Verdict:
        kinds = {each.kind for each in self.troubles}
        if kinds & {*FAILS}:
            return Verdict.FAIL
        return Verdict.UNKNOWN if TroubleKind.GAP in kinds else Verdict.PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class CiOutcome:
    """name: the command. facts: values common to all cases. cards: of likely causes, clearest first. beside: of their
    further places, which a list for people leaves out, since the card counts them."""

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
    cards: tuple[CiTrouble, ...] = ()
    beside: tuple[CiTrouble, ...] = ()

    @property
    def listed(self) -> tuple[CiTrouble, ...]:
        return tuple(each for each in self.troubles if each not in self.beside)

    @property
    def troubles(self) -> tuple[CiTrouble, ...]:
        found = dict.fromkeys((*self.cards, *(each for case in self.cases for each in case.troubles)))
        order = (*FAILS, TroubleKind.GAP, TroubleKind.CONDITIONAL)
        return tuple(sorted(found, key=lambda each: order.index(each.kind)))


def outcome_of(subject: RunRecord | GateResult) -> CiOutcome:
    return of_record(subject) if isinstance(subject, RunRecord) else of_gate(subject)


def writer(format_name: str, render: Callable[[CiOutcome], str]) -> Callable[[RunRecord | GateResult, Path], None]:
    """Return the function that writes a run or a gate as one file of a format."""
    return lambda subject, path: write_text(one_file(format_name, path), render(outcome_of(subject)))


def of_record(record: RunRecord) -> CiOutcome:
    listed, beside = _causes(record)
    causes = [*listed, *beside]
    cases = [_scenario_case(record, row, _of_cell(causes, row.id)) for row in record.scenarios]
    cases += [_mutant_case(record, row) for row in record.mutants]
    named = {case.id for case in cases}
    # Cells with a cause and without a row in the record.
    for cell in dict.fromkeys(cell for each in causes for cell in each.cells if cell not in named):
        cases.append(Case(id=cell, group=_group(cell), troubles=_of_cell(causes, cell)))
    missing = []
    if not record.complete:
        text = "the run is not complete: what it had not judged is unknown"
        missing.append(CiTrouble(kind=TroubleKind.GAP, title="run cut short", message=text, replay=record.repro))
    if not cases:
        text = "the run judged and measured nothing"
        missing.append(CiTrouble(kind=TroubleKind.GAP, title="nothing judged", message=text, replay=record.repro))
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
        cards=tuple(listed),
        beside=tuple(beside),
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
    # Problems outside the listed runs are those of budgets, whose run_id is None.
    details = {run.run_id: (run_text(run),) for run in result.runs}
    cases = [
        Case(
            id=name or BUDGETS,
            group="kvcheck.gate",
            details=details.get(name or "", ()),
            troubles=tuple(_of_problem(each, kind, repro) for each, kind in told if each.run_id == name),
        )
        for name in dict.fromkeys([*details, *(each.run_id for each, _ in told)])
    ]
    cases += [_row_case(row, result, repro) for row in result.rows]
    if (found := result.baseline) is not None:
        rows = [row for row in found.rows if row.status != EntryStatus.ELSEWHERE.value]
        cases += [_baseline_case(row, repro, is_failing=row in found.failing) for row in rows]
    text = "the gate was interrupted: what it had not judged is unknown"
    cut = CiTrouble(kind=TroubleKind.GAP, title="gate cut short", message=text, replay=repro)
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
        beside=tuple(_of_problem(each, kind, repro) for each, kind in told if each.beside),
    )


def _causes(record: RunRecord) -> tuple[list[CiTrouble], list[CiTrouble]]:
    """Return the troubles of cards, and of their further places.

    A cell fails by conditional findings alone only under --fail-on-conditional.
    """
    cards = cards_of(record.findings)
    places = [Card(bug=bug) for card in cards for bug in card.bugs[1:]]
    proven = {cell for each in (*cards, *places) if not each.is_conditional for cell in each.bug.cells}
    failed = {row.id for row in record.scenarios if row.verdict is Verdict.FAIL} - proven
    listed, beside = (
        [of_card(record, each, fails_on_conditional=not failed.isdisjoint(each.bug.cells)) for each in part]
        for part in (cards, places)
    )
    return listed, beside


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
    is_failure = row.verdict is Verdict.FAIL
    more = CiTrouble(
        kind=TroubleKind.FINDING if is_failure else TroubleKind.GAP,
        code=row.code,
        title=title_of(row.code, "failed" if is_failure else "unknown"),
        cells=(row.id,),
        message=row.reason or NO_REASON,
        replay=record.repro,
    )
    return replace(case, troubles=(more, *found))


def _mutant_case(record: RunRecord, row: MutantResult) -> Case:
    trouble = CiTrouble(
        kind=TroubleKind.FINDING if row.verdict is Verdict.FAIL else TroubleKind.GAP,
        title=f"mutant {row.outcome}",
        cells=(f"mutant/{row.name}",),
        message=f"{row.name}: {row.outcome}; {row.message or f'{row.killer} has to find it'}",
        replay=row.replay or record.repro,
    )
    return Case(
        id=f"mutant/{row.name}",
        group="kvcheck.mutant",
        details=(f"bug {row.bug}, outcome {row.outcome}, found by {row.killed_by or 'nothing'}",),
        troubles=() if row.verdict is Verdict.PASS else (trouble,),
    )


def _row_case(row: GatedRow, result: GateResult, repro: str) -> Case:
    verdict, named, budget, measured, *_ = row_cells(row)
    text = f"{verdict}: {named}, budget {budget}, measured {measured}"
    if row.verdict is Overhead.SLOWER:
        kind, title = TroubleKind.SLOWER, "slower than its budget"
    else:
        kind, title = TroubleKind.GAP, "price not told from noise"
    trouble = CiTrouble(kind=kind, title=title, cells=(row.id,), message=text, replay=repro)
    is_let_pass = row.verdict is Overhead.INCONCLUSIVE and result.on_inconclusive != "fail"
    troubles = () if row.verdict is Overhead.OK or is_let_pass else (trouble,)
    return Case(id=row.id, group="kvcheck.gate.overhead", details=(text,), troubles=troubles)


def _baseline_case(row: JudgedEntry, repro: str, *, is_failing: bool) -> Case:
    text, title = row_text(row), f"{row.status} row of the baseline"
    trouble = CiTrouble(kind=TroubleKind.FINDING, title=title, place=row.what, message=text, replay=repro)
    return Case(
        id=row.what,
        group="kvcheck.gate.baseline",
        details=(text,),
        troubles=(trouble,) if is_failing else (),
        let_pass=text if row.status in LET_PASS and not is_failing else None,
    )


def _of_problem(problem: Problem, kind: TroubleKind, repro: str) -> CiTrouble:
    if problem.trouble is not None:
        return replace(problem.trouble, kind=kind)
    title = "gap in the evidence" if kind is TroubleKind.GAP else "failed"
    return CiTrouble(kind=kind, title=title, message=problem.message, replay=repro)


def _closed(cases: Sequence[Case], missing: Sequence[CiTrouble], exit_code: int, repro: str) -> tuple[Case, ...]:
    """Add a case for the run if it did not pass for a reason that no case has."""
    troubles = list(missing)
    verdicts = {case.verdict for case in cases}
    if exit_code == 1 and Verdict.FAIL not in verdicts:
        kind = TroubleKind.FINDING
    elif exit_code and not troubles and verdicts <= {Verdict.PASS}:
        kind = TroubleKind.GAP
    else:
        kind = None
    if kind is not None:
        text = f"it ended with exit {exit_code}, for a reason that no cell has"
        troubles.append(CiTrouble(kind=kind, title=f"exit {exit_code}", message=text, replay=repro))
    return (*cases, Case(id=RUN, group="kvcheck", troubles=tuple(troubles))) if troubles else tuple(cases)


def _group(cell: str) -> str:
    return f"kvcheck.{cell.partition('/')[0]}"


def _price_text(row: BenchRow) -> str:
    if is_check(row):
        return f"{row.id} over {row.baseline}: right in {counted(len(row.ratios), 'round')}; {row.note}"

    return f"{row.id} over {row.baseline}: ratio {ratio_text(row.ratio)}; noise floor {row.floor:.1%}; {row.status}"


def _facts(record: RunRecord) -> dict[str, str]:
    identity = record.identity or Identity()
    facts = {
        "run": record.run_id,
        "command": record.repro,
        "seed": None if record.seed is None else str(record.seed),
        "verdict": record.verdict.value,
        "exit_code": str(record.exit_code),
        "complete": str(record.complete).lower(),
        "code": identity.code and short(identity.code),
        "target": identity.target and short(identity.target),
        "evidence": evidence_text(record.evidence) or "nothing counted",
        **{f"words_verified.{name}": str(count) for name, count in record.evidence.words_verified.items()},
        **{f"observed.{name}": str(count) for name, count in record.evidence.observed.items()},
    }
    return {name: value for name, value in facts.items() if value is not None}
