"""`kvcheck selftest`: every mutant is judged beside the fixed build."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands import worker
from kvcheck.commands.asked import Asked
from kvcheck.commands.options import (
    DEFAULT_OUT,
    Format,
    Out,
    Outputs,
    Reports,
    Seed,
    check_plan,
    check_positive,
    draw_seed,
)
from kvcheck.commands.targets import target_of
from kvcheck.commands.terminal import columns
from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.record import MutantResult, Verdict
from kvcheck.core.report.screen import MARK
from kvcheck.core.report.wording import folded, labelled
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.mutant_trials import MutantTask, judge_in_time, timed_mutants

if TYPE_CHECKING:
    from kvcheck.core.stress.targets.mutants.mutant import Mutant


def selftest(
    ctx: typer.Context,
    mutants: Annotated[list[str] | None, typer.Argument(help="See kvcheck list mutants. Default: all of them.")] = None,
    device: Annotated[
        str, typer.Option(help="threads, cuda or cuda:N: delay operations there until a mutant serves wrong bytes.")
    ] = "cpu",
    max_time: Annotated[float | None, typer.Option(help="Seconds after which the whole run stops.")] = None,
    schedules: Annotated[int, typer.Option(help="Schedules after which a mutant counts as survived.")] = 32,
    seed: Seed = None,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
) -> int:
    from kvcheck.core.stress.targets.mutants import MUTANTS, mutant

    asked = Asked.of(ctx)
    check_positive("--schedules", schedules)
    chosen = [mutant(name) for name in mutants or MUTANTS]
    if device != "cpu":
        chosen = timed_mutants(chosen, device, are_named=bool(mutants))
        plan_of_first = Plan(scenario=chosen[0].scenario, shape=chosen[0].shape)
        check_plan(dataclasses.replace(plan_of_first, backend=kind_of(device), device=device, strategy="delay"))
    asked.check_places()
    drawn = draw_seed() if seed is None else seed
    plan = {"schedules": schedules, "mutants": [each.name for each in chosen], "device": device}
    session = asked.session(drawn=drawn, plan=plan)
    session.say(f"kvcheck {session.version}  selftest  seed {drawn}  run {session.run_id}")
    for line in folded(HEADS, WIDTHS, margin=1, gap=1):
        session.say(line)
    interrupted = False
    first = MutantTask(schedules=schedules, device=device, until=asked.until, max_time_s=max_time or 0.0)
    tasks = [dataclasses.replace(first, mutant=each.name, line=_line(each, drawn)) for each in chosen]
    results = _results(tasks, is_apart=kind_of(device) == "cuda")
    try:
        for task in tasks:
            session.progress(f"{task.mutant}: fixed build first")
            result = next(results)
            session.mutants.append(result)
            session.save(complete=False)
            for line in _row(result):
                session.say(line)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        results.close()
    return asked.close(session, interrupted=interrupted)


def _line(mutant: Mutant, seed: int) -> str:
    plan = Plan(scenario=mutant.scenario, shape=mutant.shape, decoder=mutant.decoder, strategy=mutant.strategy)
    return dataclasses.replace(plan, seed=seed).line()


def _results(tasks: list[MutantTask], *, is_apart: bool) -> Generator[MutantResult, None, None]:
    """is_apart: in processes of their own, which may lose their device."""
    if is_apart:
        from kvcheck.core.stress.mutant_trials import judge_apart

        yield from judge_apart(tasks, worker.__name__)
        return
    from kvcheck.core.stress.runner import Workloads

    workloads = Workloads()
    for task in tasks:
        yield judge_in_time(task, target_of, workloads=workloads)


HEADS = ("", "mutant", "outcome", "found by", "in schedule")
WIDTHS = (1, 31, 13, 17, 11)


def _row(result: MutantResult) -> list[str]:
    found = (MARK[result.verdict], result.name, result.outcome, result.killed_by or "-", f"{result.schedules}")
    return [
        *folded(found, WIDTHS, margin=1, gap=1),
        *(labelled("", result.message, columns()) if result.message and result.verdict is not Verdict.PASS else []),
    ]
