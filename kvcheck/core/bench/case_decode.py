"""Case: a whole decode step with each protection on and off, compared bit for bit with bare().

"guards-alone" computes nothing: its time is the guards' share, without the noise of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvcheck.core.base.cells import STREAMED
from kvcheck.core.bench.arms import Arm, ArmComparison, BenchSetting, Point, same
from kvcheck.core.bench.case_guarded import queue_load
from kvcheck.core.bench.decode_work import CONTEXT, REQUESTS, DecodeStep
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.pools.shape import ModelShape

SIZE = f"{REQUESTS}x{CONTEXT} tokens"


def points(setting: BenchSetting) -> tuple[Point, ...]:
    shape = setting.shape
    makers: dict[str, Callable[[FreshMemory], Arm]] = {
        "bare": lambda memory: _arm(memory, shape, "bare"),
        "guarded": lambda memory: _arm(memory, shape, "guarded"),
        "protected": lambda memory: _arm(memory, shape, "protected"),
        "guards-alone": lambda memory: _guards(memory, shape),
    }
    comparisons = [
        ArmComparison(arm="guarded", baseline="bare"),
        ArmComparison(arm="protected", baseline="bare"),
        ArmComparison(arm="guards-alone", baseline="bare", name="plus-guards"),
    ]
    if setting.kind in STREAMED:
        makers["graph-bare"] = lambda memory: _graph_arm(memory, shape, "bare")
        makers["graph-guarded"] = lambda memory: _graph_arm(memory, shape, "guarded")
        comparisons += [
            ArmComparison(arm="graph-bare", baseline="bare"),
            ArmComparison(arm="graph-guarded", baseline="graph-bare"),
        ]
    return (
        Point(
            case="decode-step",
            size=SIZE,
            shape=shape.name,
            bytes=None,
            makers=makers,
            comparisons=tuple(comparisons),
            note="attention in float32 over gathered rows; one request joins in every step",
        ),
    )


def _arm(memory: FreshMemory, shape: ModelShape, name: str) -> Arm:
    step = DecodeStep(memory, shape, memory.backend())
    return arm_of(step, name)


def _guards(memory: FreshMemory, shape: ModelShape) -> Arm:
    step = DecodeStep(memory, shape, memory.backend())
    return Arm(call=step.guards, check=step.check_guards)


def _graph_arm(memory: FreshMemory, shape: ModelShape, name: str) -> Arm:
    """guarded: each replay first waits for a whole load."""
    backend = memory.backend()
    step = DecodeStep(memory, shape, backend)
    call = step.graphed(getattr(step, name), is_guarded=name == "guarded")
    if name == "guarded":
        queue_load(backend, step.gate, [step.load(layer) for layer in range(shape.num_layers)])
    return replace(arm_of(step, name), call=call)


def arm_of(step: DecodeStep, name: str) -> Arm:
    def check() -> None:
        got = step.numbers()
        step.bare()
        same("attention of all layers", got, step.numbers())

    return Arm(call=getattr(step, name), check=check)
