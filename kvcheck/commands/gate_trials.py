"""`kvcheck selftest --aa N`: trials of the gate are printed as they end, then counted.

Invariants:
- Exit 0 if the gate meets its limits (MOST_FALSE, LEAST_CAUGHT), 4 if it does not on this machine, 130 if interrupted.
- A share is printed with its exact one-sided 95 % limit, on the side that is worse for the gate.
"""

from __future__ import annotations

import json

from kvcheck.commands.options import check_positive, draw_seed, environment, tool
from kvcheck.commands.terminal import say
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import to_plain
from kvcheck.core.base.rounds import share_above, share_below
from kvcheck.core.bench.gate_trials import Trial, TrialPlan, run_trials
from kvcheck.core.report.gate.judge import Overhead

MOST_PERCENT = 1000.0


def try_gate(count: int | None, planted: float, *, seed: int | None, is_quiet: bool) -> int:
    """Run `count` trials, print the gate's verdicts, and return the exit code."""
    plan = _plan(count, planted, seed)
    if not is_quiet:
        say(f"kvcheck {plan.tool['version']}  selftest --aa {plan.count} --planted {planted:g} --seed {plan.seed}")
        say()

    def command(count: int, seed: int) -> tuple[str, ...]:
        options = ("--aa", str(count), "--planted", str(planted), "--seed", str(seed), "--format", "json")
        return ("kvcheck", "selftest", *options)

    done: list[Trial] = []
    is_complete = True
    try:
        for trial in run_trials(plan, command):
            done.append(trial)
            if not is_quiet:
                say(f" {trial.verdict.name:<12} {len(done)} of {plan.count}   {_trial_text(trial)}")
    except KeyboardInterrupt:
        is_complete = False
    code = 130 if not is_complete else 0 if plan.is_met_by(done) else 4
    if is_quiet:
        head = {"tool": plan.tool, "planted_percent": planted, "seed": plan.seed}
        say(json.dumps({**head, "complete": is_complete, "exit_code": code, "trials": to_plain(tuple(done))}))
    else:
        for line in _summary(done, planted):
            say(line)
        say(f" exit {code}")
    return code


def _plan(count: int | None, planted: float, seed: int | None) -> TrialPlan:
    """What the options ask for. Raises UsageError for what cannot be done."""
    if count is None:
        raise UsageError("--planted: expected --aa N beside it, the number of runs to gate")
    check_positive("--aa", count)
    if not 0 <= planted <= MOST_PERCENT:
        raise UsageError(f"--planted: expected a percentage from 0 to {MOST_PERCENT:g}, got {planted}")
    drawn = draw_seed() if seed is None else seed
    if drawn < 0:
        raise UsageError(f"--seed: expected an integer of at least 0, got {drawn}")
    return TrialPlan(count=count, planted=planted, seed=drawn, tool=tool(), environment=environment())


def _trial_text(trial: Trial) -> str:
    measurements = "; ".join(
        f"{each.rounds} rounds {each.measured.est:.3f} ({each.measured.lo or 0:.3f} to {each.measured.hi or 0:.3f})"
        f" floor {each.floor:.1%}"
        for each in trial.measurements
    )
    return f"{trial.case} {trial.arm}   {measurements}"


def _summary(trials: list[Trial], planted: float) -> list[str]:
    if not trials:
        return ["", " no trial came to its end"]
    count = len(trials)
    counts = {verdict: sum(trial.verdict is verdict for trial in trials) for verdict in Overhead}
    at_first = sum(trial.measurements[0].verdict is Overhead.SLOWER for trial in trials)
    again = sum(len(trial.measurements) > 1 for trial in trials)
    slower = counts[Overhead.SLOWER]
    if planted:
        limit = f"at least {share_below(slower, count):.1%}"
        line = f" caught        {slower} of {count} slow-downs of {planted:g} %: {slower / count:.1%}, {limit} (95 %)"
    else:
        limit = f"at most {share_above(slower, count):.1%}"
        line = f" false SLOWER  {slower} of {count}: {slower / count:.1%}, {limit} (95 %)"
    return [
        "",
        f" OK {counts[Overhead.OK]}, INCONCLUSIVE {counts[Overhead.INCONCLUSIVE]}, SLOWER {slower}; "
        f"SLOWER before it was confirmed {at_first}; measured again {again}",
        line,
    ]
