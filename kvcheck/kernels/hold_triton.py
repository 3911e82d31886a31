"""hold_torch as a Triton kernel of one warp.

Invariants:
- Every look reads the flag from memory (volatile loads). The kernel never writes it, so no release is lost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


def hold_triton(flag: torch.Tensor, outcome: torch.Tensor, until: int, looks: int, limit_ns: int | None) -> None:
    """Interpreted kernels have no device clock, so only looks end their hold."""
    _KERNEL[(1,)](
        flag,
        outcome,
        until,
        looks,
        limit_ns or 0,
        HAS_CLOCK=limit_ns is not None and outcome.is_cuda,
        num_warps=1,
        enable_fp_fusion=False,  # no floats here; left unset, a release that changes the default would warn
    )


def _wait_for_flag(flag, outcome, until, looks, limit_ns, HAS_CLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    begun = cuda.globaltimer() if HAS_CLOCK else 0
    look = tl.full((), 1, tl.int64)
    is_raised = tl.load(flag, volatile=True) >= until
    is_late = False
    while (look < looks) & (is_raised == 0) & (is_late == 0):
        look += 1
        is_raised = tl.load(flag, volatile=True) >= until
        if HAS_CLOCK:
            is_late = cuda.globaltimer() - begun > limit_ns
    tl.store(outcome, is_raised.to(tl.int64))
    tl.store(outcome + 1, look)


_KERNEL = triton.jit(_wait_for_flag)
IS_INTERPRETED = not isinstance(_KERNEL, triton.JITFunction)
