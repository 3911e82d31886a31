"""The record as CSV tables: findings, scenarios, words per buffer, observed counts, situations, mutants, prices.

A path that ends in .csv gets one table with a `kind` column; any other path is a folder of tables.

Invariants:
- A text that a spreadsheet would run as a formula gets a leading apostrophe, also behind invisible characters and in
  wide forms. Numbers stay numbers.
- Control characters except tabs and line breaks are escaped, so that a printed table cannot control a terminal.
- A value that does not apply is an empty cell, never 0. A column exists even if no row fills it.
"""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from kvcheck.core.base.identity import short
from kvcheck.core.base.record import (
    BenchRow,
    Coverage,
    Evidence,
    Finding,
    Identity,
    MutantResult,
    RunRecord,
    ScenarioResult,
    to_plain,
)
from kvcheck.core.base.server_facts import OBSERVED
from kvcheck.core.base.situations import SITUATIONS, situations_of
from kvcheck.core.run.store import make_folder, write_text

Row = Mapping[str, object]

FORMULA_STARTS = frozenset("=+-@")
BREAKS = ("\t", "\r", "\n")
ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in BREAKS}
UNSEEN = frozenset({"Cc", "Cf", "Mn", "Zs", "Zl", "Zp"})
"""Categories of characters that readers drop or do not show: spaces, byte order marks, zero-width marks."""


def _fields(kind: type, *but: str, start: str = "") -> tuple[str, ...]:
    return tuple(start + row.name for row in dataclasses.fields(kind) if row.name not in but)


INTERVALS = ("us", "baseline_us", "ratio", "limit_ratio")
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "findings": _fields(Finding, "story"),
    "scenarios": (
        *_fields(ScenarioResult, "evidence", "coverage"),
        "conditional_findings",
        *_fields(Coverage),
        *_fields(Evidence, "words_verified", "observed", "situations", start="evidence_"),
        *_fields(Identity, start="identity_"),
    ),
    "words": ("scenario", "shape", "buffer", "words_verified"),
    "observed": ("scenario", "shape", "kind", "count", "unit"),
    "situations": ("scenario", "shape", "subject", "state", "happening", "count"),
    "mutants": _fields(MutantResult),
    "bench": (
        *("case", "arm", "baseline", "size", "shape", "device", "bytes"),
        *(f"{name}{end}" for name in INTERVALS for end in ("", "_lo", "_hi")),
        *("floor", "limit", "rounds", "status", "note"),
    ),
}
"""Columns of each table; the names of the files are those of the tables."""
COMBINED_OBSERVED = ("observed_kind", "count", "unit")
"""Columns of observed counts in the combined table, whose `kind` column is the type of a row."""


def write(record: RunRecord, path: Path) -> None:
    if path.suffix.lower() == ".csv" and not path.is_dir():
        write_text(path, combined(record))
        return
    make_folder(path)
    for name, text in tables(record).items():
        write_text(path / name, text)


def tables(record: RunRecord) -> dict[str, str]:
    return {f"{name}.csv": _csv(record, COLUMNS[name], rows) for name, rows in _rows(record).items()}


def combined(record: RunRecord) -> str:
    rows = _rows(record)
    observed: list[Row] = [{**row, "observed_kind": row["kind"]} for row in rows["observed"]]
    named: dict[str, list[Row]] = {
        "scenario": rows["scenarios"],
        "observed": observed,
        "finding": rows["findings"],
        "price": rows["bench"],
    }
    columns = ("kind", *COLUMNS["scenarios"], *COLUMNS["findings"], *COLUMNS["bench"], *COMBINED_OBSERVED)
    told = [{**row, "kind": kind} for kind, each in named.items() for row in each]
    return _csv(record, [*dict.fromkeys(columns)], told)


def _rows(record: RunRecord) -> dict[str, list[Row]]:
    """Rows by table. A key that is no column of its table is not written."""
    # Evidence by scenario, so that sums count nothing twice.
    places: list[tuple[Row, Evidence]] = [
        ({"scenario": row.id, "shape": row.shape}, row.evidence) for row in record.scenarios
    ] or [({"scenario": None, "shape": None}, record.evidence)]
    return {
        "findings": [_finding_row(finding) for finding in record.findings],
        "scenarios": _scenario_rows(record),
        "words": [
            {**place, "buffer": buffer, "words_verified": words}
            for place, evidence in places
            for buffer, words in evidence.words_verified.items()
        ],
        "observed": [
            {**place, "kind": kind, "count": count, "unit": OBSERVED[kind].unit if kind in OBSERVED else None}
            for place, evidence in places
            for kind, count in evidence.observed.items()
        ],
        "situations": [row for place, evidence in places for row in _situation_rows(place, evidence)],
        "mutants": [_plain_row(result) for result in record.mutants],
        "bench": [_bench_row(row) for row in record.bench],
    }


def _csv(record: RunRecord, columns: Sequence[str], rows: Sequence[Row]) -> str:
    return csv_text(("run_id", *columns), [[record.run_id, *(row.get(name) for name in columns)] for row in rows])


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    # dtype object keeps 3 from becoming 3.0 in a column that also holds None.
    cells = [[_safe(cell) for cell in row] for row in rows]
    frame = pandas.DataFrame(cells, columns=[*columns], dtype=object)
    return str(frame.to_csv(index=False, lineterminator="\n"))


def _safe(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    # A lone carriage return is a line break to some readers, and is written unquoted: it would split the row.
    lines = cell.replace("\r\n", "\n").replace("\r", "\n").translate(ESCAPED)
    return "'" + lines if cell.startswith(BREAKS) or _starts_formula(cell) else lines


def _starts_formula(text: str) -> bool:
    seen = next((char for char in text if unicodedata.category(char) not in UNSEEN), "")
    return unicodedata.normalize("NFKC", seen)[:1] in FORMULA_STARTS


def _plain_row(value: Finding | ScenarioResult | MutantResult | BenchRow | Identity) -> dict[str, Any]:
    plain = to_plain(value)
    assert isinstance(plain, dict), "a dataclass becomes a dict"
    return plain


def _finding_row(finding: Finding) -> Row:
    minimal = None if finding.minimal is None else json.dumps(to_plain(finding.minimal), ensure_ascii=False)
    return {**_plain_row(finding), "minimal": minimal}


def _scenario_rows(record: RunRecord) -> list[Row]:
    identity = _plain_row(record.identity or Identity())
    identity = {f"identity_{name}": value and short(value) for name, value in identity.items()}
    conditional = Counter(finding.cell for finding in record.findings if finding.condition is not None)
    rows: list[Row] = []
    for result in record.scenarios:
        plain = _plain_row(result)
        coverage = {
            name: "; ".join(value) if isinstance(value, list) else value
            for name, value in (plain["coverage"] or {}).items()
        }
        evidence = {f"evidence_{name}": value for name, value in plain["evidence"].items()}
        rows.append({**plain, **coverage, **evidence, **identity, "conditional_findings": conditional[result.id]})
    return rows


def _bench_row(row: BenchRow) -> Row:
    plain = _plain_row(row)
    for name in INTERVALS:
        for end, key in (("_lo", "lo"), ("_hi", "hi"), ("", "est")):
            plain[name + end] = None if getattr(row, name) is None else getattr(getattr(row, name), key)
    return {**plain, "rounds": len(row.ratios)}


def _situation_rows(place: Row, evidence: Evidence) -> list[Row]:
    counts = {each.key: 0 for each in situations_of(str(place["scenario"] or "").partition("/")[0])}
    rows: list[Row] = []
    for key, count in {**counts, **evidence.situations}.items():
        known = SITUATIONS.get(key)
        names = (known.subject, known.state, known.happening) if known else (key, None, None)
        rows.append({**place, **dict(zip(("subject", "state", "happening"), names, strict=True)), "count": count})
    return rows
