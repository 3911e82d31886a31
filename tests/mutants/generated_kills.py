"""How many CPU seconds a default run takes to find generated edits of the cache, before and after: a table.

    PYTHONPATH=.:tests python tests/mutants/generated_kills.py OUT.csv --work DIR [--edits N] [--seed N]

The edits are those of `kvcheck mutate`, in an order that the seed decides, judged by its machinery: a process imports
one edit and runs plan lines until one has a finding. Each arm gives the lines of its order. Before: that of 2026-11-22
(commit 12d78b3), tiny cells one after another, each for its share of the run. After: that of a default run of this
tree. Both run on the code of this tree. Edits that are listed as equivalent or as a legal choice, and those that no
surveyed schedule reaches, are left out. DIR keeps the survey.

Invariants:
- An arm's lines are in the order in which the schedules of PROCESSES processes end. CPU seconds up to a line are those
  of its process: each schedule is charged what its cell takes on the code as it is, measured once.
- Schedules of cells that do not reach the edit run as ever, so they are charged and not run.
- Only a finding that the code as it is does not have counts. What else ends an arm counts as the cap, CAP_CPU_S.
- Rows that OUT has are kept, so a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

from mutants.kill_arm import PROCESSES, RUN_CPU_S, after, before
from mutants.kill_table import compared, kept_rows

from kvcheck.commands.mutate import DEFAULT_SCHEDULES, TRACED
from kvcheck.core.base.rng import Rng
from kvcheck.core.stress.mutation.campaign import Judge, Subject, subject_of
from kvcheck.core.stress.mutation.edits import Edit, edits_of, group_of, identifiers_of, package_folder, read_sources
from kvcheck.core.stress.mutation.equivalent import LEFT, LEGAL, reasons_for
from kvcheck.core.stress.mutation.pool import ServerPool
from kvcheck.core.stress.mutation.pristine import Pristine, cells_of, code_of
from kvcheck.core.stress.mutation.reach import Reach
from kvcheck.core.stress.mutation.results import Result
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.schedule import Plan
from kvcheck.core.targets.builtin import BuiltinTarget

CAP_CPU_S = 12.0
MEASURED = 3
"""Schedules of a cell whose mean is what one of it takes."""
ARMS = ("before", "after")
COLUMNS = ("edit", "file", "line", "operator", "before", "before_s", "after", "after_s", "before_plan", "after_plan")
FAULTS = ("killed", "survived", "unknown", "hang", "crash")
"""Outcomes of edits that ran. Of others nothing was judged, and their rows do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A schedule of an arm, and CPU seconds of its process up to its end."""

    ends_s: float
    line: str
    cell: str


def steps_of(arm: str, cells: Sequence[Plan], cost_s: Mapping[str, float]) -> list[Step]:
    """The schedules of an arm up to the cap, in the order in which they end. cost_s: of a schedule, by cell."""
    mine = [cell for cell in cells if cell.shape.endswith("-tiny")] if arm == "before" else [*cells]
    steps = []
    for at in range(PROCESSES):
        plans: list[Plan] = []

        def cost(plan: Plan, plans: list[Plan] = plans) -> float:
            plans.append(plan)
            return cost_s[plan.cell]

        share = mine[at::PROCESSES]
        slice_s = RUN_CPU_S * PROCESSES / len(mine)
        order = before(share, slice_s, cost, is_old=False) if arm == "before" else after(share, cost)
        clock = 0.0
        for took in order:
            clock += took
            if clock > CAP_CPU_S:
                break
            steps.append(Step(ends_s=round(clock, 3), line=plans[-1].line(), cell=plans[-1].cell))
    return sorted(steps, key=lambda step: step.ends_s)


class ArmJudge(Judge):
    """Judges edits by the lines of one arm. steps: of the arm."""

    def __init__(self, pool: ServerPool, pristine: Pristine, steps: Sequence[Step]) -> None:
        # What an arm runs is bounded by its lines; edits that slow the cache down may take twice as long.
        super().__init__(pool, pristine, schedules=DEFAULT_SCHEDULES, cpu_s=2 * PROCESSES * CAP_CPU_S)
        self._steps = steps

    def _lines(self, subject: Subject) -> list[str]:
        return [step.line for step in self._steps if step.cell in subject.reached]

    def row(self, subject: Subject) -> tuple[str, float | None, str]:
        """Outcome, CPU seconds to a finding, and the plan line that has it."""
        if not self._lines(subject):
            return "survived", None, ""
        (found,) = self.results([subject])
        if not found.is_kill:
            return found.outcome, None, ""
        return found.outcome, self.seconds(found), found.line

    def seconds(self, found: Result) -> float:
        """CPU seconds up to the schedule that found it."""
        return next(step.ends_s for step in self._steps if step.line == found.line)


def drawn(sources: Mapping[str, str], reach: Reach, count: int, seed: int) -> list[Edit]:
    """So many edits of the product that can be found, in an order that the seed decides."""
    names = identifiers_of([*sources.values()])
    every = {file: edits_of(file, text, names) for file, text in sources.items() if group_of(file) == "product"}
    legal = {id for id, reason in reasons_for(every, LEFT).items() if reason.startswith(LEGAL)}
    left_out = {*reasons_for(every), *legal}
    edits = [
        edit
        for rows in every.values()
        for edit in rows
        if edit.id not in left_out and reach.of(edit.file, edit.first, edit.last)
    ]
    edits.sort(key=lambda edit: Rng(seed * 1_000_003 + crc32(edit.id.encode())).next_u64())
    return edits[:count]


def costs(cells: Sequence[Plan], file: Path, key: str) -> dict[str, float]:
    """CPU seconds of a schedule on the code as it is, by cell; kept in a file."""
    if file.exists() and (kept := json.loads(file.read_text(encoding="utf-8")))["key"] == key:
        return dict(kept["cost_s"])
    runner = ScheduleRunner(BuiltinTarget())
    runner.run(replace(cells[0], schedule=MEASURED))  # what is loaded for the first schedule is loaded now
    cost_s = {}
    for cell in cells:
        began = time.process_time()
        for number in range(MEASURED):
            runner.run(replace(cell, schedule=number))
        cost_s[cell.cell] = round((time.process_time() - began) / MEASURED, 4)
    file.write_text(json.dumps({"key": key, "cost_s": cost_s}), encoding="utf-8")
    return cost_s


def summary(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A table of markdown: all edits that ran, those that both arms find, those that one of them does not."""
    ran = [row for row in rows if all(row[arm] in FAULTS for arm in ARMS)]
    both = [row for row in ran if all(row[f"{arm}_s"] for arm in ARMS)]
    groups = {
        "all that ran": ran,
        "found by an arm": [row for row in ran if any(row[f"{arm}_s"] for arm in ARMS)],
        "found by both": both,
    }
    lines = [
        "| edits | number | found before / after | mean CPU s | median CPU s | mean, after / before |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [compared(name, own, CAP_CPU_S, digits=2) for name, own in groups.items() if own]


def main() -> None:
    """Write the table, and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder = package_folder()
    sources, cells = read_sources(folder), cells_of(given.seed)
    key = code_of(folder)
    pristine = Pristine(given.work / "pristine", cells, code=key, schedules=DEFAULT_SCHEDULES, traced=TRACED)
    rows = kept_rows(given.out, COLUMNS)
    known = {row["edit"] for row in rows}
    with ServerPool(1) as pool:
        for cell in pristine.survey(pool):
            sys.stderr.write(f"surveyed {cell}\n")
        cost_s = costs(cells, given.work / "costs.json", f"{key} seed {given.seed}")
        reach = pristine.reach()
        judges = {arm: ArmJudge(pool, pristine, steps_of(arm, cells, cost_s)) for arm in ARMS}
        with given.out.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            if not stream.tell():
                writer.writeheader()
            for edit in drawn(sources, reach, given.edits, given.seed):
                if edit.id in known:
                    continue
                subject = subject_of(edit, sources[edit.file], reach)
                row = {"edit": edit.id, "file": edit.file, "line": str(edit.line), "operator": edit.operator}
                for arm, judge in judges.items():
                    outcome, seconds, line = judge.row(subject)
                    row |= {arm: outcome, f"{arm}_s": "" if seconds is None else f"{seconds:.2f}", f"{arm}_plan": line}
                writer.writerow(row)
                stream.flush()
                rows.append(row)
    sys.stdout.write("\n".join(summary(rows)) + "\n")


if __name__ == "__main__":
    main()
