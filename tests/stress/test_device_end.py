"""What is told of an error of a device, and of one that is lost by it, on a stand-in for torch.cuda."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from fakes.cuda import LOST, Machine, installed
from rigs.losing import HELD, PLAN, Losing

from kvcheck.core.base.errors import HardwareError
from kvcheck.core.cache.backend.backend import Completed, Place, Submitted
from kvcheck.core.cache.backend.cuda import CudaDevice
from kvcheck.core.stress.delayed import DelayRunner, tries, why_not
from kvcheck.core.stress.device_end import LANES_MOST, DeviceEnd
from kvcheck.core.stress.history import History
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.workload.events import Broke


@pytest.fixture
def machine() -> Iterator[Machine]:
    with installed(1) as made:
        yield made


@pytest.mark.schedules
def test_the_first_error_of_a_lost_device_is_told_once_and_names_what_can_have_caused_it(machine: Machine) -> None:
    machine.chunks_left = 20
    outcome = ScheduleRunner(BuiltinTarget()).run(PLAN)
    assert outcome.is_device_lost
    (finding,) = outcome.findings
    assert finding.code == "KV902" and "an operation was given an id that is out of range" in finding.message
    assert "forward: decode.write (#10, 9 before it); it said: CUDA error: device-side assert" in finding.message


@pytest.mark.schedules
@pytest.mark.parametrize("is_told_late", [False, True])
def test_an_error_of_a_device_that_still_answers_is_told_in_its_own_words(
    is_told_late: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that was refused, say: a later call does not raise it again."""
    runner, left = ScheduleRunner(BuiltinTarget()), [1]

    def once(*_: object) -> None:
        if left:
            left.pop()
            raise RuntimeError("CUDA error: invalid configuration argument")

    if is_told_late:
        synchronize = torch.cuda.synchronize
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: (once(), synchronize(device)))
        outcome = runner.run(PLAN)
    else:
        outcome = runner.run(PLAN, handlers=((Submitted, once),))
    assert not left and not outcome.is_device_lost
    (finding,) = outcome.findings
    assert finding.message.startswith("RuntimeError: CUDA error: invalid configuration argument; in ")
    assert runner.run(PLAN).findings == ()


@pytest.mark.schedules
def test_an_error_of_the_target_is_told_beside_that_of_the_device(machine: Machine) -> None:
    """The target's own error came first, and the device tells only when it is waited for."""

    def breaks(event: object) -> None:
        machine.lost = LOST
        raise KeyError("a page")

    outcome = ScheduleRunner(BuiltinTarget()).run(PLAN, handlers=((Submitted, breaks),))
    assert outcome.is_device_lost
    first, second = (each.message for each in outcome.findings)
    assert "the context of cuda is lost" in first and second.startswith("KeyError: 'a page'; in ")


@pytest.mark.parametrize(
    ("said", "way"),
    [
        (LOST, "an operation was given an id that is out of range"),
        ("Triton Error [CUDA]: an illegal memory access was encountered", "an operation read or wrote at an address"),
        ("CUDA error: unspecified launch failure", "an operation has ended it, one of"),
        ("CUDA error: hardware stack error", "the hardware reported an error in the call stack of an operation, one"),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", "memory of another device"),
        ("", "it said: nothing"),
    ],
)
def test_what_is_told_goes_by_what_the_device_said(said: str, way: str, machine: Machine) -> None:
    history, found = History(), list[str]()
    end = DeviceEnd("cuda:1", machine.backend(emit=history.emit), history)
    for number in range(1, LANES_MOST + 4):
        history.emit(Submitted(number, f"copy{number}", f"lane{number}", (), ()))
    history.emit(Completed(1))
    machine.lost = said
    history.listen([(Broke, lambda event: found.append(event.message))])
    end.settle()
    (text,) = found
    assert end.is_lost and way in text and text.startswith("the context of cuda:1 is lost: ")
    assert "lane1:" not in text and "lane2: copy2 (#2), lane3" in text and text.count("copy") == LANES_MOST
    assert ", and 2 more lanes; it said: " in text


ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported at some other API call"
NVLINK = "CUDA error: uncorrectable NVLink error detected during the execution"


@pytest.mark.schedules
@pytest.mark.parametrize("said", [ECC, NVLINK])
@pytest.mark.parametrize("is_told_late", [False, True])
def test_an_error_of_the_hardware_is_no_finding_and_its_memory_is_kept(
    is_told_late: bool, said: str, machine: Machine
) -> None:
    def breaks(event: object) -> None:
        machine.lost = said
        raise KeyError("a page") if is_told_late else RuntimeError(said)

    runner = ScheduleRunner(BuiltinTarget())
    with pytest.raises(HardwareError) as raised:
        runner.run(PLAN, handlers=((Submitted, breaks),))
    assert f"{said.splitlines()[0]}; next: nvidia-smi -q" in str(raised.value)
    assert len(runner._lost) == 1


@pytest.mark.parametrize(("raises", "is_lost"), [(0, False), (1, False), (2, True), (9, True)])
def test_a_context_is_lost_if_it_raises_again(
    raises: int, is_lost: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first wait may raise what was not told before."""
    left = [*range(raises)]

    def synchronize(device: object) -> None:
        if left:
            left.pop()
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert machine.backend().is_lost() == is_lost


@pytest.mark.schedules
@pytest.mark.parametrize("is_lost", [True, False])
def test_pinned_memory_of_a_lost_device_is_not_freed(
    is_lost: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    empty = CudaDevice.empty

    def noted(device: CudaDevice, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        tensor = empty(device, shape, dtype, place)
        if place is Place.PINNED:
            made.append(weakref.ref(tensor))
        return tensor

    def breaks(event: Submitted) -> None:
        if event.name == "decode.write":
            machine.lost = LOST if is_lost else None
            raise RuntimeError("an error")

    monkeypatch.setattr(CudaDevice, "empty", noted)
    runner = ScheduleRunner(BuiltinTarget())
    assert runner.run(PLAN, handlers=((Submitted, breaks),)).is_device_lost == is_lost
    gc.collect()
    assert made and [each() is not None for each in made] == [is_lost] * len(made)


@pytest.mark.schedules
def test_no_run_under_delays_begins_where_the_free_one_has_lost_the_device(machine: Machine) -> None:
    machine.chunks_left = 20
    runner = DelayRunner(ScheduleRunner(BuiltinTarget()), HELD)
    outcome = runner.run(HELD)
    assert outcome.is_device_lost and outcome.plan.strategy == "eager"
    assert runner.closing() == "hicache/llama-3-micro: wrong bytes in 0 of 1 run without delays, 0 of 0 with"


def test_a_try_that_loses_the_device_is_the_last_one_and_says_why() -> None:
    runner = Losing(lost_in=3)
    made = list(tries(runner, [HELD, replace(HELD, schedule=1), replace(HELD, schedule=2)], times=2))
    assert runner.ran == ["hicache 0", "hicache 0", "hicache 0"] and len(made) == 1
    assert not made[0].shown and why_not(made) == "the context of cuda is lost"
    assert (made[0].rates.free_runs, made[0].rates.held_runs) == (2, 1)
