"""The look at a device's holds, over threads: streams of their own, and two that share one queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcheck.core.cache.backend import probe as probed
from kvcheck.core.cache.backend.device import WATCHDOG_NS
from kvcheck.core.cache.backend.probe import HoldProbe, probe
from kvcheck.core.cache.backend.threads import ThreadDevice
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.runners import row_of
from kvcheck.core.stress import rows


def test_threads_run_beside_each_other(monkeypatch: Any) -> None:
    monkeypatch.setattr(probed, "BESIDE_S", 2.0)  # a busy machine is slow
    machine = ThreadDevice()
    found = probe(machine, streams=4)
    machine.close()
    assert found.behind == () and found.streams == 4
    assert found.watchdog_s >= WATCHDOG_NS / 1e9
    assert found.text.endswith("4 streams run beside each other")


def test_streams_that_share_a_queue_are_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(probed, "BESIDE_S", 0.1)
    machine = ThreadDevice()
    made = [machine.stream() for _ in range(2)]
    handed = iter([made[0], made[1], made[0]])
    monkeypatch.setattr(machine, "stream", lambda: next(handed))
    found = probe(machine, streams=3)
    machine.close()
    assert {(0, 2), (2, 0)} <= {*found.behind}
    assert "pairs of streams stand behind each other, 2 behind 0" in HoldProbe(1e-5, 0.25, 3, ((0, 2), (2, 0))).text


@pytest.mark.parametrize(("behind", "told"), [((), 0), (((0, 2), (2, 0)), 1)])
def test_a_run_with_delays_says_which_lanes_it_could_not_hold(
    behind: tuple[tuple[int, int], ...], told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CudaDevice", lambda index: index)
    monkeypatch.setattr(rows, "probe", lambda machine: HoldProbe(1e-5, 0.25, 34, behind))
    base = Plan(scenario="hicache", shape="llama-3-tiny", backend="cuda", device="cuda:1", strategy="delay", seed=1)
    lines = row_of(base).untried(base, [base])
    assert [line for line in lines if "share a queue of the device; a hold is let go in 10 us" in line] == lines[:told]
    over = replace(base, backend="threads", device="threads")
    assert [line.partition(",")[0] for line in row_of(over).untried(over, [over])] == ["not tried: a GPU"]
