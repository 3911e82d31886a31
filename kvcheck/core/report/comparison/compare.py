"""Comparison: compares several runs that judged, releases by bugs.

Invariants:
- A row that a run of the same engine lacks is "not run" there, and its bug is unjudged, never a pass. A row dropped by
  the release is "not in this release", and the other rows judge its bug.
- Runs of different installed engines share no table, since their rows differ in meaning. Runs against servers share
  one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcheck.core.base.cells import cell_of, lines_of
from kvcheck.core.base.codes import bug_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow, Finding, RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.server_facts import engine_and_version, is_requirement, server_of
from kvcheck.core.report.comparison.changes import Changes
from kvcheck.core.report.gate.contradictions import absent_of
from kvcheck.core.report.prices import is_check
from kvcheck.core.report.wording import evidence_text, observed_texts, why_text

NOT_RUN, ABSENT = "not run", "not in this release"
SERVERS = "servers"

CONDITIONAL = "conditional "


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """label: the release; for equal versions with the digest of its files, for equal files with the run id."""

    label: str
    table: str
    engine: str
    version: str
    run_id: str
    record: RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonEntry:
    """result: None if not run. is_absent: the release has dropped the row. notes: the run's warnings about this row."""

    label: str
    result: ScenarioResult | None
    codes: tuple[str, ...] = ()
    text: str = ""
    replay: str = ""
    notes: tuple[str, ...] = ()
    is_absent: bool = False

    @property
    def verdict(self) -> Verdict | None:
        return None if self.result is None else self.result.verdict

    @property
    def name(self) -> str:
        return ABSENT if self.is_absent else NOT_RUN if self.result is None else self.result.verdict.value

    @property
    def evidence(self) -> str:
        if self.result is None or is_requirement(self.result):
            return ""
        return evidence_text(self.result.evidence) or "nothing counted"

    @property
    def is_conditional(self) -> bool:
        return any(code.startswith(CONDITIONAL) for code in self.codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scenario and shape. shows: its subject; given once for rows that share it."""

    id: str
    shows: str
    cells: tuple[ComparisonEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rows about one bug. title: None for a scenario against servers, which is about no bug."""

    title: str | None
    rows: tuple[Row, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        columns = zip(*(row.cells for row in self.rows), strict=True)
        return tuple(
            Verdict.worst(cell.verdict or Verdict.UNKNOWN for cell in column if not cell.is_absent)
            for column in columns
        )

    @property
    def conditional(self) -> tuple[bool, ...]:
        columns = zip(*(row.cells for row in self.rows), strict=True)
        return tuple(any(cell.is_conditional for cell in column) for column in columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """prices: measured rows by name, a place for each column; None: not measured."""

    engine: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    prices: Mapping[str, tuple[BenchRow | None, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    tables: tuple[Table, ...]
    changes: Changes | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(column for table in self.tables for column in table.columns)

    @property
    def verdict(self) -> Verdict:
        judged = [verdict for table in self.tables for group in table.groups for verdict in group.verdicts]
        return Verdict.worst((*judged, *(column.record.verdict for column in self.columns)))


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Compare runs. Raises UsageError for a run without scenarios, and for a run or row given twice."""
    given = _twice(record.run_id for record in records)
    if given is not None:
        raise UsageError(
            f"run {given} was given twice, from two files; expected runs that are not copies: name it once"
        )
    for record in records:
        if not record.scenarios:
            raise UsageError(
                f"run {record.run_id} judged no scenario, so it cannot be compared: expected runs of kvcheck stress, "
                "probe or live; give a folder to -o for one page a run"
            )
        if (row := _twice(result.id for result in record.scenarios)) is not None:
            raise UsageError(f"run {record.run_id} has the row {row!r} twice, so it cannot be compared: run it again")
    columns = _columns(records)
    names = dict.fromkeys(column.table for column in columns)
    return Comparison(tables=tuple(_table(name, [c for c in columns if c.table == name]) for name in names))


def _twice(names: Iterable[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)


def _columns(records: Sequence[RunRecord]) -> list[Column]:
    named = [(*_engine(record), record) for record in records]
    labels = [f"{engine} {version}" for engine, version, _ in named]
    labels = [
        label if labels.count(label) == 1 or (files := _files(record)) is None else f"{label}, files {short(files)}"
        for label, (_, _, record) in zip(labels, named, strict=True)
    ]
    return [
        Column(
            label=label if labels.count(label) == 1 else f"{label}, run {record.run_id}",
            table=engine if server_of(record) is None else SERVERS,
            engine=engine,
            version=version,
            run_id=record.run_id,
            record=record,
        )
        for label, (engine, version, record) in zip(labels, named, strict=True)
    ]


def _files(record: RunRecord) -> str | None:
    engine = record.environment.get("engine")
    return str(engine["files"]) if isinstance(engine, dict) and engine.get("files") else None


def _engine(record: RunRecord) -> tuple[str, str]:
    if (server := server_of(record)) is not None:
        name, known = engine_and_version(server)
        return name, known or "of unknown version"
    engine = record.environment.get("engine")
    if isinstance(engine, dict):
        commit = engine.get("commit")
        built = f" at {short(str(commit))}" if commit else ""
        return str(engine.get("engine", "unknown engine")), f"{engine.get('version', 'unknown')}{built}"
    return "builtin", record.tool.get("version", "unknown")


def _table(engine: str, columns: list[Column]) -> Table:
    ids = list(dict.fromkeys(name for column in columns for name in _results(column)))
    shows = {name: text for column in reversed(columns) for name, text in _shown(column.record).items()}
    groups: dict[str, list[Row]] = {}
    told: set[str] = set()
    for name, cells in zip(ids, zip(*(_cells(column, ids) for column in columns), strict=True), strict=True):
        text = shows.get(name, "")
        row = Row(id=name, shows="" if text in told else text, cells=cells)
        told.add(text)
        groups.setdefault(name if engine == SERVERS else bug_of(name.partition("/")[0]), []).append(row)
    titled: list[tuple[str | None, list[Row]]] = [*sorted(groups.items(), key=_order)]
    if engine == SERVERS:
        titled = [(None, rows) for rows in groups.values()]
    return Table(
        engine=engine,
        columns=tuple(columns),
        groups=tuple(Group(title=title, rows=tuple(rows)) for title, rows in titled),
        prices=_prices([column.record for column in columns]),
    )


def _prices(records: Sequence[RunRecord]) -> dict[str, tuple[BenchRow | None, ...]]:
    by_run = [
        {f"{row.id} to {row.baseline}, {row.device}": row for row in record.bench if not is_check(row)}
        for record in records
    ]
    names = dict.fromkeys(name for run in by_run for name in run)
    return {name: tuple(run.get(name) for run in by_run) for name in names}


def _order(group: tuple[str, list[Row]]) -> tuple[bool, str]:
    title = group[0]
    return title[1:2] != ":", title


def _shown(record: RunRecord) -> dict[str, str]:
    shows = record.plan.get("shows")
    return {str(name): str(text) for name, text in shows.items()} if isinstance(shows, dict) else {}


def _results(column: Column) -> dict[str, ScenarioResult]:
    """Results by row name: rows of servers are named without the engine."""
    rows = column.record.scenarios
    if column.table != SERVERS:
        return {row.id: row for row in rows}
    short = [row.id.removesuffix(f"/{column.engine}") for row in rows]
    return {name if short.count(name) == 1 else row.id: row for name, row in zip(short, rows, strict=True)}


def _cells(column: Column, ids: Iterable[str]) -> list[ComparisonEntry]:
    record = column.record
    results, absent = _results(column), absent_of(record)
    found: dict[str, list[Finding]] = {}
    for finding in record.findings:
        found.setdefault(finding.cell, []).append(finding)
    return [
        ComparisonEntry(label=column.label, result=None, text=absent[name], is_absent=True)
        if name in absent and name not in results
        else _cell(column, row := results.get(name), found.get(row.id, []) if row else [])
        for name in ids
    ]


def _cell(column: Column, result: ScenarioResult | None, findings: list[Finding]) -> ComparisonEntry:
    record = column.record
    if result is None:
        text = f"{record.repro} did not run it"
        return ComparisonEntry(label=column.label, result=None, text=text, replay=record.repro)
    findings.sort(key=lambda each: each.condition is not None)
    codes = [each.code if each.condition is None else CONDITIONAL + each.code for each in findings]
    return ComparisonEntry(
        label=column.label,
        result=result,
        codes=tuple(dict.fromkeys(codes)),
        text=_text(findings[0]) if findings else why_text(result),
        replay=_replay(record, result, findings),
        notes=_notes(record, result.id),
    )


def _text(finding: Finding) -> str:
    return finding.message if finding.condition is None else f"{finding.message}; only if {finding.condition}"


def _notes(record: RunRecord, name: str) -> tuple[str, ...]:
    start = f"{name}: "
    return tuple(
        part.removeprefix(start)
        for line in record.warnings
        for part in line.split("; " + start)
        if line.startswith(start)
    )


def _replay(record: RunRecord, result: ScenarioResult, findings: Iterable[Finding]) -> str:
    for finding in findings:
        if finding.replay:
            return finding.replay
    judged = [row.id for row in record.scenarios]
    for line in lines_of(record.plan):
        if cell_of(line, judged) == result.id:
            return f"kvcheck replay {line}"
    return record.repro


def summary(comparison: Comparison) -> str:
    texts = []
    for table in comparison.tables:
        for at, column in enumerate(table.columns):
            verdicts = [group.verdicts[at] for group in table.groups]
            failed, unknown = verdicts.count(Verdict.FAIL), verdicts.count(Verdict.UNKNOWN)
            told = [f"{count} {word}" for count, word in ((failed, "FAIL"), (unknown, "UNKNOWN")) if count]
            texts.append(f"{column.label}: {', '.join(told) or 'all pass'} of {len(verdicts)}")
    return "; ".join(texts)


def counts(cell: ComparisonEntry) -> str:
    if cell.result is None or not cell.evidence:
        return ""
    schedules, evidence = cell.result.schedules, cell.result.evidence
    if evidence.observed:
        return ", ".join((counted(schedules, "round"), *observed_texts(evidence.observed)))
    words, orderings = sum(evidence.words_verified.values()), evidence.orderings_checked or 0
    more = [counted(count, noun) for count, noun in ((words, "word"), (orderings, "ordering")) if count]
    return ", ".join((counted(schedules, "schedule"), *more))
