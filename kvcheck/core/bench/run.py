"""run_bench: the points of all cases, round by round, until each is known closely enough or the time is up.

Invariants:
- Rounds of all points alternate, so that a bad minute costs each of them one round.
- Rounds stop for precision or time alone, never because of what was found.
- Interrupted, it tells the rows of everything that has a round, then lets the interruption go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch

from kvcheck.core.bench import CASES
from kvcheck.core.bench.arms import Point, Setting
from kvcheck.core.bench.clock import clock_for
from kvcheck.core.bench.measure import Samples
from kvcheck.core.bench.plan import BenchPlan
from kvcheck.core.errors import UnknownVerdict
from kvcheck.core.record import BenchRow
from kvcheck.core.workload.shapes import shape as shape_named

Tell = Callable[[BenchRow], None]
Skip = Callable[[str, str], None]
Progress = Callable[[str], None]
Choose = Callable[[list[Point]], list[Point]]


def all_of(points: list[Point]) -> list[Point]:
    """Measure what the plan names."""
    return points


def run_bench(
    plan: BenchPlan,
    tell: Tell,
    *,
    skip: Skip | None = None,
    progress: Progress | None = None,
    choose: Choose = all_of,
) -> tuple[BenchRow, ...]:
    """Measure what the plan names; each row is told once, when its last round is done.

    skip: told the case and the reason where a case cannot be measured here; without it that raises UnknownVerdict.
    choose: what of the plan's points is measured, or what in their place.
    progress: told what happens, between rounds. Raises WrongOutput where an arm did other work.
    """
    clock = clock_for(plan.device)
    random = np.random.default_rng(plan.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[BenchRow] = []
    try:
        with ExitStack() as stack:
            setting = Setting(shape=shape_named(plan.shape), device=clock.device, stack=stack)
            samples = [Samples(point, clock) for point in choose(_points(plan, setting, skip))]
            try:
                _rounds(plan, samples, random, rows, tell, progress)
            finally:  # what was measured is kept, also where it ends by an interruption or by an arm that is wrong
                _tell(samples, rows, tell)
    finally:
        torch.set_num_threads(threads)
    return tuple(rows)


def _points(plan: BenchPlan, setting: Setting, skip: Skip | None) -> list[Point]:
    points: list[Point] = []
    for name in dict.fromkeys(plan.cases):
        try:
            points += CASES.load(name)(setting)
        except UnknownVerdict as error:
            if skip is None:
                raise
            skip(name, str(error))
    return points


def _rounds(
    plan: BenchPlan,
    samples: list[Samples],
    random: np.random.Generator,
    rows: list[BenchRow],
    tell: Tell,
    progress: Progress | None,
) -> None:
    deadline = time.monotonic() + plan.max_time_s
    for number in range(1, plan.rounds_max + 1):
        for each in [each for each in samples if not each.is_told]:
            if time.monotonic() >= deadline and number > 1:
                return
            if progress is not None:
                progress(f"round {number}: {each.point.case} {each.point.size}")
            each.add_round(random)
            if number >= plan.rounds_min and each.is_precise(plan.precision):
                _tell([each], rows, tell)


def _tell(samples: list[Samples], rows: list[BenchRow], tell: Tell) -> None:
    for each in samples:
        if each.rounds and not each.is_told:
            each.is_told = True
            for row in each.rows():
                rows.append(row)
                tell(row)
