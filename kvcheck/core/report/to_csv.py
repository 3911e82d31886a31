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
TABLES_OF_THEIR_OWN = ("words_verified", "observed", "situations")
EVIDENCE_COUNTS = tuple(row.name for row in dataclasses.fields(Evidence) if row.name not in TABLES_OF_THEIR_OWN)
FINDING_COLUMNS = tuple(row.name for row in dataclasses.fields(Finding) if row.name != "story")
COVERAGE_COLUMNS = tuple(row.name for row in dataclasses.fields(Coverage))
IDENTITY_COLUMNS = tuple(f"identity_{row.name}" for row in dataclasses.fields(Identity))
SCENARIO_COLUMNS = (
    *(row.name for row in dataclasses.fields(ScenarioResult) if row.name not in ("evidence", "coverage")),
    "conditional_findings",
    *COVERAGE_COLUMNS,
    *(f"evidence_{name}" for name in EVIDENCE_COUNTS),
    *IDENTITY_COLUMNS,
)
WORD_COLUMNS = ("scenario", "shape", "buffer", "words_verified")
SITUATION_COLUMNS = ("scenario", "shape", "subject", "state", "happening", "count")
OBSERVED_COLUMNS = ("scenario", "shape", "kind", "count", "unit")
COMBINED_OBSERVED = ("observed_kind", "count", "unit")
"""Columns of observed counts in the combined table, whose `kind` column is the type of a row."""

MUTANT_COLUMNS = tuple(row.name for row in dataclasses.fields(MutantResult))
INTERVALS = ("us", "baseline_us", "ratio", "limit_ratio")
BENCH_COLUMNS = (
    *("case", "arm", "baseline", "size", "shape", "device", "bytes"),
    *(f"{name}{end}" for name in INTERVALS for end in ("", "_lo", "_hi")),
    *("floor", "limit", "rounds", "status", "note"),
)


def write(record: RunRecord, path: Path) -> None:
    if path.suffix.lower() == ".csv" and not path.is_dir():
        write_text(path, combined(record))
        return
    make_folder(path)
    for name, text in tables(record).items():
        write_text(path / name, text)


def tables(record: RunRecord) -> dict[str, str]:
    return {
        "findings.csv": _csv(record, FINDING_COLUMNS, [_finding_row(finding) for finding in record.findings]),
        "scenarios.csv": _csv(record, SCENARIO_COLUMNS, _scenario_rows(record)),
        "words.csv": _csv(record, WORD_COLUMNS, _word_rows(record)),
        "observed.csv": _csv(record, OBSERVED_COLUMNS, _observed_rows(record)),
        "situations.csv": _csv(record, SITUATION_COLUMNS, _situation_rows(record)),
        "mutants.csv": _csv(record, MUTANT_COLUMNS, [_plain_row(result) for result in record.mutants]),
        "bench.csv": _csv(record, BENCH_COLUMNS, [_bench_row(row) for row in record.bench]),
    }


def combined(record: RunRecord) -> str:
    columns = dict.fromkeys(("kind", *SCENARIO_COLUMNS, *FINDING_COLUMNS, *BENCH_COLUMNS, *COMBINED_OBSERVED))
    scenarios = [{"kind": "scenario", **row} for row in _scenario_rows(record)]
    observed = [{**row, "kind": "observed", "observed_kind": row["kind"]} for row in _observed_rows(record)]
    findings = [{"kind": "finding", **_finding_row(finding)} for finding in record.findings]
    prices = [{"kind": "price", **_bench_row(row)} for row in record.bench]
    return _csv(record, tuple(columns), [*scenarios, *observed, *findings, *prices])


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


def _plain_row(value: Finding | ScenarioResult | MutantResult) -> dict[str, object]:
    plain = to_plain(value)
    assert isinstance(plain, dict), "a dataclass becomes a dict"
    return plain


def _finding_row(finding: Finding) -> dict[str, object]:
    row = _plain_row(finding)
    if finding.minimal is not None:
        row["minimal"] = json.dumps(row["minimal"], ensure_ascii=False)
    return row


def _scenario_rows(record: RunRecord) -> list[Row]:
    identity: dict[str, object] = {}
    for row in dataclasses.fields(Identity):
        value = getattr(record.identity, row.name, None)
        identity[f"identity_{row.name}"] = None if value is None else short(value)
    conditional = Counter(finding.cell for finding in record.findings if finding.condition is not None)
    return [
        {**_scenario_row(result), "conditional_findings": conditional[result.id], **identity}
        for result in record.scenarios
    ]


def _scenario_row(result: ScenarioResult) -> dict[str, object]:
    row = _plain_row(result)
    del row["evidence"], row["coverage"]
    for name in COVERAGE_COLUMNS:
        value = getattr(result.coverage, name, None)
        row[name] = "; ".join(value) if isinstance(value, tuple) else value
    for name in EVIDENCE_COUNTS:
        row[f"evidence_{name}"] = getattr(result.evidence, name)
    return row


def _bench_row(row: BenchRow) -> dict[str, object]:
    plain: dict[str, object] = {name: getattr(row, name, None) for name in BENCH_COLUMNS}
    for name in INTERVALS:
        found = getattr(row, name)
        for end, value in (("", "est"), ("_lo", "lo"), ("_hi", "hi")):
            plain[name + end] = None if found is None else getattr(found, value)
    return {**plain, "rounds": len(row.ratios)}


def _word_rows(record: RunRecord) -> list[Row]:
    return [
        {"scenario": scenario, "shape": shape, "buffer": buffer, "words_verified": words}
        for scenario, shape, evidence in _judged(record)
        for buffer, words in evidence.words_verified.items()
    ]


def _observed_rows(record: RunRecord) -> list[Row]:
    return [
        {
            "scenario": scenario,
            "shape": shape,
            "kind": kind,
            "count": count,
            "unit": OBSERVED[kind].unit if kind in OBSERVED else None,
        }
        for scenario, shape, evidence in _judged(record)
        for kind, count in evidence.observed.items()
    ]


def _situation_rows(record: RunRecord) -> list[Row]:
    """Counts of situations; 0 for reachable ones that were not reached."""
    rows: list[Row] = []
    for scenario, shape, evidence in _judged(record):
        counts = {each.key: 0 for each in situations_of((scenario or "").partition("/")[0])} | evidence.situations
        for key, count in counts.items():
            known = SITUATIONS.get(key)
            subject, state, happening = (known.subject, known.state, known.happening) if known else (key, None, None)
            rows.append(
                {
                    "scenario": scenario,
                    "shape": shape,
                    "subject": subject,
                    "state": state,
                    "happening": happening,
                    "count": count,
                }
            )
    return rows


def _judged(record: RunRecord) -> list[tuple[str | None, str | None, Evidence]]:
    """Evidence per scenario, so that sums count nothing twice."""
    return [(row.id, row.shape, row.evidence) for row in record.scenarios] or [(None, None, record.evidence)]
