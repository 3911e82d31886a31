"""Hold of a stream until a flag is raised, or until a watchdog has counted to its end.

flag: [1] int64, on the device or in pinned host memory; raised when it is at least `until`. outcome: [2] int64: 1 if
the flag was raised, 0 if the watchdog ended the hold; and the number of looks at the flag.

All kernels that run during a hold must have run before: loading a new kernel can wait for the device.
"""

from __future__ import annotations

import torch

from kvcheck.kernels.compilers import asks_triton


def hold_torch(
    flag: torch.Tensor, outcome: torch.Tensor, *, until: int, looks: int, limit_ns: int | None = None
) -> None:
    """Look at the flag at most `looks` times. CPU only, and without a clock.

    limit_ns: the hold ends after so many nanoseconds of the device's clock.
    """
    _check(flag, outcome, looks, limit_ns)
    assert not outcome.is_cuda, "torch has no operation that holds a lane of a device: install triton"
    for look in range(1, looks + 1):
        if int(flag) >= until:
            outcome[0], outcome[1] = 1, look
            return
    outcome[0], outcome[1] = 0, looks


def hold(flag: torch.Tensor, outcome: torch.Tensor, *, until: int, looks: int, limit_ns: int | None = None) -> None:
    """hold_torch by a kernel of one warp on the current stream. outcome lies on the same device."""
    if asks_triton(outcome):
        from kvcheck.kernels import hold_triton

        if outcome.is_cuda or hold_triton.IS_INTERPRETED:
            _check(flag, outcome, looks, limit_ns)
            hold_triton.hold_triton(flag, outcome, until, looks, limit_ns)
            return
    hold_torch(flag, outcome, until=until, looks=looks, limit_ns=limit_ns)


def why_not(outcome: torch.Tensor) -> str | None:
    if not asks_triton(outcome):
        return "there is none"
    try:
        from kvcheck.kernels import hold_triton
    except ImportError as error:
        return f"this one cannot be imported ({error})"
    # An interpreted kernel runs in the process, which would look at its own flag and never raise it.
    return "TRITON_INTERPRET runs its kernels in the process" if hold_triton.IS_INTERPRETED else None


def release_torch(flag: torch.Tensor, value: int) -> None:
    """Raise the flag: at once in host memory, in stream order on the device."""
    flag.fill_(value)


def _check(flag: torch.Tensor, outcome: torch.Tensor, looks: int, limit_ns: int | None) -> None:
    assert flag.dtype == outcome.dtype == torch.int64, f"flags are int64, got {flag.dtype} and {outcome.dtype}"
    assert flag.shape == (1,) and outcome.shape == (2,), f"expected [1] and [2], got {flag.shape} and {outcome.shape}"
    assert 1 <= looks < 1 << 40, f"the watchdog counts from 1 to some number of looks, got {looks}"
    assert limit_ns is None or limit_ns > 0, f"a time limit is positive, got {limit_ns}"
    assert flag.is_cuda or not outcome.is_cuda or flag.is_pinned(), "a device reads pinned memory of the host only"
