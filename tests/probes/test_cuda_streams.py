"""Holds on real streams, over stand-ins for torch.cuda: where a hold is put, when it is let go, and how it ended."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes.cuda import Machine, installed
from fakes.cuda_tensors import memory

from kvcheck.core.base import cuda_hold
from kvcheck.core.probes.frame import cuda_streams
from kvcheck.core.probes.frame.cuda_streams import HOLD_CYCLES, POLLS_MOST, CudaMachine
from kvcheck.core.probes.frame.streams import EAGER, LAZY, RANDOM, HoldReport


def holds_of(order: str, seed: int, count: int = 40) -> tuple[int, list[bool]]:
    machine, held = CudaMachine("cuda"), []
    machine.reset(order, seed)
    for _ in range(count):
        machine.queue(lambda: None)
        held.append(machine.take_report().spun > 0)
    assert machine.queued == count
    return sum(held), held


def test_order_says_what_is_held(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_streams, "_made_holds", lambda device: "triton is needed, and there is none")
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    assert holds_of(EAGER, 1)[0] == 0
    assert holds_of(LAZY, 1)[0] == 40
    drawn = holds_of(RANDOM, 1)
    assert 0 < drawn[0] < 40 and drawn == holds_of(RANDOM, 1) and drawn != holds_of(RANDOM, 2)


@pytest.fixture
def device() -> Iterator[Machine]:
    with installed(7) as machine:
        yield machine


@pytest.fixture
def machine(device: Machine) -> CudaMachine:
    """Streams over that device that hold all work."""
    made = CudaMachine("cuda")
    made.reset(LAZY, 1)
    return made


def loads(machine: CudaMachine, device: Machine, count: int) -> list[int]:
    """Queue so much work on a side stream. Returns the list of those that have run."""
    ran: list[int] = []
    with machine.on(machine.side()):
        for number in range(count):
            machine.queue(lambda number=number: device.current.call(lambda: ran.append(number)))  # type: ignore
    return ran


def test_work_stands_until_it_is_let_go_piece_by_piece(device: Machine, machine: CudaMachine) -> None:
    ran = loads(machine, device, 4)
    for _ in range(200):
        device.step()
    assert ran == []
    machine.let_go_until(lambda: (device.step(), 1 in ran)[1])
    assert ran == [0, 1]
    machine.settle()
    assert ran == [0, 1, 2, 3] and (machine.fired, device.fires) == (0, 0)
    assert machine.take_report() == HoldReport(placed=4) and machine.take_report() == HoldReport()


def test_holds_return_and_work_beyond_them_is_told(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_streams, "HOLDS_MOST", 2)
    machine = CudaMachine("cuda")
    for count in (2, 2, 5):
        machine.reset(LAZY, 1)
        loads(machine, device, count)
    machine.reset(EAGER, 0)
    report = machine.take_report()
    assert device.fires == 0 and report == HoldReport(placed=6, lacking=3)
    assert report.notes[1] == "not exercised: 3 delays, as all holds were in use"


def test_what_was_read_before_the_work_ran_stays_as_it_was_read(device: Machine, machine: CudaMachine) -> None:
    with memory(device) as made:
        rows = made.put(torch.zeros(3, dtype=torch.int64))
        with machine.on(machine.side()):
            machine.queue(lambda: rows.fill_(7))
        (taken,) = machine.taken([rows])
        machine.settle()
        assert (taken.tolist(), rows.tolist()) == ([0] * 3, [7] * 3)


def test_a_hold_that_the_watchdog_ended_is_counted_and_imposed_no_order(device: Machine, machine: CudaMachine) -> None:
    loads(machine, device, 1)
    torch.cuda.synchronize()  # by the engine: nothing lets the hold go
    assert machine.fired == 0, "not known before it is settled"
    machine.settle()
    machine.settle()
    assert machine.fired == 1
    report = machine.take_report()
    assert report.gap == "not exercised: the watchdog of the device ended 1 of 1 hold, so no order was imposed"
    assert report.plus(HoldReport(placed=1)).gap is None and HoldReport().gap is None
    assert report.limits == ("the watchdog of the device ended 1 of 1 hold; these imposed no order",)
    machine.reset(EAGER, 0)
    assert machine.fired == 0


def test_a_process_that_only_asks_gets_there(device: Machine, machine: CudaMachine) -> None:
    ran = loads(machine, device, 2)
    asked = 0
    while len(ran) < 2:
        asked += 1
        device.step()
        machine.polled(False)
    assert POLLS_MOST < asked <= 2 * POLLS_MOST + 9
    for _ in range(2 * POLLS_MOST):
        machine.polled(False)  # nothing stands any more
    machine.settle()
    assert device.fires == 0


def test_what_queued_work_uses_stays_until_it_has_run(device: Machine) -> None:
    class Rows:
        def arrive(self) -> None: ...

    machine, rows = CudaMachine("cuda"), Rows()
    kept = weakref.ref(rows)
    machine.reset(LAZY, 1)
    with machine.on(machine.side()):
        machine.queue(rows.arrive)
    del rows
    assert kept() is not None
    machine.settle()
    assert kept() is None


def test_work_of_one_stream_is_let_go_alone_and_the_last_goes_last(device: Machine, machine: CudaMachine) -> None:
    ran: list[str] = []
    one, other = machine.side(), machine.side()
    for stream, name, goes_last in ((one, "last", True), (other, "first", False), (other, "second", False)):
        with machine.on(stream):
            machine.queue(
                lambda name=name: device.current.call(lambda: ran.append(name)),  # type: ignore
                goes_last=goes_last,
            )
    machine.let_go_until(lambda: (device.step(), "first" in ran)[1])
    assert ran == ["first"]
    machine.let_go_until(lambda: False, on=one)
    for _ in range(50):
        device.step()
    assert ran == ["first", "last"]
    machine.settle()
    assert ran == ["first", "last", "second"] and machine.fired == 0


def test_a_process_that_only_looks_lets_go_at_random_alone(device: Machine) -> None:
    for order, ends in ((LAZY, False), (RANDOM, True)):
        machine = CudaMachine("cuda")
        machine.reset(order, 3)
        ran = loads(machine, device, 8)
        looks = [machine.has_reached(lambda: (device.step(), len(ran) == 8)[1]) for _ in range(40)]  # noqa: B023
        assert looks[-1] is ends
        machine.settle()
        assert machine.fired == 0


def test_a_call_that_waits_is_let_go_and_one_that_does_not_is_not(device: Machine, machine: CudaMachine) -> None:
    ran = loads(machine, device, 2)
    with machine.waiting():
        pass
    for _ in range(50):
        device.step()
    assert ran == [] and device.due == []
    with machine.waiting():
        torch.cuda.synchronize()
    assert ran == [0, 1]
    machine.settle()
    assert (machine.fired, device.fires) == (0, 0)


def test_what_a_read_does_not_wait_for_may_stay_held(device: Machine, machine: CudaMachine) -> None:
    ran = loads(machine, device, 3)
    machine.taken([torch.zeros(1)], rest_stays=True)
    for _ in range(50):
        device.step()
    assert ran == []
    machine.taken([torch.zeros(1)])
    machine.settle()
    assert ran == [0, 1, 2] and device.fires == 0


def ends_at_once(flag: torch.Tensor, outcome: torch.Tensor, **_: Any) -> None:
    outcome[0] = 1


def ends_by_itself(flag: torch.Tensor, outcome: torch.Tensor, **_: Any) -> None:
    """A hold that sees no flag that is raised while it looks."""
    outcome[0] = 0
    torch.cuda.current_stream().queue.append(lambda: int(flag) == 1)  # type: ignore[attr-defined]


def fails(flag: torch.Tensor, outcome: torch.Tensor, **_: Any) -> None:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("hold", ends_at_once, "a hold on this device does not hold"),
        ("hold", ends_by_itself, "a flag that is raised does not reach a hold on this device"),
        ("hold", fails, "RuntimeError: Failed to find C compiler"),
        ("why_not", lambda outcome: "there is none", "triton is needed, and there is none"),
    ],
)
def test_a_device_that_cannot_be_held_spins_and_says_why(
    name: str, broken: object, why: str, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spun: list[int] = []
    monkeypatch.setattr(cuda_hold, name, broken)
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append)
    machine = CudaMachine("cuda")
    machine.reset(LAZY, 1)
    ran = loads(machine, device, 2)
    read = [torch.zeros(2)]
    assert machine.taken(read) is read
    machine.settle()
    report = machine.take_report()
    assert spun == [HOLD_CYCLES] * 2 and ran == [0, 1] and report == HoldReport(spun=2, why_spin=why)
    assert report.notes == (f"work is held by a kernel that spins for a fixed time: {why}",)


def test_streams_that_stand_behind_each_other_are_not_held(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda: device.ordinary)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    machine = CudaMachine("cuda")
    machine.reset(LAZY, 1)
    machine.queue(lambda: None)
    assert machine.take_report().why_spin == "the other streams of this device stand still behind one that is held"


@pytest.mark.gpu
@pytest.mark.parametrize(("waits", "seen"), [(False, 0), (True, 7)])
def test_a_real_device_runs_held_work_when_a_read_has_to_wait_for_it(waits: bool, seen: int) -> None:
    machine, rows = CudaMachine("cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    for order in (EAGER, LAZY):  # the first round loads all kernels
        machine.reset(order, 1)
        rows.zero_()
        machine.settle()
        with machine.on(machine.side()):
            machine.queue(lambda: rows.fill_(7))
            loaded = torch.cuda.Event()
            loaded.record()
        if waits:
            loaded.wait()
        (taken,) = machine.taken([rows])
        machine.settle()
    assert (taken.tolist(), rows.tolist()) == ([seen] * 4, [7] * 4)
    assert (machine.fired, machine.take_report()) == (0, HoldReport(placed=1))


@pytest.mark.gpu
def test_a_real_device_ends_a_hold_that_nobody_lets_go() -> None:
    machine = CudaMachine("cuda")
    machine.reset(LAZY, 1)
    with machine.on(machine.side()):
        machine.queue(lambda: None)
    torch.cuda.synchronize()
    machine.settle()
    assert machine.take_report() == HoldReport(placed=1, fired=1)
