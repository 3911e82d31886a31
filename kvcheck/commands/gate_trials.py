"""Trials of the gate on this machine: an arm beside itself, to be let pass, or with a slow-down planted, to be caught.

A trial goes the way a run goes: a benchmark is measured, its record gated by a budget of 1, and what is not OK measured
again. Where memory lies differs from process to process and stays as it is within one, so each process does only TRIALS
of them.

Invariants:
- Exit 0 where the gate keeps what it promises (MOST_FALSE, LEAST_CAUGHT), 4 where it does not on this machine.
- A share is printed with its exact one-sided 95 % limit, on the side that is worse for the gate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvcheck.commands.fresh_rounds import PRECISION, ROUNDS_MAX, FreshRounds
from kvcheck.commands.options import check_positive, draw_seed, environment, tool
from kvcheck.commands.terminal import say
from kvcheck.core.base.child import Streams, end, start
from kvcheck.core.base.errors import InternalError, UsageError
from kvcheck.core.base.record import Evidence, RunRecord, Verdict, to_plain, value_from
from kvcheck.core.base.rounds import share_above, share_below
from kvcheck.core.report.gate.budgets import Budget
from kvcheck.core.report.gate.judge import Look, Overhead, Rules, decide
from kvcheck.core.report.gate.result import gated_rows

TRIALS = 10
MOST_PERCENT = 1000.0
MOST_FALSE = 0.01
LEAST_CAUGHT = 0.90
RECORDED_ROUNDS = 15
MAX_TIME_S = 60.0
PARTS = (("metadata-read", "packed-get", "glm-5.1"), ("guarded-read", "guarded", "glm-5.1-tiny"))
"""Case, arm and shape; trials take turns on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the gate over an arm beside itself."""

    case: str
    arm: str
    seed: int
    verdict: Overhead
    looks: tuple[Look, ...]


def try_gate(count: int | None, planted: float, *, seed: int | None, is_quiet: bool) -> int:
    """Gate `count` trials, say what the gate said, and return the exit code."""
    if count is None:
        raise UsageError("--planted: expected --aa N beside it, the number of runs to gate")
    check_positive("--aa", count)
    if not 0 <= planted <= MOST_PERCENT:
        raise UsageError(f"--planted: expected a percentage from 0 to {MOST_PERCENT:g}, got {planted}")
    drawn = draw_seed() if seed is None else seed
    if drawn < 0:
        raise UsageError(f"--seed: expected an integer of at least 0, got {drawn}")
    if not is_quiet:
        say(f"kvcheck {tool()['version']}  selftest --aa {count} --planted {planted:g} --seed {drawn}")
        say()
    done: list[Trial] = []
    is_complete = True
    try:
        for trial in _here(count, planted, drawn) if count <= TRIALS else _in_processes(count, planted, drawn):
            done.append(trial)
            if not is_quiet:
                say(f" {trial.verdict.name:<12} {len(done)} of {count}   {_told(trial)}")
    except KeyboardInterrupt:
        is_complete = False
    code = _exit_code(done, planted) if is_complete else 130
    if is_quiet:
        head = {"tool": tool(), "planted_percent": planted, "seed": drawn, "complete": is_complete, "exit_code": code}
        say(json.dumps({**head, "trials": to_plain(tuple(done))}))
    else:
        for line in _summary(done, planted):
            say(line)
        say(f" exit {code}")
    return code


def _here(count: int, planted: float, seed: int) -> Iterator[Trial]:
    """Trials in this process."""
    for number in range(count):
        yield _trial(*PARTS[number % len(PARTS)], planted=planted, seed=(seed + number) * 100)  # room for fresh seeds


def _in_processes(count: int, planted: float, seed: int) -> Iterator[Trial]:
    """The same, TRIALS to a process of its own."""
    for first in range(0, count, TRIALS):
        arguments = ["--aa", str(min(TRIALS, count - first)), "--planted", str(planted), "--seed", str(seed + first)]
        streams = Streams(stderr=subprocess.PIPE)  # an interruption is told once, here, and not by the child too
        child = start("kvcheck", "selftest", *arguments, "--format", "json", streams=streams)
        try:
            text, said = child.communicate()
        finally:
            if child.poll() is None:  # interrupted
                end(child)
                child.communicate()
        if child.returncode not in (0, 4):
            sys.stderr.write(said)
            raise InternalError(f"trials {first + 1} and on: their process ended with status {child.returncode}")
        answer: dict[str, Any] = json.loads(text)
        yield from value_from(tuple[Trial, ...], answer["trials"], "trials")


def _trial(case: str, arm: str, shape: str, *, planted: float, seed: int) -> Trial:
    from kvcheck.core.bench.noise import machine
    from kvcheck.core.bench.parts import beside_itself
    from kvcheck.core.bench.plan import BenchPlan
    from kvcheck.core.bench.run import run_bench

    plan = BenchPlan(
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
        return beside_itself(points, arm, planted)

    rows = run_bench(plan, lambda row: None, choose=choose)
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
    if problems or len(gated) != 1:
        raise InternalError(f"expected one row of {case} to gate, got {len(gated)}: {problems}")
    fresh = FreshRounds([record], seed=seed, max_time_s=MAX_TIME_S, is_quiet=True, choose=choose)
    ((row,), is_complete) = decide(gated, Rules(), fresh)
    if not is_complete:
        raise KeyboardInterrupt
    return Trial(case=case, arm=arm, seed=seed, verdict=row.verdict, looks=row.looks)


def _told(trial: Trial) -> str:
    looks = "; ".join(
        f"{look.rounds} rounds {look.measured.est:.3f} ({look.measured.lo or 0:.3f} to {look.measured.hi or 0:.3f})"
        f" floor {look.floor:.1%}"
        for look in trial.looks
    )
    return f"{trial.case} {trial.arm}   {looks}"


def _exit_code(trials: list[Trial], planted: float) -> int:
    share = sum(trial.verdict is Overhead.SLOWER for trial in trials) / len(trials)
    return 0 if (share >= LEAST_CAUGHT if planted else share <= MOST_FALSE) else 4


def _summary(trials: list[Trial], planted: float) -> list[str]:
    if not trials:
        return ["", " no trial came to its end"]
    count = len(trials)
    said = {verdict: sum(trial.verdict is verdict for trial in trials) for verdict in Overhead}
    at_first = sum(trial.looks[0].verdict is Overhead.SLOWER for trial in trials)
    again = sum(len(trial.looks) > 1 for trial in trials)
    slower = said[Overhead.SLOWER]
    if planted:
        limit = f"at least {share_below(slower, count):.1%}"
        line = f" caught        {slower} of {count} slow-downs of {planted:g} %: {slower / count:.1%}, {limit} (95 %)"
    else:
        limit = f"at most {share_above(slower, count):.1%}"
        line = f" false SLOWER  {slower} of {count}: {slower / count:.1%}, {limit} (95 %)"
    return [
        "",
        f" OK {said[Overhead.OK]}, INCONCLUSIVE {said[Overhead.INCONCLUSIVE]}, SLOWER {slower}; "
        f"SLOWER before it was confirmed {at_first}; measured again {again}",
        line,
    ]
