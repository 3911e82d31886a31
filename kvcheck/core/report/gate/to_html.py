"""The gate's result as one HTML page that needs no network, no script and no other file.

Invariants:
- Text of a record reaches the page only through autoescape. The page's own policy forbids loading and scripts.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from kvcheck.core.report.gate.result import GateResult
from kvcheck.core.report.gate.text import HEADINGS, cells, sections, summary_text
from kvcheck.core.report.templates import filled
from kvcheck.core.run.store import write_text

COLOURS = {"PASS": "pass", "UNKNOWN": "unknown", "OK": "pass", "INCONCLUSIVE": "unknown"}
"""Colour of a verdict of the gate or of a gated row; all others fail."""


def write(result: GateResult, path: Path) -> None:
    write_text(path, render(result))


def render(result: GateResult) -> str:
    return filled(
        "gate.html.j2",
        result=result,
        colours=COLOURS,
        summary=summary_text(result),
        command=shlex.join(["kvcheck", *result.argv]),
        sections=sections(result),
        headings=HEADINGS,
        rows=[cells(row) for row in result.rows],
    )
