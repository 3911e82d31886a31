"""Which decoder finds which mutant of attention, after how many schedules and CPU seconds: a table.

    python -m tools.tables.decoder_table OUT.csv

Each mutant runs with each decoder in retract-resume until something is found, for 24 schedules at the most. The fixed
build then runs as many with the same decoder.

Invariants:
- found: the first finding that is shown, "-" where nothing was found. fixed: findings of the fixed build.
- schedules: the first that failed, counted from 1, or all. cpu_s: of the mutant's runs, the workloads included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner, schedules
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant_target
from tools.tables.measured import measured

SCENARIO, SEED, SCHEDULES = "retract-resume", 1, 24
SHAPES = {
    "scale-applied-twice": ("llama-fp8-answers",),
    "resume-shifts-positions": ("llama-answers", "deepseek-answers"),
    "window-one-short": ("gpt-oss-answers",),
    "resume-takes-older-state": ("qwen3-next-answers",),
    "length-without-own-token": ("llama-answers", "deepseek-answers", "deepseek-v3.2-answers"),
    "index-skips-open-page": ("deepseek-v3.2-answers",),
    "picks-of-other-request": ("deepseek-v3.2-answers",),
    "resume-takes-token-twice": ("qwen3-next-answers",),
}
"""Shapes that have what a mutant breaks, by mutant."""
DECODERS = ("words", "known-answer")
COLUMNS = ("mutant", "shape", "decoder", "found", "schedules", "cpu_s", "fixed")


def cells() -> Iterator[tuple[str, Plan]]:
    """(mutant, first plan without it) of each row."""
    for name, shapes in SHAPES.items():
        for shape in shapes:
            for decoder in DECODERS:
                yield name, Plan(scenario=SCENARIO, shape=shape, decoder=decoder, seed=SEED)


def found_by(outcome: Outcome) -> str:
    return f"{outcome.findings[0].oracle} {outcome.findings[0].code}" if outcome.findings else "-"


def row(name: str, first: Plan) -> dict[str, str]:
    broken = ScheduleRunner(mutant_target(name))
    fixed = ScheduleRunner(BuiltinTarget(), workloads=broken.workloads)
    began, used, found = time.process_time(), 0, "-"
    for plan in schedules(first, SCHEDULES):
        used, found = used + 1, found_by(broken.run(plan))
        if found != "-":
            break
    cpu_s = time.process_time() - began
    clean = sum(len(fixed.run(plan).findings) for plan in schedules(first, used))
    values = (name, first.shape, first.decoder, found, str(used), f"{cpu_s:.1f}", str(clean))
    return dict(zip(COLUMNS, values, strict=True))


def markdown(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = ["| mutant | shape | words | known answers |", "|---|---|---|---|"]
    said = {(each["mutant"], each["shape"], each["decoder"]): _cell(each) for each in rows}
    for name, shape in dict.fromkeys((each["mutant"], each["shape"]) for each in rows):
        by = (said[name, shape, decoder] for decoder in DECODERS)
        lines.append(f"| `{name}` | {shape} | {' | '.join(by)} |")
    return lines


def _cell(row: dict[str, str]) -> str:
    if row["found"] == "-":
        return f"not found in {row['schedules']} schedules, {row['cpu_s']} s"
    return f"{row['found']}, schedule {row['schedules']}, {row['cpu_s']} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    rows = measured(parser.parse_args().path, COLUMNS, (row(name, first) for name, first in cells()))
    sys.stdout.write("\n".join(markdown([*rows])) + "\n")


if __name__ == "__main__":
    main()
