"""differing_torch as a compiled loop that touches each word of host memory once."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import torch

from kvcheck.kernels.content import low_half


def differing_numba(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if rows.dtype == torch.int32:
        codes, mask = low_half(codes), low_half(mask)
    differing = torch.empty(len(rows), dtype=torch.bool)
    _DIFFERING(_words(rows), _words(codes), _words(mask), differing.numpy())
    return differing


def _words(tensor: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """Contiguous, so that every call compiles to the same few loops; unsigned, as numba makes floats of mixed signs."""
    return tensor.contiguous().numpy().view(np.uint64 if tensor.dtype == torch.int64 else np.uint32)


def _differing(rows, codes, mask, differing):  # type: ignore[no-untyped-def]  # numba infers the types
    # Two runs of rows at a time: one core then has more memory reads in flight than with one run. With more than two
    # runs its prefetcher loses track of their pages.
    zero = codes.dtype.type(0)
    run = rows.shape[0] // 2
    for row in range(run):
        near, far, code, far_code = rows[row], rows[row + run], codes[row], codes[row + run]
        bits, far_bits = zero, zero
        for at in range(mask.shape[0]):
            bits |= near[at] ^ mask[at] ^ code
            far_bits |= far[at] ^ mask[at] ^ far_code
        differing[row], differing[row + run] = bits != 0, far_bits != 0
    for row in range(2 * run, rows.shape[0]):
        bits = zero
        for at in range(mask.shape[0]):
            bits |= rows[row, at] ^ mask[at] ^ codes[row]
        differing[row] = bits != 0


_DIFFERING = numba.njit(nogil=True)(_differing)
