"""GitLab code quality: a JSON list with an entry for each cause in each cell that shows it.

Invariants:
- Fingerprints are unique and depend only on cell, code and place, so that a merge request shows new and fixed entries.
- A finding has no file: the path is the cell.
"""

from __future__ import annotations

import json
import re

from kvcheck.core.report.ci.outcome import RUN, CiOutcome, writer
from kvcheck.core.report.ci.trouble import TroubleKind
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.wording import clip

SEVERITY = {
    TroubleKind.FINDING: "critical",
    TroubleKind.SLOWER: "major",
    TroubleKind.GAP: "major",
    TroubleKind.CONDITIONAL: "minor",
}
DESCRIPTION_CHARS = 2000


def render(outcome: CiOutcome) -> str:
    entries: dict[str, dict[str, object]] = {}
    for trouble in outcome.troubles:
        told = " | ".join((f"{trouble.head}: {trouble.lines[0]}", *trouble.lines[1:]))
        for cell in trouble.cells or (RUN,):
            fingerprint = trouble.fingerprint(cell)
            entry: dict[str, object] = {
                "description": printable(clip(told, DESCRIPTION_CHARS)),
                "check_name": printable(trouble.code or trouble.title),
                "fingerprint": fingerprint,
                "severity": SEVERITY[trouble.kind],
                "location": {"path": path_of(cell), "lines": {"begin": 1}},
            }
            entries.setdefault(fingerprint, entry)
    return json.dumps([*entries.values()], indent=1, ensure_ascii=True) + "\n"


def path_of(cell: str) -> str:
    """Turn a cell into a relative path of plain characters, without ".." parts."""
    parts = [re.sub(r"[^A-Za-z0-9._-]", "_", part) for part in cell.split("/")]
    return "/".join(part for part in parts if part.strip(".")) or RUN


write = writer("gitlab", render)
