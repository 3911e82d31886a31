"""The table of how soon a default run finds generated edits: the published one, and how its arms run and count."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from mutants.generated_kills import ARMS, CAP_CPU_S, COLUMNS, FAULTS, ArmJudge, drawn, steps_of, summary

from kvcheck.core.stress.mutation.campaign import subject_of
from kvcheck.core.stress.mutation.edits import CACHE, edits_of, package_folder
from kvcheck.core.stress.mutation.equivalent import read_equivalent
from kvcheck.core.stress.mutation.pool import ServerPool
from kvcheck.core.stress.mutation.pristine import Pristine, cells_of, code_of
from kvcheck.core.stress.mutation.reach import CellReach, Reach

PUBLISHED = Path(__file__).parents[2] / "reports/published/cpu/search"
FILE = f"{CACHE}/offload.py"


def row(**values: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | {"before": "survived", "after": "survived"} | values


def test_the_page_has_the_summary_of_its_table() -> None:
    with (PUBLISHED / "generated.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == COLUMNS and len({each["edit"] for each in rows}) == len(rows)
    page = (PUBLISHED / "kills.md").read_text(encoding="utf-8")
    assert all(line in page for line in summary(rows))


def test_an_arm_without_a_finding_counts_as_the_cap_and_an_edit_that_did_not_run_not_at_all() -> None:
    rows = [row(), row(after="killed", after_s="3"), row(after="invalid", before="killed", before_s="1")]
    every, any_arm = summary(rows)[2:]
    assert "invalid" not in FAULTS
    half = (CAP_CPU_S + 3) / 2
    assert (
        every == f"| all that ran | 2 | 0 / 1 | {CAP_CPU_S:.2f} to {half:.2f} | {CAP_CPU_S:.2f} to {half:.2f} | 0.62 |"
    )
    assert any_arm.startswith(f"| found by an arm | 1 | 0 / 1 | {CAP_CPU_S:.2f} to 3.00 |")


def test_an_arm_runs_what_its_processes_do_in_the_order_in_which_schedules_end() -> None:
    cells = cells_of(1, ["retract-resume"])
    cost_s = {cell.cell: 0.5 if cell.shape.endswith("-micro") else 1.0 for cell in cells}
    steps = {arm: steps_of(arm, cells, cost_s) for arm in ARMS}
    for found in steps.values():
        ends = [step.ends_s for step in found]
        assert ends == sorted(ends) and ends[-1] <= CAP_CPU_S and len({step.line for step in found}) == len(found)
    assert {step.cell[-4:] for step in steps["before"]} == {"tiny"}
    first, second = steps["before"][:2]  # of two processes, each with a cell of its own
    assert (first.ends_s, second.ends_s) == (1.0, 1.0) and first.cell != second.cell
    assert "strategy=eager" in first.line and "schedule=0" in first.line
    # Seven cells of each size: a process with four micro ones has run two rounds of them before a tiny one.
    rounds = [step.cell for step in steps["after"] if step.ends_s <= 3.0]
    assert len(rounds) == 12 and all(cell.endswith("-micro") for cell in rounds)


def test_what_is_drawn_can_be_found_and_follows_from_the_seed() -> None:
    text = (package_folder() / FILE).read_text(encoding="utf-8")
    edits = edits_of(FILE, text, frozenset())
    lines = {edit.first: 1 for edit in edits[::2]}
    reach = Reach([CellReach(cell="cell", line="", costs=(1,), cpu_s=(1.0,), lines={FILE: lines})])
    found = drawn({FILE: text}, reach, 1000, 1)
    assert found and all(reach.of(edit.file, edit.first, edit.last) for edit in found)
    assert not {edit.id for edit in found} & {*read_equivalent()[FILE]}
    assert drawn({FILE: text}, reach, 2, 1) == found[:2]
    assert [edit.id for edit in drawn({FILE: text}, reach, 1000, 2)] != [edit.id for edit in found]


@pytest.mark.processes
@pytest.mark.schedules
def test_an_edit_is_found_by_a_schedule_of_the_arm_and_costs_what_came_before(tmp_path: Path) -> None:
    cells = cells_of(1, ["retract-resume"], ["llama-3-tiny"])
    pristine = Pristine(tmp_path, cells, code=code_of(package_folder()), schedules=2, traced=1)
    steps = steps_of("before", cells, {cells[0].cell: 5.0})
    assert [step.ends_s for step in steps] == [5.0, 10.0]
    text = (package_folder() / FILE).read_text(encoding="utf-8")
    with ServerPool(1) as pool:
        assert [*pristine.survey(pool)] == [cells[0].cell]
        judge = ArmJudge(pool, pristine, steps)
        reach = pristine.reach()
        edits = [edit for edit in edits_of(FILE, text, frozenset()) if edit.operator == "delete-call"]
        found = [judge.row(subject_of(edit, text, reach)) for edit in edits[:4]]
    kills = [(seconds, line) for outcome, seconds, line in found if outcome == "killed"]
    assert kills and all((seconds, line) in {(step.ends_s, step.line) for step in steps} for seconds, line in kills)
    unreached = subject_of(edits[0], text, Reach([]))
    assert judge.row(unreached) == ("survived", None, "")
