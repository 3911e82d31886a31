"""Tables of a campaign: shares, counts, and text from source that stays text."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tools.mutation.results import Campaign, Result
from tools.mutation.table import CSV_FILE, PAGE_FILE, page, share_of, write_tables

CAMPAIGN = Campaign(code="0123abcd", seed=1, schedules=24, cpu_s=10.0)


def result(name: str, outcome: str, **values: object) -> Result:
    place = {"file": "core/cache/offload.py", "line_number": 3, "function": "Offload.save", "operator": "drop-not"}
    return Result(**{"id": name, "outcome": outcome, "diff": "-    a\n+    b", **place, **values})  # type: ignore[arg-type]


ROWS = [
    *(result(name, "killed", oracle="content", code="KV102", schedules=2, cpu_s=0.5) for name in ("k1", "k2")),
    *(result(name, "survived", schedules=24) for name in ("s1", "s2")),
    result("n1", "unknown", schedules=6),
    *(result(name, name) for name in ("unreached", "equivalent", "legal", "invalid")),
    result("h1", "hang", file="core/cache/backend/eager.py"),
]


def test_the_share_is_of_what_ran() -> None:
    assert share_of(ROWS, ["killed"]) == 2 / 6
    assert share_of([row for row in ROWS if row.outcome in ("unreached", "equivalent", "invalid")], ["killed"]) is None


@pytest.mark.parametrize(
    "wanted",
    [
        "| all | 10 | 2 | 1 | 2 | 1 | 0 | 1 | 1 | 1 | 1 | 0 | 33.3 % | 66.7 % |",
        "| core/cache/offload.py | 9 | 2 | 1 | 2 | 0 | 0 | 1 | 1 | 1 | 1 | 0 | 40.0 % | 60.0 % |",
        "| content | KV102 | 2 |",
        "28.6 %.",
    ],
)
def test_the_page_counts_and_tells(wanted: str) -> None:
    assert wanted in page(CAMPAIGN, ROWS)


def test_text_of_source_stays_text(tmp_path: Path) -> None:
    hostile = "=cmd()|[x](http://x)<b>\x1b[2J"
    write_tables(tmp_path, CAMPAIGN, [result("s1", "survived", function=hostile, message=hostile, diff=f"-{hostile}")])
    text = (tmp_path / PAGE_FILE).read_text()
    assert "<b>" not in text.replace("      -=cmd()|[x](http://x)<b>", "") and "\x1b" not in text
    assert "[x](" not in text.replace("      -=cmd()|[x](http://x)<b>", "")
    (row,) = csv.DictReader(io.StringIO((tmp_path / CSV_FILE).read_text()))
    assert row["message"].startswith("'=cmd()") and row["outcome"] == "survived"
