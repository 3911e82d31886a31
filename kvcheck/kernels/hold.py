"""Holds a lane until somebody raises a flag, or a watchdog has counted to its end.

flag: [1] int64, on the device or in pinned memory of the host; it is raised when it is at least `until`.
outcome: [2] int64: whether the flag was seen raised (1) or the watchdog ended the hold (0), and how often was looked.

Invariants:
- A hold ends after a stated number of looks, and sooner by the clock where one is asked for: no device ever hangs.
- The host is not joined: it, or another lane, raises the flag whenever it likes.
- How a hold ended is always said; a hold that the watchdog ended has imposed no order.

A kernel that has never run may have to be loaded, and loading can wait for the device: whatever is to run while a lane
is held has to have run before.
"""

from __future__ import annotations

import torch

from kvcheck.kernels.compilers import asks_triton


def hold_torch(
    flag: torch.Tensor, outcome: torch.Tensor, *, until: int, looks: int, limit_ns: int | None = None
) -> None:
    """Look at the flag at most `looks` times. On the CPU alone, where the clock is not asked: looks are the watchdog.

    limit_ns: end the hold after so much time of the device's clock.
    """
    _check(flag, outcome, looks, limit_ns)
    assert not outcome.is_cuda, "torch has no operation that holds a lane of a device: install triton"
    for look in range(1, looks + 1):
        if int(flag) >= until:
            outcome[0], outcome[1] = 1, look
            return
    outcome[0], outcome[1] = 0, looks


def hold(flag: torch.Tensor, outcome: torch.Tensor, *, until: int, looks: int, limit_ns: int | None = None) -> None:
    """hold_torch by a kernel of one warp on the current stream. outcome lies where it runs."""
    if asks_triton(outcome):
        from kvcheck.kernels import hold_triton

        if outcome.is_cuda or hold_triton.IS_INTERPRETED:
            _check(flag, outcome, looks, limit_ns)
            hold_triton.hold_triton(flag, outcome, until, looks, limit_ns)
            return
    hold_torch(flag, outcome, until=until, looks=looks, limit_ns=limit_ns)


def release_torch(flag: torch.Tensor, value: int) -> None:
    """Raise the flag: in the order of the current stream where it lies on the device, at once where on the host."""
    flag.fill_(value)


def _check(flag: torch.Tensor, outcome: torch.Tensor, looks: int, limit_ns: int | None) -> None:
    assert flag.dtype == outcome.dtype == torch.int64, f"flags are int64, got {flag.dtype} and {outcome.dtype}"
    assert flag.shape == (1,) and outcome.shape == (2,), f"expected [1] and [2], got {flag.shape} and {outcome.shape}"
    assert 1 <= looks < 1 << 40, f"the watchdog counts from 1 to some number of looks, got {looks}"
    assert limit_ns is None or limit_ns > 0, f"a time limit is positive, got {limit_ns}"
    assert flag.is_cuda or not outcome.is_cuda or flag.is_pinned(), "a device reads pinned memory of the host only"
