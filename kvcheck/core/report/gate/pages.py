"""The gate's result as one HTML page that needs no network, no script and no other file, and as Markdown.

Invariants:
- Text of a record reaches both only through their escapes. The page's own policy forbids loading and scripts.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from kvcheck.core.report.ci.trouble import TroubleKind
from kvcheck.core.report.gate.result import GateResult
from kvcheck.core.report.gate.text import HEADINGS, MOST_LINES, cells, listed, problem_text, sections, summary_text
from kvcheck.core.report.templates import filled
from kvcheck.core.run.store import writer_of

COLOURS = {"PASS": "pass", "UNKNOWN": "unknown", "OK": "pass", "INCONCLUSIVE": "unknown"}


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


def markdown(result: GateResult) -> str:
    conditional = () if result.fail_on_conditional else result.conditional
    kinds = ((TroubleKind.FINDING, result.integrity), (TroubleKind.CONDITIONAL, conditional))
    told = [
        (kind, each.run_id, each.trouble) for kind, part in kinds for each in listed(part) if each.trouble is not None
    ]
    # Problems with a cause are written out below the sections.
    bare = {
        name: tuple(problem_text(each) for each in part if each.trouble is None)
        for name, part in (("integrity", result.integrity), ("conditional", result.conditional))
    }
    return filled(
        "gate.md.j2",
        result=result,
        summary=summary_text(result),
        sections=[(name, text, bare.get(name, details)) for name, text, details in sections(result)],
        troubles=[replace(trouble, kind=kind) for kind, _, trouble in told],
        runs=[run_id for _, run_id, _ in told],
        most=MOST_LINES,
        headings=HEADINGS,
        rows=[cells(row) for row in result.rows],
    )


write = writer_of(render)
write_markdown = writer_of(markdown)
