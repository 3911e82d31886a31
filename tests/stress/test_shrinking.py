"""A shrunk schedule is smaller, it fails as the given one does, and its line says so by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import ANSWERS, Plan, parse_line
from kvcheck.core.run.turns import parse_answers
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.shrinking import check_shrinkable, shrink
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant, mutant_target
from kvcheck.core.stress.workload.shapes import shape

MOST_CHARACTERS, MOST_REQUESTS, MOST_PAGES, MOST_LAYERS = 300, 2, 2, 2
BUGS = {
    "metadata-get-returns-views": 0,
    "backup-before-forward": 7,
    "align-trims-one-side": 3,
    "node-keeps-queue-view": 0,
    "rank-decides-alone": 0,
}
"""A mutant of each bug, a to e: the number of a schedule from which on it is shown on the shape of its card."""


def failing(name: str, schedule: int) -> Plan:
    """The line of the mutant's first schedule from this one on that shows its code."""
    card = mutant(name)
    runner = ScheduleRunner(mutant_target(name))
    for number in range(schedule, schedule + 16):
        plan = Plan(scenario=card.scenario, shape=card.shape, mutant=name, seed=1, schedule=number)
        found = [each for each in runner.run(plan).findings if each.code == card.code and each.condition is None]
        if found:
            return parse_line(str(found[0].schedule))
    raise AssertionError(f"{name} was not shown")


@pytest.mark.schedules
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_shrinks_to_a_short_line_that_fails_alike(name: str) -> None:
    plan, told = failing(name, BUGS[name]), []
    shrunk = shrink(ScheduleRunner(mutant_target(name)), plan, runs=200, tell=told.append)
    assert shrunk is not None
    small = parse_line(shrunk.line)
    assert small.shape.endswith("-micro") and small.strategy == ANSWERS and small.expect == mutant(name).code
    assert len(shrunk.line) <= MOST_CHARACTERS
    assert shrunk.requests[1] <= MOST_REQUESTS < shrunk.requests[0]
    assert shrunk.pages[1] <= MOST_PAGES < shrunk.pages[0]
    assert len(shape(small.shape).full_layers) <= MOST_LAYERS
    assert told and told[-1] == small, "what was told last is what is returned"
    again = ScheduleRunner(mutant_target(name)).run(small)
    assert again.divergence is None
    same = [
        each for each in again.findings if (each.code, each.oracle) == (shrunk.finding.code, mutant(name).killed_by)
    ]
    assert same and shrunk.finding.oracle == mutant(name).killed_by


@pytest.mark.schedules
def test_answers_that_are_not_needed_are_left_out() -> None:
    name = "backup-before-forward"
    plan = Plan(
        scenario="hicache", shape="llama-3-micro", mutant=name, seed=1, schedule=28, requests=2, strategy=ANSWERS
    )
    runner = ScheduleRunner(mutant_target(name))
    asked = runner.run(replace(plan, choices="none")).asked
    then = runner.run(replace(plan, choices=asked[0])).asked
    many = replace(plan, choices=f"{asked[0]}.{then[1]}")
    outcome = runner.run(many)
    assert len(outcome.refused) == 2 and outcome.divergence is None
    assert any(each.code == mutant(name).code for each in outcome.findings)
    shrunk = shrink(runner, many, runs=100, tell=lambda smaller: None)
    assert shrunk is not None and shrunk.refused == () == parse_answers(str(shrunk.last.plan.choices))


@pytest.mark.schedules
def test_what_does_not_fail_is_not_shrunk() -> None:
    name = "offload-skips-index-buffer"
    plan = Plan(scenario="retract-resume", shape="glm-5.1-micro", seed=1, strategy=ANSWERS, requests=2)
    ran: list[Outcome] = []

    class Counting(ScheduleRunner):
        """Keeps what it ran."""

        def run(self, plan: Plan, **rest: object) -> Outcome:  # type: ignore[override]
            ran.append(super().run(plan))
            return ran[-1]

    assert shrink(Counting(BuiltinTarget()), plan, runs=50, tell=lambda smaller: None) is None
    assert len(ran) == 1, "a plan that passes is run once"
    wanted = replace(plan, mutant=name, expect="KV901")
    assert shrink(Counting(mutant_target(name)), wanted, runs=50, tell=lambda smaller: None) is None, "another code"


@pytest.mark.schedules
def test_no_more_schedules_run_than_were_allowed() -> None:
    plan = failing("backup-before-forward", 7)
    for runs in (1, 3):
        shrunk = shrink(ScheduleRunner(mutant_target(str(plan.mutant))), plan, runs=runs, tell=lambda smaller: None)
        assert shrunk is not None and shrunk.runs == runs
    one = shrink(ScheduleRunner(mutant_target(str(plan.mutant))), plan, runs=1, tell=lambda smaller: None)
    assert one is not None and one.last is one.first


@pytest.mark.parametrize("kind", ["trace=sample", "transport=tcp,backend=eager,ranks=1x1", "backend=cuda,device=cuda"])
def test_lines_of_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="one process on a CPU"):
        check_shrinkable(parse_line(f"pd-transfer:shape=llama-3-tiny,{kind}"))
