"""Holding a lane: released by a flag, ended by the watchdog, and never silent about which of the two."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_triton

from kvcheck import kernels
from kvcheck.kernels.hold import hold, hold_torch, release_torch, why_not

# flag, until, looks: released, how often it was looked at
CASES = {
    "raised": ((1, 1, 50), [1, 1]),
    "beyond": ((9, 4, 50), [1, 1]),
    "one short": ((3, 4, 50), [0, 50]),
    "one look": ((0, 1, 1), [0, 1]),
    "negative": ((-2, -1, 7), [0, 7]),
    "far": (((1 << 62) + 1, 1 << 62, 3), [1, 1]),
}


def check_holds(form: Any = hold, device: str = "cpu") -> int:
    """Every case, by looks alone and with a clock that never strikes; returns how many."""
    compared = 0
    for (value, until, looks), ended in CASES.values():
        for limit_ns in (None, 1 << 50):
            flag = torch.tensor([value], device=device)
            outcome = torch.full((2,), -7, device=device)
            form(flag, outcome, until=until, looks=looks, limit_ns=limit_ns)
            assert outcome.tolist() == ended, (value, until, looks)
            assert flag.tolist() == [value]
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("form", "device"), [(hold_torch, "cpu"), (hold, "cpu"), pytest.param(hold, "cuda", marks=pytest.mark.gpu)]
)
def test_a_hold_ends_by_the_flag_or_by_the_watchdog(form: Any, device: str) -> None:
    assert check_holds(form, device) == 2 * len(CASES)


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernel_means_what_the_torch_form_means() -> None:
    ran = interpreted_check("kernels.test_hold:check_holds", "hold_triton:hold_triton")
    assert ran == [2 * len(CASES)] * 2


@pytest.mark.parametrize(
    ("has_triton", "module", "why"),
    [
        (False, SimpleNamespace(IS_INTERPRETED=False), "there is none"),
        (True, None, "this one cannot be imported (import of kvcheck.kernels.hold_triton halted"),
        (True, SimpleNamespace(IS_INTERPRETED=True), "TRITON_INTERPRET runs its kernels in the process"),
        (True, SimpleNamespace(IS_INTERPRETED=False), None),
    ],
)
def test_it_says_why_a_lane_cannot_be_held(
    has_triton: bool, module: object, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.hold, "asks_triton", lambda *tensors: has_triton)
    monkeypatch.delattr(kernels, "hold_triton", raising=False)  # or the import finds it there
    monkeypatch.setitem(sys.modules, "kvcheck.kernels.hold_triton", module)  # type: ignore[arg-type]
    told = why_not(torch.zeros(2, dtype=torch.int64))
    assert told == why or (why is not None and str(told).startswith(why))


def test_another_thread_releases_a_hold() -> None:
    flag, outcome = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    held = threading.Thread(target=hold_torch, args=(flag, outcome), kwargs={"until": 5, "looks": 1 << 39})
    held.start()
    release_torch(flag, 4)
    release_torch(flag, 5)
    held.join(60)
    assert not held.is_alive()
    assert outcome[0] == 1 and outcome[1] >= 1


@pytest.mark.parametrize(
    ("flag", "outcome", "looks", "limit_ns"),
    [(1, 2, 0, None), (1, 2, 1 << 40, None), (2, 2, 1, None), (1, 1, 1, None), (1, 2, 1, 0)],
)
@pytest.mark.parametrize("form", [hold_torch, hold])
def test_a_hold_without_an_end_is_refused(form: Any, flag: int, outcome: int, looks: int, limit_ns: int | None) -> None:
    flags, outcomes = torch.ones(flag, dtype=torch.int64), torch.zeros(outcome, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"watchdog|expected \[1\]|time limit"):
        form(flags, outcomes, until=1, looks=looks, limit_ns=limit_ns)


@pytest.mark.gpu
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_held_lane_stands_still_while_others_run(is_pinned: bool) -> None:
    held, other = torch.cuda.Stream(), torch.cuda.Stream()
    flag = torch.zeros(1, dtype=torch.int64)
    flag = flag.pin_memory() if is_pinned else flag.cuda()
    outcome, target, beside = (torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(3))
    for value in (3, 7):  # the first round loads all kernels, which may join the device: the flag is up already
        release_torch(flag, 1 if value == 3 else 0)
        torch.cuda.synchronize()
        with torch.cuda.stream(held):
            hold(flag, outcome, until=1, looks=1 << 30, limit_ns=20_000_000_000)
            target.fill_(value)
        with torch.cuda.stream(other):
            beside.fill_(9)
            ran = torch.cuda.Event()
            ran.record()
        ran.synchronize()
    assert beside.tolist() == [9, 9]
    assert not held.query(), "the held lane ran on"
    if is_pinned:
        release_torch(flag, 1)
    else:
        with torch.cuda.stream(other):
            release_torch(flag, 1)
    torch.cuda.synchronize()
    assert target.tolist() == [7, 7]
    assert outcome.tolist()[0] == 1


@pytest.mark.gpu
def test_the_clock_of_a_device_ends_a_hold() -> None:
    flag, outcome = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    hold(flag, outcome, until=1, looks=(1 << 40) - 1, limit_ns=1_000_000)
    torch.cuda.synchronize()
    assert outcome.tolist()[0] == 0 and outcome.tolist()[1] >= 1
