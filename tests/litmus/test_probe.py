"""The look at a device's holds, over threads: streams of their own, and two that share one queue.

Invariants:
- Times are shown and not judged.
"""

from __future__ import annotations

from typing import Any

from kvcheck.core.cache.backend import probe as probed
from kvcheck.core.cache.backend.device import WATCHDOG_NS
from kvcheck.core.cache.backend.probe import HoldProbe, probe
from kvcheck.core.cache.backend.threads import ThreadDevice


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
