"""The gate's result as one HTML page that needs no network, no script and no other file.

Invariants:
- Text of a record reaches the page only through autoescape. The page's own policy forbids loading and scripts.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from markupsafe import Markup

from kvcheck.core.report.gate.result import GateResult
from kvcheck.core.report.gate.text import HEADINGS, cells, sections, summary_text
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.templates import template
from kvcheck.core.report.wording import asset
from kvcheck.core.run.store import write_text

COLOURS = {"PASS": ("pass", "✔"), "UNKNOWN": ("unknown", "?")}
BADGES = {"OK": "pass", "INCONCLUSIVE": "unknown", "SLOWER": "fail"}


def write(result: GateResult, path: Path) -> None:
    write_text(path, render(result))


def render(result: GateResult) -> str:
    style = asset("page.css")
    colour, mark = COLOURS.get(result.verdict, ("fail", "✘"))
    return template("gate.html.j2", _visible).render(
        result=result,
        colour=colour,
        mark=mark,
        style=Markup(style),
        summary=summary_text(result),
        command=shlex.join(["kvcheck", *result.argv]),
        sections=[{"name": name, "text": text, "details": details} for name, text, details in sections(result)],
        headings=HEADINGS,
        badges=BADGES,
        rows=[cells(row) for row in result.rows],
    )


def _visible(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
