"""Tables of a campaign: shares, the order of what is told, and text from source that stays text."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tools.mutation.results import Campaign, Result
from tools.mutation.table import CSV_FILE, PAGE_FILE, page, share_of, summary_lines, write_tables

CAMPAIGN = Campaign(code="0123abcd", seed=1, schedules=24, cpu_s=10.0)


def result(name: str, outcome: str, **values: object) -> Result:
    place = {"file": "core/cache/offload.py", "line_number": 3, "function": "Offload.save", "operator": "drop-not"}
    return Result(**{"id": name, "outcome": outcome, "diff": "-    a\n+    b", **place, **values})  # type: ignore[arg-type]


ROWS = [
    result("k1", "killed", oracle="content", code="KV102", schedules=2, cpu_s=0.5, total_cpu_s=0.9),
    result(
        "k2", "killed", oracle="content", code="KV102", schedules=1, cpu_s=0.1, total_cpu_s=0.5, operator="turn-loop"
    ),
    result("s2", "survived", schedules=24, reason="it only costs time"),
    result("s1", "survived", schedules=24, cpu_s=4.0, total_cpu_s=4.4, cells={"hicache/llama-3-tiny": 24}),
    result("n1", "unknown", schedules=6, total_cpu_s=0.9, message="nothing was loaded"),
    result("u1", "unreached", line_number=9, function="Offload.drop"),
    result("e1", "equivalent", reason="the list is sorted already"),
    result("l1", "legal", reason="a legal choice: either order will do"),
    result("i1", "invalid"),
    result("h1", "hang", file="core/cache/backend/eager.py", message="took more than 20 CPU seconds"),
]


def test_the_share_is_of_what_ran() -> None:
    assert share_of(ROWS, ["killed"]) == 2 / 6
    assert share_of([row for row in ROWS if row.outcome in ("unreached", "equivalent", "invalid")], ["killed"]) is None
    head, counts = summary_lines(ROWS)
    assert head.split()[:2] == ["edits", "killed"] and len(head) == len(counts)
    assert counts.split()[:2] == ["10", "2"] and counts.endswith("33.3 %      66.7 %")


@pytest.mark.parametrize(
    "wanted",
    [
        "| all | 10 | 2 | 1 | 2 | 1 | 0 | 1 | 1 | 1 | 1 | 0 | 33.3 % | 66.7 % |",
        "| core/cache/offload.py | 9 | 2 | 1 | 2 | 0 | 0 | 1 | 1 | 1 | 1 | 0 | 40.0 % | 60.0 % |",
        "| content | KV102 | 2 |",
        "      -    a\n      +    b\n",
        "median 0.9, in total 7",
        "28.6 %.",
        "(drop-not): a legal choice: either order will do",
        "  Left: it only costs time\n",
        "offload.py&#58;9  Offload.drop  (drop-not)",
        "the list is sorted already",
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


def test_the_same_results_make_the_same_files(tmp_path: Path) -> None:
    write_tables(tmp_path / "one", CAMPAIGN, ROWS)
    write_tables(tmp_path / "two", CAMPAIGN, ROWS[::-1])
    for name in (CSV_FILE, PAGE_FILE):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
