"""The tables of how soon a default run finds mutants: the published ones, and one mutant by the order of this tree."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from mutants.kill_arm import CAP_CPU_S, Arm
from mutants.kill_table import COLUMNS, kept_rows, summary
from mutants.trace_table import COLUMNS as TRACE_COLUMNS
from mutants.trace_table import summary as trace_summary

PUBLISHED = Path(__file__).parents[2] / "reports/published/cpu/search"


def test_the_page_has_the_summary_of_its_table() -> None:
    with (PUBLISHED / "kills.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == COLUMNS
    page = (PUBLISHED / "kills.md").read_text(encoding="utf-8")
    assert all(line in page for line in summary(rows))


def test_a_mutant_that_is_not_found_counts_as_the_cap() -> None:
    row = dict.fromkeys(COLUMNS, "") | {"before": "its own tree", "after_s": "11"}
    assert summary([row])[-1] == f"| all | 1 | 0 / 1 | {CAP_CPU_S:.1f} to 11.0 | {CAP_CPU_S:.1f} to 11.0 | 0.44 |"


def test_a_table_that_was_cut_short_keeps_its_rows_and_another_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kills.csv"
    assert kept_rows(file, COLUMNS) == []
    file.write_text(f"{','.join(COLUMNS)}\n{',' * (len(COLUMNS) - 1)}\n", encoding="utf-8")
    assert kept_rows(file, COLUMNS) == [dict.fromkeys(COLUMNS, "")]
    with pytest.raises(SystemExit, match="expected the columns cell, arm"):
        kept_rows(file, TRACE_COLUMNS)


def test_the_page_has_the_medians_of_the_traces() -> None:
    rows = kept_rows(PUBLISHED / "traces.csv", TRACE_COLUMNS)
    page = (PUBLISHED / "kills.md").read_text(encoding="utf-8")
    assert all(line in page for line in trace_summary(rows))
    rates = (("before", 2), ("before", 4), ("before", 3), ("answers", 6), ("within", 1.5))
    literal = [{"cell": "c", "arm": arm, "traces_per_s": rate} for arm, rate in rates]
    assert trace_summary(literal)[-1] == "| c | 3.00 | 6.00, x2.0 | 1.50, x0.5 |"


@pytest.mark.schedules
def test_the_order_of_this_tree_finds_a_mutant_in_its_first_schedules() -> None:
    found = Arm("after", 1).row("offload-skips-index-buffer")
    # Each of the two processes has a cell that finds it first; which of them took less varies.
    cells = {f"retract-resume:shape={model}-micro,seed=1,schedule=0" for model in ("glm-5.1", "deepseek-v3.2")}
    assert found["line"] in cells
    assert found["schedules"] == 1
