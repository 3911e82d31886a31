"""Benchmarks whose time is up at a round that a test picks.

Invariants:
- A round that is not picked is measured as always.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcheck.core.base.deadline import TimeUp
from kvcheck.core.bench.measure import Samples


def cut_rounds(monkeypatch: pytest.MonkeyPatch, is_over: Callable[[Samples], bool]) -> None:
    """End the time of a benchmark before a round of these samples."""
    add_round = Samples.add_round

    def cut(samples: Samples, random: np.random.Generator) -> None:
        if is_over(samples):
            raise TimeUp
        add_round(samples, random)

    monkeypatch.setattr(Samples, "add_round", cut)
