"""Batches of a run of many seeds: which there are, and what one gives."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvcheck.commands.targets import target_of
from kvcheck.core.run.plan import ANSWERS, Plan, parse_line
from kvcheck.core.stress.seeds.batches import BatchResult, BatchTask, SeedsPlan, answered, result_of, run_batch

BASE = Plan(scenario="retract-resume", shape="llama-3-micro", strategy=ANSWERS, requests=2, seed=5)
CELLS = (BASE, dataclasses.replace(BASE, scenario="hicache"), dataclasses.replace(BASE, shape="glm-5.1-micro"))
PLAN = SeedsPlan(cells=CELLS, seeds=range(5, 10, 2), schedules=3, within=1)


def result(line: str, **values: Any) -> BatchResult:
    return BatchResult(line=line, code="", **values)


@pytest.mark.parametrize(("schedules", "within", "batches"), [(3, 1, 27), (24, None, 9), (1, 0, 9)])
def test_each_seed_of_each_cell_has_its_batches(schedules: int, within: int | None, batches: int) -> None:
    plan = dataclasses.replace(PLAN, schedules=schedules, within=within)
    tasks = [*plan.tasks()]
    assert len({task.line for task in tasks}) == len(tasks) == batches
    assert {parse_line(task.line).seed for task in tasks} == {5, 7, 9}
    assert {(task.schedules, task.within) for task in tasks} == {(24 if within is None else 1, within)}
    done = [task.line for task in tasks[::2]]
    assert [task.line for task in plan.tasks(done)] == [task.line for task in tasks[1::2]]


def test_a_workload_of_each_variant_is_the_default_and_an_early_stop_has_run_each_cell() -> None:
    plan = dataclasses.replace(PLAN, schedules=None)
    assert [plan.batches_of(cell) for cell in CELLS] == [8, 22, 8]
    first = [parse_line(task.line) for task in itertools.islice(plan.tasks(), len(CELLS))]
    assert {each.cell for each in first} == {cell.cell for cell in CELLS}
    assert {(each.seed, each.schedule) for each in first} == {(5, 0)}


def test_a_plan_knows_its_batches() -> None:
    own = [parse_line(task.line) for task in PLAN.tasks()]
    assert all(map(PLAN.has, own))
    others: Mapping[str, Any] = {"requests": 3, "seed": 6, "schedule": 3, "shape": "gpt-oss-micro", "strategy": "eager"}
    for name, value in others.items():
        assert not PLAN.has(dataclasses.replace(own[0], **{name: value}))


@pytest.mark.schedules
def test_a_batch_gives_the_same_twice_and_as_text() -> None:
    task, begun = BatchTask(line=BASE.line(), within=1), list[str]()
    first = run_batch(task, target_of)
    second = result_of(answered(json.dumps(dataclasses.asdict(task)), target_of, begun.append))
    assert first is not None and second is not None
    assert dataclasses.replace(first, cpu_s=0, duration_s=0) == dataclasses.replace(second, cpu_s=0, duration_s=0)
    assert first.is_whole and first.reason is None and first.evidence.traces == first.evidence.schedules > 3
    assert len(begun) == first.evidence.schedules and json.loads(begun[0]).keys() == {"told"}


@pytest.mark.schedules
def test_a_batch_that_the_time_cut_has_no_result() -> None:
    task = BatchTask(line=dataclasses.replace(BASE, requests=None).line(), schedules=24, left_s=0.0)
    assert run_batch(task, target_of) is None
    assert run_batch(dataclasses.replace(task, within=1), target_of) is None
    assert result_of(answered(json.dumps(dataclasses.asdict(task)), target_of)) is None


@pytest.mark.schedules
def test_a_finding_ends_its_batch() -> None:
    plan = dataclasses.replace(
        BASE, shape="glm-5.1-micro", mutant="offload-skips-index-buffer", requests=3, strategy="portfolio"
    )
    found = run_batch(BatchTask(line=plan.line(), schedules=24), target_of)
    clean = run_batch(BatchTask(line=dataclasses.replace(plan, mutant=None).line(), schedules=4), target_of)
    assert clean is not None and clean.is_whole and not clean.findings and clean.evidence.schedules == 4
    assert found is not None and not found.is_whole and found.evidence.schedules < 24
    assert len({finding.schedule for finding in found.findings}) == 1
    assert "KV304" in {finding.code for finding in found.findings}
