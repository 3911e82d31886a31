"""What is legal is left in peace: variations that keep every contract give no finding, on any tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from rigs.variations import TAKEN, VARIATIONS, EarlyBackupCache, ScrubbingPool, Variation, VariedTarget

from kvcheck.core.cache.backend.backend import Lane, Signal
from kvcheck.core.cache.hicache.cache import Lease
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.hicache.node import Transfer
from kvcheck.core.cache.pools.attention import AttentionInputs
from kvcheck.core.cache.pools.pool import Given, Holding
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED, TargetParts

SHAPES = (("hicache", "llama-3-tiny"), ("hicache-hybrid", "gpt-oss-tiny"), ("hicache-hybrid", "qwen3-next-tiny"))
REQUESTS = 24
MORE = {"unmerged": 34}
"""Requests of a variation that fewer hardly show: several loads have to be queued at once."""
NOT_FOR = {("early-backup", "qwen3-next-tiny"): "prompts of recurrent models are cached at page ends alone"}


TARGET = VariedTarget()
ENGINES = {shape: ScheduleRunner(TARGET) for _, shape in SHAPES}
"""One a shape: variations share its workload and reference run."""


def outcomes(name: str, variation: Variation) -> Iterable[Outcome]:
    """All schedules on the first shape, the second of them on one of the others."""
    TARGET.variation = variation
    other = 1 + len(name) % 2
    numbers = [variation.schedules if at == 0 else variation.schedules[1:2] * (at == other) for at in range(3)]
    requests = MORE.get(name, REQUESTS)
    for at, (scenario, shape) in enumerate(SHAPES):
        for schedule in numbers[at]:
            if (name, shape) not in NOT_FOR:
                TAKEN.clear()
                plan = Plan(scenario=scenario, shape=shape, seed=11, schedule=schedule, requests=requests)
                yield ENGINES[shape].run(plan)


@pytest.mark.schedules
@pytest.mark.parametrize("name", VARIATIONS)
def test_a_legal_variation_gives_no_finding(name: str) -> None:
    taken = loads = 0
    for outcome in outcomes(name, VARIATIONS[name]):
        assert [(found.code, found.oracle, found.message) for found in outcome.findings] == [], outcome.plan.line()
        assert not outcome.broken_oracles
        taken += TAKEN[name]
        loads += outcome.evidence.loads or 0
        assert (outcome.evidence.orderings_checked or 0) > 500
    assert taken and loads, "the variation has to take place, beside loads"


class OtherPicks(AttentionInputs):
    """Legal: one position more than asked for, in the order of the request."""

    def picked(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        return super().picked(scores, count + 1).sort(-1).values


@pytest.mark.schedules
def test_what_an_indexer_picks_beside_the_right_row_does_not_matter() -> None:
    runner = ScheduleRunner(BuiltinTarget(replace(FIXED, attention=OtherPicks)))
    for schedule in range(2):
        plan = Plan(
            scenario="retract-resume", shape="deepseek-v3.2-answers", decoder="known-answer", seed=1, schedule=schedule
        )
        outcome = runner.run(plan)
        assert (outcome.findings, outcome.judged["output"] > 0) == ((), True)


class NobodyWaits(LayerGate):
    """Not legal: reads wait for nothing."""

    def wait(self, layer: int, lane: Lane) -> None:
        pass


class EarlyBackupKeepsNothing(EarlyBackupCache):
    """Not legal: the page is given away while it is read."""

    def _join(self, lease: Lease) -> None:
        pass


class OtherLaneScrub(ScrubbingPool):
    """Not legal: pages are cleared on a lane that nobody who gets them waits for."""

    def close(self, holding: Holding, *, given: Given | None = None) -> None:
        forward, self.forward = self.forward, self.backend.lane("scrub")
        super().close(holding, given=given)
        self.forward = forward


class AckedByNobody(TransferController):
    """Not legal: a transfer counts as through when it has started."""

    def _acknowledged_by(self, transfer: Transfer) -> tuple[Signal, ...]:
        return ()


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("parts", "code"),
    [
        (replace(FIXED, gate=NobodyWaits), "KV201"),
        (replace(FIXED, cache=EarlyBackupKeepsNothing), "KV202"),
        (replace(FIXED, pool=OtherLaneScrub), "KV202"),
        (replace(FIXED, controller=AckedByNobody), "KV201"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_same_harness_finds_a_variation_that_drops_an_edge(parts: TargetParts, code: str) -> None:
    found = (each for outcome in outcomes("", Variation(parts=parts)) for each in outcome.findings)
    assert any((each.code, each.oracle) == (code, "ordering") for each in found)
