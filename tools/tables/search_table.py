"""How many schedules and CPU seconds mutants that need answers of "no" take to be found, by strategy: a table.

    PYTHONPATH=tests python -m tools.tables.search_table OUT.csv [--only MUTANT]... [--seed N]

Each mutant runs in the scenario of its card until the oracle of its card finds it with the code of its card, for
--schedules or --cpu at the most. The strategies take turns mutant by mutant, so that a busy machine slows all of them.
The fixed build then runs the schedules of each. Shapes are micro. "within" is the exploration of the workload that
tests/mutants/test_late.py names, in its order; the other strategies begin at schedule 0 of the cell.

Invariants:
- schedules: the first that failed so, counted from 1; "" where none did. tried: how many ran. cpu_s: of the mutant's
  runs up to there, the workloads included. other: a code that was found before, in an earlier schedule.
- fixed: findings of the fixed build in those schedules.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median

from mutants.bounds import WORKLOADS, exploration_of

from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.turns import Exploration
from kvcheck.core.stress.runner import ScheduleRunner, schedules
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant, mutant_target
from tools.tables.measured import measured

WITHIN = "within"
"""The strategy that runs an exploration."""
STRATEGIES = ("eager", "lazy", "delay", "random", "portfolio", "answers", WITHIN)
COLUMNS = ("mutant", "shape", "strategy", "bound", "code", "schedules", "tried", "cpu_s", "other", "fixed")

Row = dict[str, str]
Run = Callable[[Plan], Outcome]


def outcomes(name: str, strategy: str, seed: int, most: int, run: Run) -> Iterator[Outcome]:
    card = mutant(name)
    shape = f"{card.shape.rpartition('-')[0]}-micro"
    if strategy == WITHIN:
        yield from explored(exploration_of(name), most, run)
        return
    first = Plan(scenario=card.scenario, shape=shape, strategy=strategy, seed=seed)
    yield from map(run, schedules(first, most))


def explored(exploration: Exploration, most: int, run: Run) -> Iterator[Outcome]:
    for _ in range(most):
        if (plan := exploration.next()) is None:
            return
        outcome = run(plan)
        exploration.took(outcome.refused, outcome.asked, outcome.trace)
        yield outcome


def row(name: str, strategy: str, healthy: Callable[[Plan], int], *, seed: int, most: int, cpu_s: float) -> Row:
    """One row of the table. healthy: how many findings the fixed build has in a schedule."""
    card = mutant(name)
    broken = ScheduleRunner(mutant_target(name))
    plans: list[Plan] = []
    began, found, other = time.process_time(), "", ""
    for outcome in outcomes(name, strategy, seed, most, broken.run):
        plans.append(outcome.plan)
        if any((each.code, each.oracle) == (card.code, card.killed_by) for each in outcome.findings):
            found = str(len(plans))
            break
        other = other or " ".join(sorted({each.code for each in outcome.findings}))
        if time.process_time() - began > cpu_s:
            break
    spent = time.process_time() - began
    clean = sum(map(healthy, plans))
    bound = card.within if card.within else ""
    shape = plans[0].shape
    values = (name, shape, strategy, bound, card.code, found, len(plans), f"{spent:.2f}", other, clean)
    return {key: str(value) for key, value in zip(COLUMNS, values, strict=True)}


def summary(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| size | strategy | found | schedules, median | CPU s, mean | CPU s, median |",
        "|---|---|---|---|---|---|",
    ]
    for strategy in STRATEGIES:
        own = [each for each in rows if each["strategy"] == strategy]
        hits = [int(each["schedules"]) for each in own if each["schedules"]]
        cpu = [float(each["cpu_s"]) for each in own]
        said = f"{median(hits):g} | {mean(cpu):.2f} | {median(cpu):.2f}" if hits else "n/a | n/a | n/a"
        lines.append(f"| micro | {strategy} | {len(hits)} of {len(own)} | {said} |")
    return lines


def by_mutant(rows: Sequence[Row]) -> list[str]:
    lines = [f"| mutant | bound | {' | '.join(STRATEGIES)} |", f"|{'---|' * (len(STRATEGIES) + 2)}"]
    for name in dict.fromkeys(each["mutant"] for each in rows):
        own = {each["strategy"]: each for each in rows if each["mutant"] == name}
        cells = [f"{each['schedules'] or '> ' + each['tried']} ({float(each['cpu_s']):.1f} s)" for each in own.values()]
        lines.append(f"| `{name}` | {own[STRATEGIES[0]]['bound']} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=sorted(WORKLOADS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=40)
    parser.add_argument("--cpu", type=float, default=60.0)
    given = parser.parse_args()
    fixed = ScheduleRunner(BuiltinTarget())

    @cache
    def healthy(plan: Plan) -> int:
        return len(fixed.run(plan).findings)

    rows = (
        row(name, strategy, healthy, seed=given.seed, most=given.schedules, cpu_s=given.cpu)
        for name in given.only or sorted(WORKLOADS)
        for strategy in STRATEGIES
    )
    made = [*measured(given.out, COLUMNS, rows)]
    sys.stdout.write("\n".join([*by_mutant(made), "", *summary(made)]) + "\n")


if __name__ == "__main__":
    main()
