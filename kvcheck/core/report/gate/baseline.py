"""Baseline: known findings and expected UNKNOWNs, and the status that the gate gives to each.

Invariants:
- A finding is covered by its cell, code and place alone. Symptoms of a covered cause are covered with it.
- A failing cell is known only if findings of it are covered and no uncovered one would fail it.
- A row never covers a finding of another condition: a place includes whether it is conditional.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache

from kvcheck.core.base.causes import place_of
from kvcheck.core.base.nouns import counted, some_of
from kvcheck.core.base.record import LEFT_OUT, Finding, RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.server_facts import engine_and_version, server_of
from kvcheck.core.report.gate.contradictions import BUILTIN, absent_of, engine_of, own_target_of


class BaselineTable(Enum):
    FINDING = "finding"
    UNKNOWN = "unknown"


class EntryStatus(Enum):
    KNOWN = "known"
    """A finding, or an UNKNOWN with its reason, matches the row."""
    GONE = "gone"
    """The release has dropped its cells, or they passed with enough evidence and match nothing. Fails if strict."""
    UNDECIDED = "undecided"
    """Its cells ran, but cannot show whether it is gone."""
    UNUSED = "unused"
    """No run has a cell of this name. Fails the gate."""
    EXPIRED = "expired"
    """Its date has passed; it covers nothing any more. Fails the gate."""
    ELSEWHERE = "elsewhere"
    """It is about an engine that none of these runs judged, or a cell that --changed did not pick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEntry:
    """number: its index in the file, from 1, over both tables. engine: None means any. place: one or several. expires:
    the last valid day. "*" in a pattern (cell, place, reason of an UNKNOWN) matches any text."""

    number: int
    kind: BaselineTable
    engine: str | None
    cell: str
    code: str | None = None
    place: str | tuple[str, ...] | None = None
    says: str | None = None
    owner: str
    reason: str
    expires: datetime.date

    @property
    def places(self) -> tuple[str, ...]:
        return (self.place,) if isinstance(self.place, str) else self.place or ()

    @property
    def what(self) -> str:
        engine = "" if self.engine is None else f"{self.engine} "
        about = (
            f"{self.code}, {' and '.join(self.places)}"
            if self.kind is BaselineTable.FINDING
            else f"UNKNOWN, {self.says}"
        )
        return f"{engine}{self.cell}: {about}"

    @property
    def key(self) -> tuple[object, ...]:
        return self.kind, self.engine, self.cell, self.code, self.place, self.says

    def has_engine(self, record: RunRecord) -> bool:
        return self.engine in (None, engine_name(record))

    def has_cell(self, name: str) -> bool:
        return _pattern(self.cell).fullmatch(name) is not None

    def covers(self, record: RunRecord, finding: Finding) -> bool:
        return (
            self.kind is BaselineTable.FINDING
            and self.code == finding.code
            and self.has_engine(record)
            and self.has_cell(finding.cell)
            and any(_pattern(place).fullmatch(place_of(finding)) for place in self.places)
        )

    def expects(self, record: RunRecord, row: ScenarioResult) -> bool:
        return (
            self.kind is BaselineTable.UNKNOWN
            and row.verdict is Verdict.UNKNOWN
            and self.has_engine(record)
            and self.has_cell(row.id)
            and _pattern(f"*{self.says}*").fullmatch(row.reason or "") is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedEntry:
    row: int
    kind: str
    status: str
    what: str
    owner: str
    reason: str
    expires: str
    matches: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineResult:
    """strict: rows that are gone fail as well."""

    file: str
    strict: bool
    rows: tuple[JudgedEntry, ...]

    @property
    def failing(self) -> tuple[JudgedEntry, ...]:
        bad = {EntryStatus.UNUSED.value, EntryStatus.EXPIRED.value, *([EntryStatus.GONE.value] if self.strict else [])}
        return tuple(row for row in self.rows if row.status in bad)

    def count(self, status: EntryStatus) -> int:
        return sum(row.status == status.value for row in self.rows)


@dataclass(frozen=True, slots=True)
class KnownPlaces:
    """Findings and UNKNOWNs covered by a baseline: indices of findings by run, cells by run."""

    findings: dict[str, frozenset[int]] = field(default_factory=dict)
    unknowns: dict[str, frozenset[str]] = field(default_factory=dict)

    def new(self, record: RunRecord) -> tuple[Finding, ...]:
        covered = self.findings.get(record.run_id, frozenset())
        return tuple(finding for at, finding in enumerate(record.findings) if at not in covered)

    def explains(self, record: RunRecord, row: ScenarioResult) -> bool:
        covered = self.findings.get(record.run_id, frozenset())
        own = [(at in covered, each) for at, each in enumerate(record.findings) if each.cell == row.id]
        return any(is_known for is_known, _ in own) and not any(
            each.condition is None and not is_known for is_known, each in own
        )

    def expects(self, record: RunRecord, row: ScenarioResult) -> bool:
        return row.id in self.unknowns.get(record.run_id, frozenset())

    def is_silent(self, record: RunRecord) -> bool:
        """Whether the run dropped findings, so that uncovered ones may be missing from its record."""
        return bool(self.findings.get(record.run_id)) and is_cut(record)


NOTHING = KnownPlaces()

IsEnough = Callable[[RunRecord, ScenarioResult], bool]


def engine_name(record: RunRecord) -> str:
    """Return the engine's name in a baseline: builtin, an installed engine, MODULE:NAME, or "vllm server"."""
    if (server := server_of(record)) is not None:
        return f"{engine_and_version(server)[0]} server"
    return engine_of(record) or own_target_of(record) or BUILTIN


def is_cut(record: RunRecord) -> bool:
    return any(LEFT_OUT in text for text in record.warnings)


def roots(findings: Sequence[Finding]) -> list[tuple[int, Finding]]:
    """Return index and cause of each finding. A symptom of a cause that was not kept is its own cause."""
    by_id = {finding.id: finding for finding in findings if finding.id}
    return [(at, by_id.get(finding.cause or "", finding)) for at, finding in enumerate(findings)]


def known_by(entries: Sequence[BaselineEntry], records: Sequence[RunRecord], today: datetime.date) -> KnownPlaces:
    valid = [entry for entry in entries if entry.expires >= today]
    return KnownPlaces(
        findings={
            record.run_id: frozenset(
                at for at, root in roots(record.findings) if any(entry.covers(record, root) for entry in valid)
            )
            for record in records
        },
        unknowns={
            record.run_id: frozenset(
                row.id for row in record.scenarios if any(entry.expects(record, row) for entry in valid)
            )
            for record in records
        },
    )


def judge_rows(
    entries: Sequence[BaselineEntry], records: Sequence[RunRecord], today: datetime.date, is_enough: IsEnough
) -> tuple[JudgedEntry, ...]:
    return tuple(
        JudgedEntry(
            row=entry.number,
            kind=entry.kind.value,
            status=status.value,
            what=entry.what,
            owner=entry.owner,
            reason=entry.reason,
            expires=entry.expires.isoformat(),
            matches=matches,
            text=text,
        )
        for entry in entries
        for status, matches, text in [_status(entry, records, today, is_enough)]
    )


def _status(
    entry: BaselineEntry, records: Sequence[RunRecord], today: datetime.date, is_enough: IsEnough
) -> tuple[EntryStatus, int, str]:
    mine = [record for record in records if entry.has_engine(record)]
    if not mine:
        return EntryStatus.ELSEWHERE, 0, f"none of these runs judged {entry.engine}"
    # Before any match: an expired row covers nothing.
    if entry.expires < today:
        text = f"expired on {entry.expires.isoformat()}; {entry.owner} has to renew it or remove it"
        return EntryStatus.EXPIRED, 0, text
    cells = [(record, row) for record in mine for row in record.scenarios if entry.has_cell(row.id)]
    if not cells and any(entry.has_cell(name) for record in mine for name in absent_of(record)):
        return EntryStatus.GONE, 0, "not in this release any more: remove this row"
    if not cells and all(any(word.partition("=")[0] == "--changed" for word in record.argv) for record in mine):
        return EntryStatus.ELSEWHERE, 0, "--changed did not pick such a cell"
    if not cells:
        return EntryStatus.UNUSED, 0, "no run has judged such a cell; correct this row or remove it"
    if entry.kind is BaselineTable.FINDING:
        found = [(record, each) for record in mine for each in record.findings if entry.covers(record, each)]
        if found:
            seen = [place_of(each) for _, each in found]
            gone = [place for place in entry.places if not any(map(_pattern(place).fullmatch, seen))]
            texts = (f"not seen: {', '.join(gone)}" if gone else "", _thin(entry, cells))
            return EntryStatus.KNOWN, len(found), "; ".join(filter(None, texts))
        if all(row.verdict is Verdict.PASS and is_enough(record, row) for record, row in cells):
            return EntryStatus.GONE, 0, "no such finding any more: remove this row"
        return EntryStatus.UNDECIDED, 0, f"no such finding, but {_why_undecided(cells)}"
    expected = sum(entry.expects(record, row) for record, row in cells)
    if expected:
        return EntryStatus.KNOWN, expected, ""
    if any(row.verdict is Verdict.UNKNOWN for _, row in cells):
        return EntryStatus.UNDECIDED, 0, "the cell is UNKNOWN for another reason"
    return EntryStatus.GONE, 0, "judged now: remove this row"


def _thin(entry: BaselineEntry, cells: Sequence[tuple[RunRecord, ScenarioResult]]) -> str:
    """A note if a cell ended at the known finding, since it may hide others."""
    cut = [
        f"{row.id} ended after {row.schedules} of {counted(row.coverage.wanted, 'schedule')}"
        for _, row in cells
        if row.verdict is Verdict.FAIL and row.coverage is not None and row.schedules < row.coverage.wanted
    ]
    return f"{some_of(cut, 2)}: later schedules were not judged" if cut else ""


def _why_undecided(cells: Sequence[tuple[RunRecord, ScenarioResult]]) -> str:
    for _, row in cells:
        if row.verdict is not Verdict.PASS:
            return f"{row.id} is {row.verdict.value.upper()}"
    return f"{cells[0][1].id} ran too few schedules to show that it is gone"


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in text.split("*")), re.DOTALL)
