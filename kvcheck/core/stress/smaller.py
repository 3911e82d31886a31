"""Smaller: the smallest line found for each of a run's first causes, and the wait that removes its failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvcheck.core.base.causes import bugs
from kvcheck.core.base.deadline import TimeUp, time_limit
from kvcheck.core.base.errors import UnknownVerdict, UsageError, machine_trouble
from kvcheck.core.base.record import Finding
from kvcheck.core.run.plan import ANSWERS, Plan, parse_line
from kvcheck.core.run.turns import DIED
from kvcheck.core.stress.plan_scenario import pages_of
from kvcheck.core.stress.runner import ScheduleRunner, TargetOf
from kvcheck.core.stress.shrinking import check_shrinkable, shrink
from kvcheck.core.stress.wait_search import search_waits
from kvcheck.core.stress.workload.shapes import shape as shape_named

MOST_CAUSES = 3
RUNS = 150
EXPLORED = 20

Facts = dict[str, object]
"""Facts of a smaller schedule: "line", "requests", "pages" and, once it was searched for, "wait"."""


def smaller(
    findings: Sequence[Finding],
    target_of: TargetOf,
    *,
    until: float | None = None,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[tuple[str, Facts]]:
    """The facts of the first causes, by id; a cause may come a second time, with its wait.

    until: the time.monotonic() after which no schedule is run. told: called before each cause, with how many are done.
    """
    causes = _first_causes(findings)
    for done, (cause, plan) in enumerate(causes):
        told(done, len(causes))
        kept: list[Plan] = []
        try:
            runner = ScheduleRunner(target_of(plan))
            with time_limit(until):
                shrunk = shrink(runner, plan, runs=RUNS, tell=kept.append)
            if shrunk is None or not kept:
                continue
            yield cause.id, (facts := _facts(runner, kept[-1]))
            if kept[-1].strategy == ANSWERS:
                with time_limit(until):
                    waits = search_waits(runner, kept[-1], shrunk.finding, most=EXPLORED)
                yield cause.id, {**facts, "wait": waits.text()}
        except TimeUp:
            if kept:
                yield cause.id, _facts(runner, kept[-1])
            return
        except (UnknownVerdict, UsageError, OSError, MemoryError, RuntimeError, ImportError) as error:
            if not isinstance(error, UnknownVerdict | UsageError) and machine_trouble(error) is None:
                raise


def with_smaller(findings: Sequence[Finding], found: Mapping[str, Facts]) -> list[Finding]:
    return [
        dataclasses.replace(each, minimal={**(each.minimal or {}), **found[each.id]}) if each.id in found else each
        for each in findings
    ]


def _first_causes(findings: Sequence[Finding]) -> list[tuple[Finding, Plan]]:
    first: dict[tuple[str, str], tuple[Finding, Plan]] = {}
    for bug in bugs(findings):
        cause = bug.cause
        is_left = cause.condition is not None or not cause.schedule or DIED in (cause.minimal or {})
        if is_left or (cause.code, cause.cell) in first:
            continue
        try:
            plan = parse_line(cause.schedule)
            check_shrinkable(plan)
        except UsageError:
            continue
        first[cause.code, cause.cell] = cause, plan
    return list(first.values())[:MOST_CAUSES]


def _facts(runner: ScheduleRunner, plan: Plan) -> Facts:
    load, _ = runner.workloads.of(plan)
    return {"line": plan.line(), "requests": len(load.jobs), "pages": pages_of(load, shape_named(plan.shape))}
