"""The hicache scenarios reach what they are there for: each tier gives up each kind of companion while pages stay.

Invariants:
- What happened is counted by a part of the engine that does all that the fixed one does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.node import Node
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.schedule import Plan
from kvcheck.core.targets.builtin import FIXED, BuiltinTarget


@pytest.mark.schedules
@pytest.mark.parametrize(("name", "space"), [("gpt-oss-tiny", "window"), ("qwen3-next-tiny", "state")])
def test_both_tiers_give_up_companions_and_keep_the_pages(name: str, space: str) -> None:
    given_up: Counter[tuple[str, str]] = Counter()

    class Counting(Residency):
        def tombstone(self, node: Node, tier: str, space: str) -> None:
            given_up[tier, space] += node.tier(tier).is_live
            super().tombstone(node, tier, space)

    engine = ScheduleRunner(BuiltinTarget(replace(FIXED, residency=Counting)))
    for schedule in (6, 7):
        assert engine.run(Plan(scenario="hicache-hybrid", shape=name, schedule=schedule)).findings == ()
    assert given_up["device", space] and given_up["host", space]
