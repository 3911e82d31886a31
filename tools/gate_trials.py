"""Trials of the gate on this machine: an arm is compared with itself, and the gate has to pass it.

    PYTHONPATH=. python -m tools.gate_trials 200                false alarms
    PYTHONPATH=. python -m tools.gate_trials 100 --planted 20   one of the two is a fifth slower: how many are caught

A trial has the steps of a run: a benchmark is measured, the gate judges its record with a budget of 1, and rows that
are not OK are measured again. The position of memory differs from process to process and stays the same within one, so
each process makes only TRIALS trials.

Invariants:
- Exit 0 if at most MOST_FALSE trials are false alarms, or at least LEAST_CAUGHT planted ones are caught; 4 if not, 130
  if interrupted. A share is printed with its exact one-sided 95 % limit, on the side that is worse for the gate.
- An arm that is compared with itself has one maker for both. If a slow-down is planted, both arms have the clock that
  plants it, so the ratio is at most what was planted.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context

from kvcheck.commands.options import draw_seed
from kvcheck.commands.terminal import say
from kvcheck.core.base.record import BenchRow, Evidence, Interval, RunRecord, Verdict
from kvcheck.core.bench import run as running
from kvcheck.core.bench.arms import Arm, ArmComparison, Maker, Point
from kvcheck.core.bench.fresh_rounds import PRECISION, ROUNDS_MAX, FreshRounds
from kvcheck.core.bench.measure import machine
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.bench.run import BenchPlan
from kvcheck.core.report.gate.budgets import Budget
from kvcheck.core.report.gate.judge import Overhead, Rules, decide
from kvcheck.core.report.gate.result import gated_rows
from kvcheck.core.run.session import environment, tool

TRIALS = 10
MOST_TRIALS = 1000
MOST_FALSE, LEAST_CAUGHT = 0.01, 0.90
RECORDED_ROUNDS = 15
MAX_TIME_S = 60.0
ARMS = (("metadata-read", "packed-get", "glm-5.1"), ("guarded-read", "guarded", "glm-5.1-tiny"))
"""Case, arm and shape; trials take turns on them."""
AGAIN = "again"
LEAST_WAIT_NS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the gate over an arm compared with itself. ratios: recorded, then each time it was measured again."""

    case: str
    verdict: Overhead
    ratios: tuple[Interval, ...]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="trials")
    parser.add_argument("--planted", type=float, default=0.0, help="the slow-down of one of the two, in percent")
    parser.add_argument("--seed", type=int, default=draw_seed())
    given = parser.parse_args(words)
    if not (1 <= given.count <= MOST_TRIALS and given.seed >= 0 and 0 <= given.planted <= 1000):
        parser.error(f"expected 1 to {MOST_TRIALS} trials, a seed of at least 0, a slow-down of 0 to 1000 percent")
    done: list[Trial] = []
    is_complete = True
    try:
        for trial in run_trials(given.count, given.planted, given.seed):
            done.append(trial)
            ratios = ", ".join(f"{each.est:.3f} ({each.lo or 0:.3f} to {each.hi or 0:.3f})" for each in trial.ratios)
            say(f" {trial.verdict.name:<12} {len(done)} of {given.count}   {trial.case}   {ratios}")
    except KeyboardInterrupt:
        is_complete = False
    code = (0 if is_met(done, given.planted) else 4) if is_complete else 130
    say(f"{summary(done, given.planted)}; seed {given.seed}, exit {code}")
    return code


def is_met(trials: Sequence[Trial], planted: float) -> bool:
    share = sum(trial.verdict is Overhead.SLOWER for trial in trials) / len(trials)
    return share >= LEAST_CAUGHT if planted else share <= MOST_FALSE


def summary(trials: Sequence[Trial], planted: float) -> str:
    if not trials:
        return "no trial came to its end"
    count = len(trials)
    slower = sum(trial.verdict is Overhead.SLOWER for trial in trials)
    unsure = sum(trial.verdict is Overhead.INCONCLUSIVE for trial in trials)
    if planted:
        what, limit = f"slow-downs of {planted:g} % caught", f"at least {1 - most_share(count - slower, count):.1%}"
    else:
        what, limit = "false SLOWER", f"at most {most_share(slower, count):.1%}"
    return f"{what}: {slower} of {count}, {slower / count:.1%}, {limit} (95 %); INCONCLUSIVE {unsure}"


def most_share(hits: int, runs: int, *, tail: float = 0.05) -> float:
    """The largest share that gives so few hits in so many runs with probability `tail`, by Clopper and Pearson."""
    low, high = hits / runs, 1.0
    for _ in range(60 if hits < runs else 0):
        share = (low + high) / 2
        logs = (
            math.lgamma(runs + 1)
            - math.lgamma(at + 1)
            - math.lgamma(runs - at + 1)  # math.comb overflows a float
            + at * math.log(share)
            + (runs - at) * math.log1p(-share)
            for at in range(hits + 1)
        )
        low, high = (share, high) if math.fsum(map(math.exp, logs)) > tail else (low, share)
    return high


def run_trials(count: int, planted: float, seed: int) -> Iterator[Trial]:
    batches = [(min(TRIALS, count - first), planted, seed + first) for first in range(0, count, TRIALS)]
    if len(batches) == 1:
        for number in range(count):
            yield _trial(*ARMS[number % len(ARMS)], planted=planted, seed=(seed + number) * 100)  # room for fresh seeds
        return
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for made in pool.imap(_batch, batches):
            yield from made


def _batch(given: tuple[int, float, int]) -> list[Trial]:
    return [*run_trials(*given)]


class _TrialRounds(FreshRounds):
    choose: running.Choose

    def chosen(self, points: list[Point], rows: Sequence[BenchRow]) -> list[Point]:
        return self.choose(points)


def _trial(case: str, arm: str, shape: str, *, planted: float, seed: int) -> Trial:
    bench = BenchPlan(
        cases=(case,),
        shape=shape,
        device="cpu",
        seed=seed,
        precision=PRECISION,
        max_time_s=MAX_TIME_S,
        rounds_min=RECORDED_ROUNDS,
        rounds_max=ROUNDS_MAX,
    )

    def choose(points: list[Point]) -> list[Point]:
        return beside_itself(points, arm, planted)

    rows = running.run_bench(bench, lambda row: None, choose=choose)
    record = RunRecord(
        run_id=f"trial-{seed}",
        tool=tool(),
        argv=(),
        repro="",
        seed=seed,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_s=0.0,
        verdict=Verdict.PASS,
        exit_code=0,
        complete=True,
        environment={**environment(), "hardware": machine()},
        plan={"shape": shape},
        evidence=Evidence(),
        bench=rows,
    )
    budgets = [Budget(case=row.case, arm=row.arm, baseline=row.baseline, max_ratio=1.0) for row in rows]
    gated, problems, _ = gated_rows([record], budgets)
    assert not problems and len(gated) == 1, f"expected one row of {case} to gate, got {len(gated)}: {problems}"
    fresh = _TrialRounds([record], seed=seed, max_time_s=MAX_TIME_S, build={**environment(), **tool()})
    fresh.choose = choose
    ((row,), is_complete) = decide(gated, Rules(), fresh)
    if not is_complete:
        raise KeyboardInterrupt
    return Trial(case=case, verdict=row.verdict, ratios=tuple(each.measured for each in row.measurements))


def beside_itself(points: list[Point], arm: str, percent: float) -> list[Point]:
    """The first point that has this arm, with the arm compared with itself and slowed down by so many percent."""
    point = next(point for point in points if arm in point.makers)
    make = point.makers[arm]
    makers = {arm: make, AGAIN: make} if percent == 0 else {arm: slowed(make, 0), AGAIN: slowed(make, percent)}
    return [dataclasses.replace(point, makers=makers, comparisons=(ArmComparison(arm=AGAIN, baseline=arm),))]


def slowed(make: Maker, percent: float) -> Maker:
    def made(memory: FreshMemory) -> Arm:
        arm = make(memory)
        return dataclasses.replace(arm, call=_slowed_call(arm.call, percent / 100))

    return made


def _slowed_call(call: Callable[[], object], share: float) -> Callable[[], None]:
    """Waits shorter than LEAST_WAIT_NS are added up first, because reading the clock would be most of them."""
    clock = time.perf_counter_ns
    owed = 0.0

    def slow() -> None:
        nonlocal owed
        start = clock()
        call()
        end = clock()
        owed += (end - start) * share
        if owed >= LEAST_WAIT_NS:
            until = end + owed
            while end < until:
                end = clock()
            owed = until - end

    return slow


if __name__ == "__main__":
    sys.exit(main())
