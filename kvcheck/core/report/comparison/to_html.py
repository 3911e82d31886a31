"""The comparison as one HTML page that needs no network, no script and no other file.

Invariants:
- Text of a record reaches the page only through autoescape. The page's own policy forbids loading and scripts.
"""

from __future__ import annotations

from pathlib import Path

from kvcheck.core.base.record import RunRecord
from kvcheck.core.base.server_facts import server_of
from kvcheck.core.report.comparison.changes import change_lines
from kvcheck.core.report.comparison.compare import SERVERS, Comparison, Table, counts, summary
from kvcheck.core.report.prices import Axis, ratio_axis, ratio_text
from kvcheck.core.report.templates import filled
from kvcheck.core.run.store import write_text

UNTRIED = ("not exercised", "not tried")
"""Prefixes of warnings about parts that a run did not try."""


def write(comparison: Comparison, path: Path) -> None:
    write_text(path, render(comparison))


def render(comparison: Comparison) -> str:
    return filled(
        "comparison.html.j2",
        comparison=comparison,
        verdict=comparison.verdict.value,
        summary=summary(comparison),
        changes=comparison.changes,
        change_lines=[] if comparison.changes is None else change_lines(comparison.changes),
        servers=SERVERS,
        counts=counts,
        axis_of=_axis,
        ratio_text=ratio_text,
        place_of=_place,
        notes_of=lambda record: [line for line in record.warnings if line.startswith(UNTRIED)],
    )


def _axis(table: Table) -> Axis:
    return ratio_axis(row.ratio for rows in table.prices.values() for row in rows if row is not None)


def _place(record: RunRecord) -> str:
    """A server's address, or the versions of python and torch."""
    engine = record.environment.get("engine")
    facts = engine if isinstance(engine, dict) else server_of(record) or record.environment
    if "address" in facts:
        return str(facts["address"])
    return ", ".join(f"{name} {facts[name]}" for name in ("python", "torch") if name in facts)
