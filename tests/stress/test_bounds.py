"""Bounds of a plan: requests hold as few pages as the line says, and faults that it leaves out do not happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvcheck.core.base.cells import PROCESS_TRANSPORTS
from kvcheck.core.base.errors import UsageError
from kvcheck.core.run.plan import ANSWERS, NO_EXTRAS, Plan, parse_line
from kvcheck.core.stress.plan_scenario import check_bounds, faults_of, faults_text, pages_of
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.scenario import ABORTS, STORE
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.workload.events import Aborted, Damaged, Faulted
from kvcheck.core.stress.workload.shapes import MICRO_SHAPES, shape

CELLS = [
    (scenario, name)
    for scenario in SCENARIOS.names()
    for name in MICRO_SHAPES
    if shape(name).family in SCENARIOS.load(scenario).families
]
SMALL = Plan(scenario="hicache", shape="llama-3-micro", strategy=ANSWERS, extras=NO_EXTRAS)


@pytest.mark.schedules
@pytest.mark.parametrize(("scenario", "name"), CELLS, ids=lambda value: str(value))
def test_the_fixed_build_has_no_finding_under_bounds(scenario: str, name: str) -> None:
    runner = ScheduleRunner(BuiltinTarget())
    for number, (requests, pages, faults) in enumerate([(1, 1, None), (2, 2, None), (4, 2, "none"), (3, 3, ABORTS)]):
        plan = replace(
            SMALL, scenario=scenario, shape=name, schedule=number, requests=requests, pages=pages, faults=faults
        )
        assert [each for each in runner.run(plan).findings if each.condition is None] == []
        load, _ = runner.workloads.of(plan)
        assert pages_of(load, shape(name)) <= pages
        assert load.capacity_tokens <= (pages + 1) * shape(name).page_size


@pytest.mark.schedules
@pytest.mark.parametrize("scenario", ["hicache", "pd-transfer", "retract-resume"])
def test_faults_that_are_left_out_do_not_happen(scenario: str) -> None:
    def counted(faults: str | None) -> Counter[type]:
        counts, runner = Counter[type](), ScheduleRunner(BuiltinTarget())
        noted = [(kind, lambda event: counts.update([type(event)])) for kind in (Aborted, Damaged, Faulted)]
        for number in range(1, 4):
            runner.run(replace(SMALL, scenario=scenario, schedule=number, faults=faults), handlers=noted)
        return counts

    assert counted(None)[Aborted] > 0
    assert not counted("none")
    if scenario == "pd-transfer":
        assert counted("transfers")[Faulted] > 0 and counted("aborts")[Faulted] == 0
    if scenario == "hicache":
        stored = counted(STORE)
        assert stored[Damaged] > 0 == stored[Aborted]


def test_bounds_stand_in_the_line() -> None:
    plan = replace(SMALL, pages=2, faults="acts.store")
    assert parse_line(plan.line()) == plan and "pages=2,faults=acts.store" in plan.line()
    assert "pages" not in SMALL.line() and "faults" not in SMALL.line()
    assert faults_text(faults_of("store.acts")) == "acts.store" and faults_of("none") == frozenset()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (replace(SMALL, pages=0), "pages: expected 1 to"),
        (replace(SMALL, faults="rain"), "faults: expected some of acts"),
        (replace(SMALL, faults="acts.acts"), "faults: expected some of acts"),
        (replace(SMALL, pages=2, trace="sample"), "pages: expected a line of one process"),
        (replace(SMALL, faults="none", backend="cuda", device="cuda"), "faults: expected a line of one process"),
        (replace(SMALL, pages=2, transport=PROCESS_TRANSPORTS[0]), "pages: expected a line of one process"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bounds_that_mean_nothing_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_bounds(plan)
