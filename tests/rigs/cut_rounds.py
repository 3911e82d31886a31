"""Benchmarks whose time is up at a round that a test picks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcheck.core.base.deadline import TimeUp
from kvcheck.core.bench.arms import ArmComparison, Maker, Point
from kvcheck.core.bench.clock import Batch, CpuClock, nothing
from kvcheck.core.bench.measure import Samples


def cut_rounds(monkeypatch: pytest.MonkeyPatch, is_over: Callable[[Samples], bool]) -> None:
    """End the time of a benchmark before a round of these samples."""
    add_round = Samples.add_round

    def cut(samples: Samples, random: np.random.Generator) -> None:
        if is_over(samples):
            raise TimeUp
        add_round(samples, random)

    monkeypatch.setattr(Samples, "add_round", cut)


class QuickClock(CpuClock):
    """A clock by which one call takes long enough, so that none is repeated."""

    def batch(
        self, calls: list[Callable[[], object]], count: int, kind: str, join: Callable[[], None] = nothing
    ) -> Batch:
        return lambda: (calls[0](), 200_000_000)[1]


def point(case: str = "made-up", size: str = "one", **makers: Maker) -> Point:
    """A point whose arms are compared with the first."""
    first, *others = makers
    rows = tuple(ArmComparison(arm=name, baseline=first) for name in others)
    return Point(case=case, size=size, shape=None, bytes=None, makers=makers, comparisons=rows)
