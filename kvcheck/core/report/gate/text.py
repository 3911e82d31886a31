"""Text of the gate's result: words and table cells shared by terminal, markdown and page.

Invariants:
- Table cells hold the record's text unchanged. Each report escapes them for its own format.
- A value that does not exist is "n/a (why)", never 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted, some_of, span
from kvcheck.core.base.record import Identity
from kvcheck.core.report.gate.baseline import BaselineResult, EntryStatus, JudgedEntry
from kvcheck.core.report.gate.judge import GatedRow
from kvcheck.core.report.gate.result import GateResult, Problem, RunSummary
from kvcheck.core.report.prices import ratio_text

NAMED = 4

HEADINGS = ("verdict", "row", "budget", "measured (95 %)", "noise floor", "slower from", "rounds")
NARROWEST = (12, 20, 8, 8, 6, 6, 6)
MOST_LINES = 100


def cells(row: GatedRow) -> tuple[str, ...]:
    sign = "at most" if row.bound == "max_ratio" else "at least"
    unit = "" if row.bound == "max_ratio" else " of the limit"
    return (
        row.verdict.name,
        f"{row.case}: {row.arm} over {row.baseline}, {', '.join(part for part in (row.size, row.shape) if part)}",
        f"{sign} {row.budget:.3g}{unit}",
        ratio_text(row.last.measured),
        f"{row.last.floor:.1%}",
        slower_from_text(row),
        "+".join(str(each.rounds) for each in row.measurements),
    )


def slower_from_text(row: GatedRow) -> str:
    if row.slower_from is None or row.slower_from_change is None:
        return "n/a (rounds<6)"
    change = f", {row.slower_from_change:+.0%} time" if row.slower_from_change > 0 else ""
    return f"{row.slower_from:.3g}{change}"


def sections(result: GateResult) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return name, text and details of each part, in the order of judgement."""
    notes = tuple(f"{row.id}: {note}" for row in result.rows for note in row.notes)
    conditional = ("conditional", _conditional(result), _problem_texts(result.conditional))
    return (
        ("integrity", _integrity(result), _problem_texts(result.integrity)),
        *([conditional] if result.conditional else []),
        *([] if result.baseline is None else [_baseline(result.baseline, has_new=bool(result.integrity))]),
        ("evidence", _evidence(result), tuple(problem_text(each) for each in result.evidence)),
        ("runs", f"kvcheck's code here is {short(result.code)}", tuple(run_text(each) for each in result.runs)),
        ("overhead", _overhead(result), (*notes, *(f"warning: {warning}" for warning in result.warnings))),
    )


def _integrity(result: GateResult) -> str:
    tally = result.tally
    if not tally.verdicts:
        return (
            f"{counted(tally.runs, 'run')} without a verdict; name one of kvcheck stress, probe or live for integrity"
        )
    parts = [counted(tally.runs, "run"), counted(tally.verdicts, "verdict")]
    if tally.words_verified or not tally.tokens_judged:
        parts.append(f"{counted(tally.words_verified, 'word')} verified")
    if tally.tokens_judged:
        parts.append(f"{counted(tally.tokens_judged, 'token')} of answers judged")
    judged = ", ".join(parts)
    clean = "no finding" if result.baseline is None else "no new finding"
    return f"{judged}: {counted(len(listed(result.integrity)), 'problem') if result.integrity else clean}"


def _baseline(found: BaselineResult, *, has_new: bool) -> tuple[str, str, tuple[str, ...]]:
    counts = [f"{found.count(status)} {status.value}" for status in EntryStatus if found.count(status)]
    failing = found.failing
    others = [row for row in found.rows if row not in failing and row.status != EntryStatus.ELSEWHERE.value]
    details = [
        row_text(row) for row in (*failing, *sorted(others, key=lambda row: row.status == EntryStatus.KNOWN.value))
    ]
    if has_new:
        details.append(f"to accept a new finding: kvcheck baseline accept RUN#N {found.file} --owner WHO ...")
    text = f"{counted(len(found.rows), 'row')} in {found.file}: {', '.join(counts) or 'none'}"
    if failing:
        text += f"; {counted(len(failing), 'row')} to mend"
    return "baseline", text, tuple(details)


def row_text(row: JudgedEntry) -> str:
    seen = f" {counted(row.matches, 'time')}" if row.matches > 1 else ""
    text = f"; {row.text}" if row.text else ""
    whose = f"{row.owner}, until {row.expires}: {row.reason}"
    return f"row {row.row} {row.status}{seen}: {row.what}{text} ({whose})"


def _conditional(result: GateResult) -> str:
    count = counted(len(result.conditional), "finding")
    if result.fail_on_conditional:
        return f"{count} under an assumption, each a problem by --fail-on-conditional"
    return f"{count} under an assumption that the engine does not promise; --fail-on-conditional makes them problems"


def _some_schedules(runs: Sequence[RunSummary]) -> str:
    """Return "3 schedules of 24 planned (12 %)"."""
    ran = sum(run.schedules for run in runs)
    wanted = [run.wanted for run in runs if run.cells]
    known = [each for each in wanted if each is not None]
    kinds = {run.server is not None for run in runs if run.cells}
    noun = "schedule or round" if len(kinds) == 2 else "round" if True in kinds else "schedule"
    text = counted(ran, noun)
    if len(kinds) == 2 or not known or len(known) < len(wanted):
        return text
    return f"{text} of {sum(known):,} planned ({_share(ran, sum(known))})"


def _share(part: int, whole: int) -> str:
    return f"{100 * part // whole} %" if whole else "n/a"


def run_text(run: RunSummary) -> str:
    cells = counted(run.cells, "cell") + ("" if run.server is None else f" at {run.server}")
    parts = [f"{run.run_id}: {_some_schedules((run,))} in {cells}, {run.fewest or 0} or more in each"]
    if not run.cells:
        parts = [f"{run.run_id}: no cells"]
    if run.not_tried:
        names = [f"{name} in {counted(count, 'cell')}" for name, count in run.not_tried.items()]
        parts.append(f"not tried: {some_of(names, NAMED)}")
    return "; ".join((*parts, *_identity(run.identity)))


def _identity(identity: Identity | None) -> list[str]:
    if identity is None:
        return ["of an unknown build"]
    named = (("code", identity.code), ("trace", identity.trace), ("target", identity.target))
    return [f"{name} {short(value)}" for name, value in named if value is not None]


def _evidence(result: GateResult) -> str:
    """Return gaps, schedules run of planned, and the least that a pass needs, by cell."""
    cells = sum(run.cells for run in result.runs)
    floors = [floor for run in result.runs for floor in run.floors or ()]
    least = span(floors) if result.min_schedules is None else f"{result.min_schedules} by --min-schedules"
    needed = f"; a pass needs {least} in each cell, a failure none" if least else ""
    ran = f"{_some_schedules(result.runs)} in {counted(cells, 'cell')}{needed}" if cells else "no cell was judged"
    return f"{counted(len(result.evidence), 'gap') if result.evidence else 'enough'}: {ran}"


def _overhead(result: GateResult) -> str:
    if result.budget_file is None:
        return f"not judged: no --budget; {counted(result.tally.bench_rows, 'row')} of benchmarks in these runs"
    rules = f"tol {result.tol:.1%}, fail-over {result.fail_over:.1%}"
    return f"{counted(len(result.rows), 'gated row')}, budgets in {result.budget_file}, {rules}"


def listed(problems: Sequence[Problem]) -> list[Problem]:
    return [each for each in problems if not each.beside]


def _problem_texts(problems: Sequence[Problem]) -> tuple[str, ...]:
    return tuple(map(problem_text, listed(problems)))


def problem_text(problem: Problem) -> str:
    again = f"; next: {problem.trouble.replay}" if problem.trouble is not None and problem.trouble.replay else ""
    return (problem.message if problem.run_id is None else f"{problem.run_id}: {problem.message}") + again


DECISIONS = {
    0: "this change may be merged",
    1: "do not merge this change",
    3: "do not merge this change before it is faster, or its budget is larger",
    4: "no decision: the runs do not suffice",
}


def decision_text(result: GateResult) -> str:
    return f"{DECISIONS.get(result.exit_code, 'no decision: the gate was interrupted')}: {summary_text(result)}"


def summary_text(result: GateResult) -> str:
    counts = dict.fromkeys(("SLOWER", "INCONCLUSIVE", "OK"), 0)
    for row in result.rows:
        counts[row.verdict.name] += 1
    parts = [counted(len(listed(result.integrity)), "integrity problem")] if result.integrity else []
    if result.baseline is not None and (failing := result.baseline.failing):
        parts.append(f"{counted(len(failing), 'row')} of the baseline to mend")
    parts += [counted(len(result.evidence), "gap") + " in the evidence"] if result.evidence else []
    parts += [f"{count} {name}" for name, count in counts.items() if count]
    if counts["INCONCLUSIVE"] and result.on_inconclusive != "fail":
        parts.append(f"INCONCLUSIVE let pass by --on-inconclusive {result.on_inconclusive}")
    if not result.complete:
        parts.append("interrupted: partial")
    known = 0 if result.baseline is None else result.baseline.count(EntryStatus.KNOWN)
    clean = f"nothing new, {counted(known, 'known row')}" if known else "no finding"
    bare = "" if result.rows else ", overhead was not judged"
    return ", ".join(parts) or f"{clean}, enough evidence{bare}"
