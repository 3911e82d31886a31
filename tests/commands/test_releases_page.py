"""docs/releases.md: the releases that fail, by cell, are those of the published records.

Invariants:
- Every FAIL and every conditional finding of SGLang's records is in the table, and nothing else is.
"""

from __future__ import annotations

import re
from pathlib import Path

from commands.test_readme import cells_of, tables, worst

PAGE = Path(__file__).parents[2] / "docs" / "releases.md"
CELLS = cells_of("sglang")
RELEASES = list(dict.fromkeys(row["version"] for row in CELLS))


def releases_of(text: str) -> list[str]:
    """The judged releases of a table cell: "0.5.9 to 0.5.11" and "0.5.9, 0.5.12" list them."""
    first, *last = text.split(" to ")
    if last:
        return RELEASES[RELEASES.index(first) : RELEASES.index(last[0]) + 1]
    return [each.strip() for each in text.split(",") if each.strip()]


def test_the_releases_that_fail_are_those_of_the_records() -> None:
    _, *rows = tables(PAGE.read_text(encoding="utf-8"))["cell"]
    named = {
        (release, subject, verdict)
        for cell, fails, conditional, *_ in rows
        for name in re.findall(r"`([\w.-]+)`", cell)
        for subject in {row["cell"].split("/")[1] for row in CELLS}
        if subject == name or subject.startswith(f"{name}.")
        for verdict, text in (("FAIL", fails), ("latent", conditional))
        for release in releases_of(text)
    }
    found = {
        (row["version"], row["cell"].split("/")[1], verdict)
        for row in CELLS
        if (verdict := worst([(row["verdict"], row["codes"])])) in ("FAIL", "latent")
    }
    assert named == found
