"""The arms of `kvcheck bench` under pytest-benchmark, for comparing one version of a part with the next by hand.

Prices, ratios and intervals come from `kvcheck bench`; here each arm runs alone, over one set of buffers.

Invariants:
- Every arm of every case is here; each is checked after it was timed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvcheck.core.bench import CASES
from kvcheck.core.bench.arms import BenchSetting, Maker
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.stress.workload.shapes import shape as shape_named

SHAPE = shape_named("glm-5.1")
CPU = "cpu"


def arms() -> dict[str, Maker]:
    """ "case/size/arm" to what makes the arm."""
    torch.set_num_threads(1)
    setting = BenchSetting(shape=SHAPE, device=CPU)
    return {
        f"{point.case}/{point.size}/{name}": maker
        for case in CASES.names()
        for point in CASES.load(case)(setting)
        for name, maker in point.makers.items()
    }


ARMS = arms()


@pytest.mark.parametrize("name", ARMS)
def test_arm(name: str, benchmark: Callable[[Callable[[], object]], object]) -> None:
    benchmark.group = name.rpartition("/")[0]  # type: ignore[attr-defined]
    arm = ARMS[name](FreshMemory(np.random.default_rng(1), CPU))
    benchmark(arm.call)
    arm.check()
    arm.close()
