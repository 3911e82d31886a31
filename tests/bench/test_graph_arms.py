"""The arms of a decode step that is replayed as a graph: on a device alone, and the same numbers as the plain step."""

from __future__ import annotations

import numpy as np
import pytest

from kvcheck.core.bench import case_decode
from kvcheck.core.bench.arms import Setting, same
from kvcheck.core.bench.case_guarded import queue_load
from kvcheck.core.bench.decode_work import DecodeStep
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.stress.workload.shapes import shape

TINY = shape("llama-3-tiny")


def fresh(device: str = "cpu") -> FreshMemory:
    return FreshMemory(np.random.default_rng(7), device)


@pytest.mark.parametrize("kind", ["threads", "cuda"])
def test_a_cpu_has_no_graphs_to_price_and_lanes_beside_the_process_have(kind: str) -> None:
    plain, device = (case_decode.points(Setting(shape=TINY, device=each))[0] for each in ("cpu", kind))
    assert not any("graph" in name for name in plain.makers)
    rows = [(row.arm, row.baseline) for row in device.comparisons]
    assert rows[: len(plain.comparisons)] == [(row.arm, row.baseline) for row in plain.comparisons]
    assert rows[len(plain.comparisons) :] == [("graph-bare", "bare"), ("graph-guarded", "graph-bare")]


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_replayed_step_gives_the_numbers_of_the_plain_one_and_waits_before_it(
    is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fresh()
    backend = memory.backend()
    step = DecodeStep(memory, TINY, backend)
    waited = []
    monkeypatch.setattr(KVPool, "before_replay", lambda pool, lane: waited.append(lane.name))
    call = step.graphed(step.guarded if is_guarded else step.bare, is_guarded=is_guarded)
    queue_load(backend, step.gate, [step.load(layer) for layer in range(TINY.num_layers)])
    step.out.clear()
    call()
    replayed = step.numbers()
    step.bare()
    same("attention of all layers", replayed, step.numbers())
    assert waited == ["forward", "forward"] * is_guarded


@pytest.mark.gpu
def test_graph_arms_of_a_device_are_right() -> None:
    (point,) = case_decode.points(Setting(shape=TINY, device="cuda:0"))
    for name, maker in point.makers.items():
        arm = maker(fresh("cuda:0"))
        for _ in range(3):
            arm.call()
        arm.check()
        assert name in ("bare", "guarded", "protected", "graph-bare", "graph-guarded")
