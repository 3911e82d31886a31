"""docs/releases.md: the releases that fail, by cell, are those of the published table."""

from __future__ import annotations

import re
from pathlib import Path

from commands.test_readme import published, tables

PAGE = Path(__file__).parents[2] / "docs" / "releases.md"
CELLS = published("SGLang")
RELEASES = list(next(iter(CELLS.values())))


def releases_of(text: str) -> list[str]:
    """The judged releases of a table cell: "0.5.9 to 0.5.11" and "0.5.9, 0.5.12" list them."""
    first, *last = text.split(" to ")
    if last:
        return RELEASES[RELEASES.index(first) : RELEASES.index(last[0]) + 1]
    return [each.strip() for each in text.split(",") if each.strip()]


def test_the_releases_that_fail_are_those_of_the_published_table() -> None:
    _, *rows = tables(PAGE.read_text(encoding="utf-8"))["cell"]
    named = {
        (release, subject, verdict)
        for cell, fails, conditional, *_ in rows
        for name in re.findall(r"`([\w.-]+)`", cell)
        for subject in CELLS
        if subject == name or subject.startswith(f"{name}.")
        for verdict, text in (("FAIL", fails), ("latent", conditional))
        for release in releases_of(text)
    }
    found = {
        (release, subject, kind)
        for subject, words in CELLS.items()
        for release, word in words.items()
        if (kind := word.partition(" ")[0]) in ("FAIL", "latent")
    }
    assert named == found
