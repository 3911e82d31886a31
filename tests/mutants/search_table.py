"""How many schedules and CPU seconds each mutant takes to be found, by size of shape and by strategy: a table.

    PYTHONPATH=.:tests python tests/mutants/search_table.py OUT.csv [--only MUTANT]... [--seed N]

Each mutant runs in the scenario of its card until the oracle of its card finds it with the code of its card, for
MOST_SCHEDULES at the most. The sizes and strategies take turns mutant by mutant, so that a busy machine slows all of
them. The fixed build then runs the schedules of each, with the same workloads.

Invariants:
- schedules: the first that failed so, counted from 1; "" where none did. cpu_s: of the mutant's runs up to there, the
  workloads included. other: a code that was found before, in an earlier schedule.
- fixed: findings of the fixed build in those schedules.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from kvcheck.core.stress.runner import ScheduleRunner, schedules
from kvcheck.core.stress.schedule import Plan
from kvcheck.core.targets.builtin import BuiltinTarget
from kvcheck.core.targets.mutants import MUTANTS, mutant, mutant_target
from kvcheck.core.workload import WORDS
from kvcheck.core.workload.shapes import MICRO_SHAPES

MOST_SCHEDULES = 40
ARMS = (("tiny", "portfolio"), ("micro", "portfolio"), ("micro", "answers"))
COLUMNS = ("mutant", "shape", "strategy", "code", "schedules", "cpu_s", "other", "fixed")


def first_plans(name: str, seed: int) -> Iterator[Plan]:
    """The first plan of each arm."""
    card = mutant(name)
    for size, strategy in ARMS:
        shape = f"{card.shape.removesuffix('-tiny')}-{size}"
        yield Plan(scenario=card.scenario, shape=shape, strategy=strategy, seed=seed)


def row(name: str, first: Plan) -> dict[str, object]:
    """One row of the table."""
    card = mutant(name)
    broken = ScheduleRunner(mutant_target(name))
    began, used, found, other = time.process_time(), 0, "", ""
    for plan in schedules(first, MOST_SCHEDULES):
        used += 1
        outcome = broken.run(plan)
        if any((each.code, each.oracle) == (card.code, card.killed_by) for each in outcome.findings):
            found = str(used)
            break
        other = other or " ".join(sorted({each.code for each in outcome.findings}))
    cpu_s = time.process_time() - began
    fixed = ScheduleRunner(BuiltinTarget(), workloads=broken.workloads)
    clean = sum(len(fixed.run(plan).findings) for plan in schedules(first, used))
    values = (name, first.shape, first.strategy, card.code, found, f"{cpu_s:.2f}", other, clean)
    return dict(zip(COLUMNS, values, strict=True))


def summary(rows: Sequence[dict[str, str]]) -> list[str]:
    """A line of markdown for each arm."""
    lines = [
        "| size | strategy | found | schedules, median | CPU s, mean | CPU s, median |",
        "|---|---|---|---|---|---|",
    ]
    for size, strategy in ARMS:
        own = [each for each in rows if each["shape"].endswith(size) and each["strategy"] == strategy]
        hits = [int(each["schedules"]) for each in own if each["schedules"]]
        cpu = [float(each["cpu_s"]) for each in own]
        said = f"{median(hits):g} | {mean(cpu):.2f} | {median(cpu):.2f}" if hits else "n/a | n/a | n/a"
        lines.append(f"| {size} | {strategy} | {len(hits)} of {len(own)} | {said} |")
    return lines


def main() -> None:
    """Write the table, and print a line for each arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=sorted(MUTANTS))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rows = []
    with given.out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name in given.only or sorted(MUTANTS):
            card = mutant(name)
            if card.decoder != WORDS or f"{card.shape.removesuffix('-tiny')}-micro" not in MICRO_SHAPES:
                continue
            for first in first_plans(name, given.seed):
                rows.append({key: str(value) for key, value in row(name, first).items()})
                writer.writerow(rows[-1])
                stream.flush()
    sys.stdout.write("\n".join(summary(rows)) + "\n")


if __name__ == "__main__":
    main()
