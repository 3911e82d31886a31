"""Case: a decode step whose operations are recorded as a history, compared with the same step unobserved.

Invariants:
- Both arms submit the same operations with the same footprints. The check counts the recorded operations.
"""

from __future__ import annotations

from dataclasses import replace

from kvcheck.core.base.errors import WrongOutput
from kvcheck.core.bench.arms import Arm, Comparison, Point, Setting
from kvcheck.core.bench.case_decode import SIZE, arm_of
from kvcheck.core.bench.decode_work import DecodeStep
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.history import History, OperationEvents


def points(setting: Setting) -> tuple[Point, ...]:
    """A decode step with the recorder on, compared with the same step without it."""
    shape = setting.shape
    return (
        Point(
            case="recorder",
            size=SIZE,
            shape=shape.name,
            bytes=None,
            makers={
                "unobserved": lambda memory: _arm(memory, shape, is_observed=False),
                "recorded": lambda memory: _arm(memory, shape, is_observed=True),
            },
            comparisons=(Comparison(arm="recorded", baseline="unobserved"),),
        ),
    )


def _arm(memory: FreshMemory, shape: ModelShape, *, is_observed: bool) -> Arm:
    history = History()
    step = DecodeStep(memory, shape, memory.backend(OperationEvents(history.emit) if is_observed else None))
    arm = arm_of(step, "submitted")
    before = history.count

    def check() -> None:
        arm.check()
        if is_observed and history.count < before + 2 * len(step.out):
            raise WrongOutput(f"recorder: expected an event for each operation's start and end, got {history.count}")

    return replace(arm, check=check)
