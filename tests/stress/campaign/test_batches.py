"""Batches of a campaign: each workload in one batch and one shard, and what a batch says."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from kvcheck.commands.targets import target_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.run.plan import ANSWERS, Plan
from kvcheck.core.stress.campaign.batches import (
    Batch,
    BatchResult,
    CampaignPlan,
    Seeds,
    Shard,
    parse_result,
    parse_seeds,
    parse_shard,
    run_batch,
    run_text,
)

BASE = Plan(scenario="retract-resume", shape="llama-3-micro", strategy=ANSWERS, requests=2, seed=5)
CELLS = (BASE, dataclasses.replace(BASE, scenario="hicache"), dataclasses.replace(BASE, shape="glm-5.1-micro"))


def plan_of(shard: Shard, *, workloads: int | None = 3, cells: tuple[Plan, ...] = CELLS) -> CampaignPlan:
    return CampaignPlan(cells=cells, seeds=Seeds(5, 9), workloads=workloads, within=1, shard=shard)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("workloads", [1, 3, None])
def test_shards_share_the_batches_out(count: int, workloads: int | None) -> None:
    whole = [*plan_of(Shard(), workloads=workloads).batches()]
    plans = [plan_of(Shard(number, count), workloads=workloads) for number in range(1, count + 1)]
    shares = [[*plan.batches()] for plan in plans]
    together = sorted(itertools.chain.from_iterable(shares), key=lambda batch: batch.at)
    assert together == whole, "each batch is in one shard, at the place that it has in the whole"
    assert len({batch.line for batch in whole}) == len({batch.at for batch in whole}) == len(whole)
    for plan, share in zip(plans, shares, strict=True):
        told = [plan.share_of(place) for place in range(len(CELLS))]
        assert told == [sum(batch.plan.cell == cell.cell for batch in share) for cell in CELLS]


def test_each_shard_has_all_cells_and_an_early_stop_has_touched_each() -> None:
    for number in (1, 2, 3):
        assert {batch.plan.cell for batch in plan_of(Shard(number, 3)).batches()} == {cell.cell for cell in CELLS}
    first = [batch.plan for batch in itertools.islice(plan_of(Shard()).batches(), len(CELLS))]
    assert {plan.cell for plan in first} == {cell.cell for cell in CELLS}
    assert {(plan.seed, plan.schedule) for plan in first} == {(5, 0)}


def test_a_plan_knows_its_batches() -> None:
    plan = plan_of(Shard(2, 3))
    results = [
        BatchResult(at=batch.at, line=batch.line, within=1, code="")
        for batch in plan_of(Shard()).batches()
        if plan.shard.has(batch.at)
    ]
    mine = {batch.line for batch in plan.batches()}
    own = [dataclasses.replace(each) for each in results if each.line in mine]
    assert own and all(map(plan.has, own))
    other = next(batch for batch in plan_of(Shard()).batches() if batch.line not in mine)
    assert not plan.has(BatchResult(at=other.at, line=other.line, within=1, code=""))
    one = own[0]
    for wrong in (
        dataclasses.replace(one, at=one.at + 1),
        dataclasses.replace(one, within=2),
        dataclasses.replace(one, line=dataclasses.replace(one.plan, requests=3).line()),
        dataclasses.replace(one, line=dataclasses.replace(one.plan, seed=99).line()),
        dataclasses.replace(one, line=dataclasses.replace(one.plan, shape="gpt-oss-micro").line()),
    ):
        assert not plan.has(wrong)


@pytest.mark.schedules
def test_a_batch_says_the_same_twice_and_as_text() -> None:
    batch = Batch(at=7, plan=BASE, within=1)
    first = run_batch(batch, until=None, target_of=target_of)
    second = parse_result(run_text(batch.text(), target_of))
    assert first is not None
    assert dataclasses.replace(first, cpu_s=0, duration_s=0) == dataclasses.replace(second, cpu_s=0, duration_s=0)
    assert first.is_whole and first.reason is None and first.evidence.traces == first.evidence.schedules > 3
    assert first.cpu_s > 0 and first.plan == BASE


@pytest.mark.schedules
def test_what_the_time_cut_has_no_result() -> None:
    batch = Batch(at=0, plan=dataclasses.replace(BASE, requests=None), within=1)
    assert run_batch(batch, until=0.0, target_of=target_of) is None
    assert run_text(batch.text(left_s=0.0), target_of) == ""


@pytest.mark.schedules
def test_a_batch_goes_on_after_a_finding_and_reports_it_once() -> None:
    plan = dataclasses.replace(BASE, shape="glm-5.1-micro", mutant="offload-skips-index-buffer", requests=3)
    found = run_batch(Batch(at=0, plan=plan, within=1), until=None, target_of=target_of)
    clean = run_batch(
        Batch(at=0, plan=dataclasses.replace(plan, mutant=None), within=1), until=None, target_of=target_of
    )
    assert clean is not None and clean.is_whole and not clean.findings
    assert found is not None and found.is_whole
    assert len({finding.schedule for finding in found.findings if finding.code == "KV304"}) == 1
    assert found.evidence.schedules > 1, "another schedule than the first failing one ran"


@pytest.mark.parametrize("text", ["", "0-", "9-5", "x", "-1", "1-10000000", "1.5", "01-2", "1-2-3", "٣"])
def test_bad_seeds_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--seeds: expected"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "1/99999", "a/b", "1/2/3"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard: expected"):
        parse_shard(text)


def test_seeds_and_shards_are_read() -> None:
    assert parse_seeds("3") == Seeds(1, 3) and parse_seeds("101-200") == Seeds(101, 200)
    assert parse_shard("2/4") == Shard(2, 4) and str(parse_shard("2/4")) == "2/4"
