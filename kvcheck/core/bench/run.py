"""run_bench: measures case after case, round by round, until each is precise enough or its share of the time is over.

Invariants:
- The rows of a case are complete before the next case begins. Rounds of its points alternate.
- A case may use an equal share of the time that is left.
- Rounds stop for precision or time only, never because of a result.
- When interrupted, it reports every row that has a round, then raises the interruption again.
- A round that the time limit ends is dropped, and a point without a complete round is named.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.deadline import TimeUp, time_limit
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import BenchRow
from kvcheck.core.bench import CASES
from kvcheck.core.bench.arms import BenchSetting, Point
from kvcheck.core.bench.clock import clock_for
from kvcheck.core.bench.measure import Samples
from kvcheck.core.bench.memory import tensor_device
from kvcheck.core.stress.workload.shapes import shape as shape_named

Tell = Callable[[BenchRow], None]
Late = Callable[[str, tuple[str, ...]], None]
Progress = Callable[[str], None]
Learn = Callable[[dict[str, object]], None]
Choose = Callable[[list[Point]], list[Point]]
Key = tuple[str, str, str, str, str | None]


def all_of(points: list[Point]) -> list[Point]:
    return points


def run_bench(
    plan: BenchPlan,
    tell: Tell,
    *,
    late: Late | None = None,
    progress: Progress | None = None,
    learn: Learn | None = None,
    choose: Choose = all_of,
) -> tuple[BenchRow, ...]:
    """Measure the plan. Each row is reported once, after its last round.

    late: receives each case with its sizes without a round; no sizes if it was not prepared. choose: selects the points
    to be measured. learn: receives facts of the device. Raises WrongOutput if an arm left wrong bytes, UnknownVerdict
    if this machine lacks the device.
    """
    deadline = time.monotonic() + plan.max_time_s
    clock = clock_for(plan.device)
    random = np.random.default_rng(plan.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[BenchRow] = []
    try:
        with ExitStack() as stack:
            if kind_of(clock.name) == "cuda":  # events and kernels are those of the current device
                stack.enter_context(torch.cuda.device(tensor_device(clock.name)))
            points, left = _points(plan, BenchSetting(shape=shape_named(plan.shape), device=clock.name), deadline)
            samples = [Samples(point, clock) for point in choose(points)]
            facts = clock.spin() if samples else {}
            if learn is not None:
                learn(facts)
            groups = [[*group] for _, group in groupby(samples, key=lambda each: each.point.case)]
            try:
                for at, group in enumerate(groups):
                    now = time.monotonic()
                    until = now + (deadline - now) / (len(groups) - at)
                    _rounds(plan, group, random, rows, tell, progress, until)
                    _tell(group, rows, tell)
            finally:  # keep the measurements, also after an interruption or a wrong arm
                _tell(samples, rows, tell)
            for each in samples:
                if not each.rounds:
                    left[each.point.case] = (*left.get(each.point.case, ()), each.point.size)
            for case, sizes in left.items():
                if late is not None:
                    late(case, sizes)
    finally:
        torch.set_num_threads(threads)
    return tuple(rows)


def _points(plan: BenchPlan, setting: BenchSetting, deadline: float) -> tuple[list[Point], dict[str, tuple[str, ...]]]:
    points: list[Point] = []
    left: dict[str, tuple[str, ...]] = {}
    for name in dict.fromkeys(plan.cases):
        case = CASES.load(name)
        try:
            with time_limit(deadline):
                points += case(setting)
        except TimeUp:
            left[name] = ()
    return points, left


def _rounds(
    plan: BenchPlan,
    samples: list[Samples],
    random: np.random.Generator,
    rows: list[BenchRow],
    tell: Tell,
    progress: Progress | None,
    deadline: float,
) -> None:
    """Measure the samples of one case."""
    for number in range(1, plan.rounds_max + 1):
        for each in [each for each in samples if not each.is_told]:
            if progress is not None:
                progress(
                    f"{each.point.case}, {each.point.size}: round {number} of {plan.rounds_min} to {plan.rounds_max}"
                )
            try:
                with time_limit(deadline):
                    each.add_round(random)
            except TimeUp:
                return
            if number >= plan.rounds_min and each.is_precise(plan.precision):
                _tell([each], rows, tell)


def _tell(samples: list[Samples], rows: list[BenchRow], tell: Tell) -> None:
    for each in samples:
        if each.rounds and not each.is_told:
            each.is_told = True
            for row in each.rows():
                rows.append(row)
                tell(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """device: cpu, threads, cuda or cuda:N. precision: half width of a ratio's interval at which its rounds may stop.
    max_time_s: also ends a round in progress. rounds_min, rounds_max: for each size; fewer than rounds_min if time runs
    out."""

    cases: tuple[str, ...]
    shape: str
    device: str
    seed: int
    precision: float = 0.03
    max_time_s: float
    rounds_min: int = 15
    rounds_max: int

    def __post_init__(self) -> None:
        if not self.cases:
            raise UsageError(f"bench: expected at least one case, got none; known: {', '.join(CASES.names())}")
        for name in self.cases:
            CASES.require(name)
        shape_named(self.shape)
        kind_of(self.device)
        if not 0 < self.precision < math.inf:
            raise UsageError(f"--precision: expected a number above 0, such as 0.03, got {self.precision}")
        if not 0 < self.max_time_s < math.inf:
            raise UsageError(f"--max-time: expected seconds above 0, got {self.max_time_s}")
        if not 1 <= self.rounds_min <= self.rounds_max:
            raise UsageError(
                f"--rounds: expected at least 1 and no more than the most, got {self.rounds_min} to {self.rounds_max}"
            )
        if self.seed < 0:
            raise UsageError(f"--seed: expected an integer of at least 0, got {self.seed}")


def key(row: BenchRow) -> Key:
    return row.case, row.size, row.arm, row.baseline, row.shape


def only(points: list[Point], wanted: Collection[Key]) -> list[Point]:
    """Return the points with wanted comparisons, each with the arms that they need."""
    kept = []
    for point in points:
        rows = tuple(
            row
            for row in point.comparisons
            if (point.case, point.size, row.name or row.arm, row.baseline, point.shape) in wanted
        )
        if rows:
            named = {point.baseline, *(name for row in rows for name in (row.arm, row.baseline, row.limit) if name)}
            makers = {name: make for name, make in point.makers.items() if name in named}
            kept.append(dataclasses.replace(point, makers=makers, comparisons=rows))
    return kept
