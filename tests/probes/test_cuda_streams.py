"""Holds on real streams, over a torch.cuda that writes down what it is asked: where a hold is put, and how many.

Invariants:
- Nothing here needs a device; what a hold does there is not shown by these tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kvcheck.core.probes.frame.cuda_streams import HOLD_CYCLES, CudaMachine
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.streams import EAGER, LAZY, RANDOM


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch.cuda was asked, in order."""
    lines: list[str] = []

    @contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        lines.append(f"on {stream}")
        yield
        lines.append(f"off {stream}")

    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda index: lines.append(f"device {index}"),
        "synchronize": lambda: lines.append("synchronize"),
        "Stream": lambda: "side",
        "stream": on_stream,
        "_sleep": lambda cycles: lines.append(f"hold {cycles}"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return lines


def holds_of(order: str, seed: int, count: int = 40) -> tuple[int, list[bool]]:
    machine, held = CudaMachine("cuda"), []
    machine.reset(order, seed)
    for _ in range(count):
        before = machine.holds
        machine.queue(lambda: None)
        held.append(machine.holds > before)
    assert machine.queued == count
    return machine.holds, held


def test_hold_is_in_front_of_the_work_on_its_stream(told: list[str]) -> None:
    machine = CudaMachine("cuda:1")
    machine.reset(LAZY, 1)
    told.clear()
    with machine.on(machine.side()):
        machine.queue(lambda: told.append("work"))
    machine.settle()
    assert told == ["on side", f"hold {HOLD_CYCLES}", "work", "off side", "synchronize"]


def test_order_says_what_is_held(told: list[str]) -> None:
    assert told == []
    assert holds_of(EAGER, 1)[0] == 0
    assert holds_of(LAZY, 1)[0] == 40
    drawn = holds_of(RANDOM, 1)
    assert 0 < drawn[0] < 40 and drawn == holds_of(RANDOM, 1) and drawn != holds_of(RANDOM, 2)


def test_named_device_is_used_and_a_missing_one_is_refused(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    CudaMachine("cuda:1")
    assert told[0] == "device 1"
    with pytest.raises(CannotDrive, match="cuda:7: this machine has 2 CUDA devices"):
        CudaMachine("cuda:7")
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    with pytest.raises(CannotDrive, match="sees no CUDA device, asked for cuda"):
        CudaMachine("cuda")
