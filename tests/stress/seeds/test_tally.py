"""The tally of batches: rows and findings do not depend on the order in which batches end."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from kvcheck.core.base.record import Evidence, Finding, Verdict
from kvcheck.core.run.plan import ANSWERS, Plan
from kvcheck.core.stress.seeds.batches import BatchResult, SeedsPlan
from kvcheck.core.stress.seeds.tally import Tally

CELL = Plan(scenario="retract-resume", shape="llama-3-micro", requests=3)
OTHER = dataclasses.replace(CELL, shape="glm-5.1-micro")
PLAN = SeedsPlan(cells=(CELL, OTHER), seeds=range(1, 4), schedules=2)
WORDS = dict.fromkeys(("k", "v", "latent", "index_k_with_scale", "metadata"), 8)
ENOUGH = Evidence(
    schedules=2, traces=2, requests=6, retractions=2, resumes=2, foreign_reuses=1, transfers=3, words_verified=WORDS
)


def finding(seed: int, code: str, buffer: str, number: int = 1, cause: int | None = None) -> Finding:
    return Finding(
        id=f"{number}",
        cause=None if cause is None else f"{cause}",
        code=code,
        oracle="contract",
        scenario=CELL.scenario,
        shape=CELL.shape,
        buffer=buffer,
        message=f"seed {seed}",
        schedule=dataclasses.replace(CELL, seed=seed).line(),
    )


def batch(cell: Plan, seed: int, *findings: Finding, reason: str | None = None, whole: bool = True) -> BatchResult:
    return BatchResult(
        line=dataclasses.replace(cell, seed=seed, schedule=0).line(),
        code="",
        evidence=ENOUGH,
        findings=findings,
        is_whole=whole and not findings,
        reason=reason,
    )


def test_a_finding_is_reported_once_a_cell_with_its_first_batch_and_its_symptoms() -> None:
    third = batch(CELL, 3, finding(3, "KV304", "k"), finding(3, "KV102", "v", 2, 1), finding(3, "KV401", "v", 3))
    second = batch(CELL, 2, finding(2, "KV304", "k"), finding(2, "KV102", "k", 2, 1))
    found = [second, third, batch(CELL, 1), batch(OTHER, 1)]
    for order in itertools.permutations(found):
        tally = Tally(PLAN)
        new = [tally.add(each) for each in order]
        reported = [(each.message, each.code) for of_batch in tally.findings() for each in of_batch]
        assert reported == [("seed 2", "KV304"), ("seed 2", "KV102"), ("seed 3", "KV401")]
        assert any(new) and not new[[*order].index(found[2])]
        assert [row.verdict for row in tally.rows()] == [Verdict.FAIL, Verdict.UNKNOWN], (
            "the other cell has two schedules"
        )


def test_rows_follow_from_the_set_of_results() -> None:
    found = [batch(cell, seed) for cell in PLAN.cells for seed in PLAN.seeds]
    whole = Tally(PLAN, found).rows()
    random.Random(1).shuffle(found)
    assert Tally(PLAN, found).rows() == whole
    for row in whole:
        assert row.verdict is Verdict.PASS and row.schedules == 6 and row.coverage is not None
        assert (row.coverage.wanted, row.coverage.floor) == (6, 3)
        assert {"eager", "lazy"} <= {*row.coverage.tried} and not {*row.coverage.tried} & {*row.coverage.not_tried}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([batch(CELL, 1)], "2 of 6 schedules ran, and a pass takes 3: use a larger --max-time, --schedules or --seeds"),
        ([batch(CELL, 1), batch(CELL, 2, reason="an oracle broke: x")], "an oracle broke: x"),
        (
            [dataclasses.replace(batch(CELL, at), evidence=Evidence(schedules=2)) for at in (1, 2)],
            "0 retractions and 0 resumes",
        ),
        ([batch(CELL, 1), batch(CELL, 2)], "a shard is missing"),
    ],
)
def test_too_little_is_unknown_with_the_reason(found: list[BatchResult], says: str) -> None:
    row, _ = Tally(PLAN, found).rows(missing="a shard is missing")
    assert (row.verdict, row.code) == (Verdict.UNKNOWN, "KV990")
    assert says in (row.reason or "")
    assert row.coverage is not None and any(each.endswith(" of 3 seeds") for each in row.coverage.not_tried)


def test_an_explored_cell_needs_a_whole_workload_and_has_a_scope() -> None:
    cell = dataclasses.replace(CELL, strategy=ANSWERS)
    plan = SeedsPlan(cells=(cell,), seeds=range(1, 3), schedules=1, within=1)
    (row,) = Tally(plan, [batch(cell, seed, whole=False) for seed in (1, 2)]).rows()
    assert "no workload was run whole" in (row.reason or "") and row.coverage is not None
    assert row.coverage.scope is None and "the rest of 2 workloads that ended early" in row.coverage.not_tried
    (row,) = Tally(plan, [batch(cell, 1), batch(cell, 2, whole=False)]).rows()
    assert row.verdict is Verdict.PASS and row.coverage is not None
    assert row.coverage.scope == "every schedule within 1 answer of the eager order, of 1 workload"
