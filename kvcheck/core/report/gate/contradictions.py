"""Contradictions: finds facts of a record that cannot be true of one run.

Invariants:
- The record of a complete run has none. A record that was edited, cut or assembled is no evidence.
- A run of kvcheck's own code is evidence only for the build that judges it.
- Runs of one installed engine need the same files of it and the same kvcheck; runs against servers one version.
- A run without the digest of its subject is no evidence. Unknown digests never count as equal.
- A run of a mutant is never evidence: its code is broken on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvcheck.core.base.cells import cell_of, is_engine, is_of_server, keys_of, lines_of
from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, Identity, MutantResult, RunRecord, ScenarioResult, Verdict, to_plain
from kvcheck.core.base.server_facts import (
    REQUIRED,
    engine_and_version,
    is_requirement,
    required,
    requirement_rows,
    server_of,
)

OUTCOMES = {
    "killed": Verdict.PASS,
    "reproduced": Verdict.PASS,
    "survived": Verdict.FAIL,
    "killed-by-other": Verdict.FAIL,
    "clean-run-failed": Verdict.FAIL,
    "not-exercised": Verdict.UNKNOWN,
    "not-reproduced": Verdict.UNKNOWN,
    "clean-run-unknown": Verdict.UNKNOWN,
    "lost": Verdict.UNKNOWN,
    "not-begun": Verdict.UNKNOWN,
}

COUNTED = ("evidence", "scenarios", "mutants", "bench", "duration_s")
"""Keys of a record with numbers of at least 0; a seed or a finding's place may be any number."""
BUILTIN = "builtin"


def contradictions(record: RunRecord) -> list[str]:
    return [
        *_negative(record),
        *(message for row in record.scenarios for message in _scenario(record, row)),
        *(message for row in record.mutants for message in _mutant(row)),
        *_causes(record),
        *_whole(record),
        *_unplanned(record),
        *_unmet(record),
    ]


def _negative(record: RunRecord) -> Iterator[str]:
    for name in COUNTED:
        for place, number in _numbers(to_plain(getattr(record, name)), name):
            if number < 0:
                yield f"{place} is {number:g}; expected at least 0"


def _numbers(value: object, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{place}.{key}")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _numbers(item, f"{place}[{at}]")
    elif isinstance(value, (int, float)):
        yield place, value


def _scenario(record: RunRecord, row: ScenarioResult) -> Iterator[str]:
    if row.evidence != Evidence() and row.schedules != row.evidence.schedules:
        yield f"{row.id} says {counted(row.schedules, 'schedule')}, and its evidence {row.evidence.schedules}"
    if row.verdict is not Verdict.PASS:
        return
    if row.code or row.reason:
        yield f"{row.id} is pass, with the reason why it is none: {row.code or 'no code'}: {row.reason or 'no reason'}"
    findings = [each.code for each in record.findings if each.cell == row.id and each.condition is None]
    if findings:
        yield f"{row.id} is pass, and has findings: {', '.join(dict.fromkeys(findings))}"


def _mutant(row: MutantResult) -> Iterator[str]:
    worth = OUTCOMES.get(row.outcome)
    if worth is None:
        yield f"mutant {row.name}: the outcome {row.outcome!r} is not known; known: {', '.join(OUTCOMES)}"
    elif worth is not row.verdict:
        yield f"mutant {row.name} is {row.verdict.value}, and its outcome is {row.outcome}"
    if row.verdict is not Verdict.PASS:
        return
    if not row.schedules:
        yield f"mutant {row.name} is {row.outcome} in no schedule"
    if row.outcome == "killed" and (row.killed_by or "").partition(" ")[0] != row.killer:
        yield f"mutant {row.name} is killed by {row.killed_by or 'nobody'}; expected {row.killer}"


def _causes(record: RunRecord) -> Iterator[str]:
    causes = {finding.id for finding in record.findings if finding.cause is None}
    for finding in record.findings:
        if finding.cause is not None and finding.cause not in causes:
            yield f"finding {finding.id} is a symptom of {finding.cause}, which is no cause in this record"


def _whole(record: RunRecord) -> Iterator[str]:
    verdicts = [*(row.verdict for row in record.scenarios), *(row.verdict for row in record.mutants)]
    worst = Verdict.worst(verdicts)
    if verdicts and record.verdict is not worst:
        yield f"the run is {record.verdict.value}, and the worst of what it judged is {worst.value}"
    if record.complete and record.exit_code != record.verdict.exit_code:
        expected = record.verdict.exit_code
        yield f"the run is no pass: verdict {record.verdict.value}, exit {record.exit_code}; expected exit {expected}"
    cells = {row.id for row in record.scenarios}
    for finding in record.findings:
        if finding.condition is None and finding.cell not in cells and record.verdict is not Verdict.FAIL:
            yield f"the run is {record.verdict.value}, and has {finding.code} of {finding.cell}, which it did not judge"
    total = Evidence(schedules=0)
    for row in record.scenarios:
        total = total.plus(row.evidence)
    if record.scenarios and total != record.evidence:
        yield "the evidence of the run is not the sum of its scenarios'"


def _unplanned(record: RunRecord) -> Iterator[str]:
    """Cells, mutants and cases in the plan or the record, but not in both."""
    judged = [row.id for row in record.scenarios]
    cells = [cell_of(line, judged) for line in lines_of(record.plan)]
    for row in record.scenarios if record.identity is not None else ():  # without one it may be of version 1
        if row.id in cells and row.coverage is None:
            yield f"{row.id} does not say how many schedules it planned, and without how many it is no pass"
    yield from _pairs("cell", [*cells, *requirement_rows(record), *_names(record, "cases")], judged)
    yield from _pairs("mutant", _names(record, "mutants"), [row.name for row in record.mutants])
    for case in dict.fromkeys(row.case for row in record.bench):
        if case not in _names(record, "cases"):
            yield f"the price of {case} is not in the plan of the run"


def _unmet(record: RunRecord) -> Iterator[str]:
    least = required(record)
    for row in record.scenarios:
        kind = row.id.removeprefix(REQUIRED)
        if is_requirement(row) and row.verdict is Verdict.PASS:
            observed = record.evidence.observed.get(kind, 0)
            if kind not in least or observed < least[kind]:
                yield f"{row.id} is pass, and the run observed {observed} of {least.get(kind, 'no number')} required"


def _names(record: RunRecord, key: str) -> list[str]:
    names = record.plan.get(key)
    return [str(name) for name in names] if isinstance(names, list) else []


def _pairs(what: str, planned: Sequence[str], judged: Sequence[str]) -> Iterator[str]:
    for name, times in Counter(judged).items():
        if times > 1:
            yield f"{what} {name} is there {times} times"
        if name not in planned:
            yield f"{what} {name} is not in the plan of the run"
    for name in dict.fromkeys(planned):
        if name not in judged:
            yield f"{what} {name} is in the plan, and the record says nothing of it"


def build_problems(records: Sequence[RunRecord], code: str) -> Iterator[tuple[RunRecord, str]]:
    """Yield runs that are no evidence for the build of digest `code`, or contradict other runs; with reasons."""
    firsts: dict[tuple[str, ...], tuple[str, RunRecord]] = {}
    for record in records:
        for message in _own(record, code):
            yield record, message
        for name, value, what in _claims(record):
            first, other = firsts.setdefault(name, (value, record))
            if first != value:
                yield record, f"{what} is {short(value)}, and {short(first)} in run {other.run_id}: {_apart(name)}"


def changes(then: Identity | None, now: Identity) -> list[str]:
    if then is None:
        return ["it does not say which build of kvcheck made it"]
    named = (("kvcheck's code", "code"), ("the content of the trace", "trace"), ("the engine", "target"))
    both = ((what, getattr(then, name), getattr(now, name)) for what, name in named)
    return [f"{what} was {short(old)}, and is {short(new)}" for what, old, new in both if old != new]


def engine_of(record: RunRecord) -> str | None:
    """Return the installed engine of the run; None for kvcheck's own code."""
    planned = _planned(record, but_servers=True)
    targets = {cell["target"].partition(":")[0] for cell in planned if is_engine(cell.get("target", ""))}
    return min(targets) if targets else None


def absent_of(record: RunRecord) -> dict[str, str]:
    engine = record.environment.get("engine")
    absent = engine.get("absent") if isinstance(engine, dict) else None
    return {str(cell): str(why) for cell, why in absent.items()} if isinstance(absent, dict) else {}


def own_target_of(record: RunRecord) -> str | None:
    """Return the user's own target of the run, as MODULE:NAME."""
    planned = _planned(record, but_servers=True)
    targets = {cell.get("target", BUILTIN) for cell in planned if not is_engine(cell.get("target", ""))} - {BUILTIN}
    return min(targets) if targets else None


def _planned(record: RunRecord, *, but_servers: bool = False) -> list[dict[str, str]]:
    return [keys_of(line) for line in lines_of(record.plan) if not (but_servers and is_of_server(line))]


def _own(record: RunRecord, code: str) -> Iterator[str]:
    again = f"next: {record.repro}"
    mutants = dict.fromkeys(cell["mutant"] for cell in _planned(record) if "mutant" in cell)
    if mutants:
        yield f"it judged the mutant {', '.join(mutants)}, code that is broken on purpose; leave this run out"
    identity = record.identity
    if identity is None or identity.code is None:
        yield f"it does not say which build of kvcheck made it, as records of older versions do not; {again}"
        return
    engine = engine_of(record)
    if engine is None and server_of(record) is None and identity.code != code:
        there, here = short(identity.code), short(code)
        yield f"it is of another build of kvcheck: its code is {there}, and {here} here; {again}"
    named = engine or own_target_of(record)
    if named is not None and identity.target is None:
        yield f"it does not say which {named} it judged; {again}"
    if identity.trace is None and any("trace" in cell for cell in _planned(record)):
        yield f"it does not say what was in the trace that it fed; {again}"


def _claims(record: RunRecord) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Facts that must be equal in all runs that have them: (name, value, in words)."""
    identity = record.identity
    if identity is None:
        return
    if (server := server_of(record)) is not None:
        name, version = engine_and_version(server)
        # An unknown version never equals that of another run.
        yield ("server", name), version or f"unknown in run {record.run_id}", f"the version of the {name} that served"
        if identity.code is not None:
            yield ("checker", f"{name} server"), identity.code, f"the code of kvcheck that judged the {name} server"
    engine = engine_of(record)
    named = engine or own_target_of(record)
    if named is not None and identity.target is not None:
        yield ("engine", named), identity.target, f"the {named} that it judged"
    if engine is not None and identity.code is not None:
        yield ("checker", engine), identity.code, "the code of kvcheck that judged it"
    if identity.trace is not None:
        for trace in sorted({cell["trace"] for cell in _planned(record) if "trace" in cell}):
            yield ("trace", trace), identity.trace, f"the content of {trace}"


def _apart(name: tuple[str, ...]) -> str:
    return {
        "engine": "gate runs of another build of it by themselves, or run both again",
        "server": "gate runs of another version of it by themselves",
        "checker": "run both again with one kvcheck",
        "trace": "run both again with one trace",
    }[name[0]]
