"""The hicache scenarios reach what they are there for: each tier gives up each kind of companion while pages stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from rigs.settings import with_settings

from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.node import Node
from kvcheck.core.run.plan import FLOOR, Plan
from kvcheck.core.stress.runner import ScheduleRunner, evidence_gap, schedules
from kvcheck.core.stress.scenarios.hicache import HiCacheScenario
from kvcheck.core.stress.scenarios.serving import buffer_names
from kvcheck.core.stress.targets.builtin import FIXED, BuiltinTarget
from kvcheck.core.stress.workload.shapes import shape


@pytest.mark.schedules
@pytest.mark.parametrize(("name", "space"), [("gpt-oss-tiny", "window"), ("qwen3-next-tiny", "state")])
def test_both_tiers_give_up_companions_and_keep_the_pages(name: str, space: str) -> None:
    given_up: Counter[tuple[str, str]] = Counter()

    class Counting(Residency):
        def tombstone(self, node: Node, tier: str, space: str) -> None:
            given_up[tier, space] += node.tier(tier).is_live
            super().tombstone(node, tier, space)

    engine = ScheduleRunner(BuiltinTarget(replace(FIXED, residency=Counting)))
    cell = Plan(scenario="hicache-hybrid", shape=name)
    for at in range(2):
        plan = with_settings(cell, "host window share:a third", "write policy:write-through", at=at)
        assert engine.run(plan).findings == ()
    assert given_up["device", space] and given_up["host", space]


@pytest.mark.schedules
@pytest.mark.parametrize(("name", "seed"), [("gpt-oss-micro", 2), ("qwen3-next-micro", 5), ("gpt-oss-micro", 18)])
def test_three_schedules_bring_all_that_a_pass_of_a_hybrid_cell_takes(name: str, seed: int) -> None:
    """All requests that these seeds retract were once aborted, so that none was resumed."""
    cell, total = Plan(scenario="hicache-hybrid", shape=name, seed=seed), Evidence(schedules=0)
    engine = ScheduleRunner(BuiltinTarget())
    for plan in schedules(cell, FLOOR):
        outcome = engine.run(plan)
        assert outcome.findings == ()
        total = total.plus(outcome.evidence)
    assert evidence_gap(cell, total) is None and (total.resumes or 0) > 1


COUNTED = ("loads", "backups", "device_evictions", "host_evictions", "aborts", "retractions", "resumes")
WORDS = {f"{tier}{name}": 1 for name in buffer_names(shape("llama-3-tiny")) for tier in ("", "host:")}
ENOUGH = Evidence(words_verified=WORDS, **dict.fromkeys(COUNTED, 1))


@pytest.mark.parametrize("what", COUNTED)
@pytest.mark.parametrize("count", [0, None])
def test_a_cell_without_one_of_its_situations_is_not_enough(what: str, count: int | None) -> None:
    scenario, model = HiCacheScenario(), shape("llama-3-tiny")
    assert scenario.missing(ENOUGH, model) is None
    said = scenario.missing(replace(ENOUGH, **{what: count}), model)
    assert said == f"no {what.removesuffix('s').replace('_', ' ')} happened; use more requests"


@pytest.mark.parametrize("buffer", sorted(WORDS))
def test_a_cell_that_read_no_word_of_a_buffer_is_not_enough(buffer: str) -> None:
    left = {name: count for name, count in WORDS.items() if name != buffer}
    said = HiCacheScenario().missing(replace(ENOUGH, words_verified=left), shape("llama-3-tiny"))
    assert said == f"no word of {buffer} was verified"
