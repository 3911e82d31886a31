"""Trials of the gate on this machine: an arm is compared with itself, and the gate has to pass it.

If a slow-down is planted in one of the two, the gate has to catch it. A trial has the steps of a run: a benchmark is
measured, the gate judges its record with a budget of 1, and rows that are not OK are measured again. The position of
memory differs from process to process and stays the same within one, so each process makes only TRIALS trials.

Invariants:
- The gate passes its trials if at most MOST_FALSE are false alarms and at least LEAST_CAUGHT planted ones are caught.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvcheck.core.base.child import Streams, end, start
from kvcheck.core.base.errors import InternalError
from kvcheck.core.base.record import Evidence, RunRecord, Verdict, value_from
from kvcheck.core.bench.fresh_rounds import PRECISION, ROUNDS_MAX, FreshRounds
from kvcheck.core.bench.noise import machine
from kvcheck.core.report.gate.budgets import Budget
from kvcheck.core.report.gate.judge import Measurement, Overhead, Rules, decide
from kvcheck.core.report.gate.result import gated_rows

TRIALS = 10
MOST_FALSE = 0.01
LEAST_CAUGHT = 0.90
RECORDED_ROUNDS = 15
MAX_TIME_S = 60.0
ARMS = (("metadata-read", "packed-get", "glm-5.1"), ("guarded-read", "guarded", "glm-5.1-tiny"))
"""Case, arm and shape; trials take turns on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """planted: the slow-down of the second arm, in percent. tool, environment: of the records that trials make."""

    count: int
    planted: float
    seed: int
    tool: dict[str, str]
    environment: dict[str, object]

    def is_met_by(self, trials: Sequence[Trial]) -> bool:
        """Whether the gate meets its limits in these trials."""
        share = sum(trial.verdict is Overhead.SLOWER for trial in trials) / len(trials)
        return share >= LEAST_CAUGHT if self.planted else share <= MOST_FALSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the gate over an arm compared with itself."""

    case: str
    arm: str
    seed: int
    verdict: Overhead
    measurements: tuple[Measurement, ...]


def run_trials(plan: TrialPlan, command: Callable[[int, int], Sequence[str]]) -> Iterator[Trial]:
    """Run trials. If they are more than TRIALS, they run in child processes.

    command: the arguments after the interpreter's -m for a process that runs so many trials from a seed and prints them
    as JSON.
    """
    if plan.count <= TRIALS:
        for number in range(plan.count):
            yield _trial(plan, *ARMS[number % len(ARMS)], seed=(plan.seed + number) * 100)  # room for fresh seeds
        return
    for first in range(0, plan.count, TRIALS):
        yield from _in_process(command(min(TRIALS, plan.count - first), plan.seed + first), first)


def _in_process(command: Sequence[str], first: int) -> Iterator[Trial]:
    streams = Streams(stderr=subprocess.PIPE)  # this process alone reports an interruption
    child = start(*command, streams=streams)
    try:
        text, errors = child.communicate()
    finally:
        if child.poll() is None:  # interrupted
            end(child)
            child.communicate()
    if child.returncode not in (0, 4):
        raise InternalError(
            f"trials {first + 1} and on: their process ended with status {child.returncode}; it wrote: {errors.strip()}"
        )
    answer: dict[str, Any] = json.loads(text)
    yield from value_from(tuple[Trial, ...], answer["trials"], "trials")


def _trial(plan: TrialPlan, case: str, arm: str, shape: str, *, seed: int) -> Trial:
    from kvcheck.core.bench.plan import BenchPlan
    from kvcheck.core.bench.run import run_bench
    from kvcheck.core.bench.selection import beside_itself

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

    def choose(points: list[Any]) -> list[Any]:
        return beside_itself(points, arm, plan.planted)

    rows = run_bench(bench, lambda row: None, choose=choose)
    record = RunRecord(
        run_id=f"trial-{seed}",
        tool=plan.tool,
        argv=(),
        repro="",
        seed=seed,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_s=0.0,
        verdict=Verdict.PASS,
        exit_code=0,
        complete=True,
        environment={**plan.environment, "hardware": machine()},
        plan={"shape": shape},
        evidence=Evidence(),
        bench=rows,
    )
    budgets = [Budget(case=row.case, arm=row.arm, baseline=row.baseline, max_ratio=1.0) for row in rows]
    gated, problems, _ = gated_rows([record], budgets)
    if problems or len(gated) != 1:
        raise InternalError(f"expected one row of {case} to gate, got {len(gated)}: {problems}")
    build = {**plan.environment, **plan.tool}
    fresh = FreshRounds([record], seed=seed, max_time_s=MAX_TIME_S, build=build, choose=choose)
    ((row,), is_complete) = decide(gated, Rules(), fresh)
    if not is_complete:
        raise KeyboardInterrupt
    return Trial(case=case, arm=arm, seed=seed, verdict=row.verdict, measurements=row.measurements)
