"""Mutants and the fixed build over threads: how often wrong bytes are served in free runs and in held ones. A table.

    python -m tools.tables.threads_table OUT.csv [--runs N] [--only MUTANT]

A mutant is one that the ordering oracle kills on a CPU. Its delay is searched for as `kvcheck selftest --device
threads` does: the first that served wrong bytes, and that the fixed build passes. Then the plan runs N times free and N
times held, in turn, and so does the fixed build. A mutant for which no such delay is found runs under the first delay
of its first schedule that has one.

Invariants:
- A run is held if the report of its delays says so: one in which the watchdog ended every hold is not counted.
- free_wrong, held_wrong: only wrong bytes count, as oracles of content see them. free_found, held_found: runs with any
  finding, such as a page that was freed while a copy to it had not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvcheck.commands.targets import target_of
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.stress.delayed import Rates, device_plans, run_both
from kvcheck.core.stress.mutant_trials import JUDGE, judge
from kvcheck.core.stress.runner import ScheduleRunner, Workloads
from kvcheck.core.stress.targets.mutants import MUTANTS, mutant
from tools.tables.measured import measured

SEED, SCHEDULES = 1, 32
COLUMNS = (
    *("mutant", "bug", "scenario", "outcome", "schedule", "delay", "runs", "free_wrong", "held_wrong", "free_found"),
    *("held_found", "holds", "overtaken", "gave_way", "watchdog", "fixed_runs", "fixed_found", "cpu_s"),
)


def pairs_of(plan: Plan, runs: int) -> tuple[Rates, tuple[int, int]]:
    runner, rates, free_found, held_found = ScheduleRunner(target_of(plan)), Rates(), 0, 0
    for _ in range(runs):
        free, held = run_both(runner, plan)
        assert held is not None, "threads are not lost as a device is"
        rates = rates.plus(free, held)
        free_found, held_found = free_found + bool(free.findings), held_found + bool(held.findings)
    return rates, (free_found, held_found)


def first_delay(plan: Plan) -> Plan | None:
    """The first delay of the first schedule in which the CPU finds two operations that nothing orders."""
    runner = ScheduleRunner(target_of(plan))
    for number in range(SCHEDULES):
        if plans := device_plans(runner, dataclasses.replace(plan, schedule=number), "threads"):
            return plans[0]
    return None


def row_of(name: str, runs: int) -> dict[str, object]:
    card, began = mutant(name), time.process_time()
    plan = Plan(scenario=card.scenario, shape=card.shape, decoder=card.decoder, strategy=card.strategy, seed=SEED)
    found = judge(plan, card, SCHEDULES, target_of, device="threads", workloads=Workloads())
    row: dict[str, object] = {"mutant": name, "bug": card.bug, "scenario": card.scenario, "outcome": found.outcome}
    line = (
        parse_line(str(found.replay).removeprefix("kvcheck replay "))
        if found.replay
        else first_delay(dataclasses.replace(plan, mutant=name))
    )
    if line is not None:
        (own, own_found), (fixed, fixed_found) = (
            pairs_of(each, runs) for each in (line, dataclasses.replace(line, mutant=None))
        )
        counts = () if own.report is None else own.report.rows
        names = {"holds": "placed", "overtaken": "overtaken", "gave_way": "gave_way", "watchdog": "fired"}
        row |= {"schedule": line.schedule, "delay": str(line.choices), "runs": own.free_runs}
        row |= {"free_wrong": own.free_wrong, "held_wrong": own.held_wrong}
        row |= {"free_found": own_found[0], "held_found": own_found[1]}
        row |= {key: sum(getattr(each, count) for each in counts) for key, count in names.items()}
        row |= {"fixed_runs": fixed.free_runs + fixed.held_runs, "fixed_found": sum(fixed_found)}
    return row | {"cpu_s": round(time.process_time() - began, 1)}


def rows(only: list[str], runs: int) -> Iterator[dict[str, object]]:
    for name in MUTANTS:
        card = mutant(name)
        if card.killed_by == JUDGE and not card.within and (not only or name in only):
            yield row_of(name, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", action="append", default=[])
    given = parser.parse_args()
    for row in measured(given.out, COLUMNS, rows(given.only, given.runs)):
        sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    main()
