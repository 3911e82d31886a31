"""Content rows by compiled loops over host memory that touch each word once; importing this module needs numba.

Invariants:
- They mean what `fill_torch` and `verify_torch` mean, for rows that lie in one piece.
- Words are unsigned here: numba makes a float of a signed and an unsigned operand.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import torch

from kvcheck.kernels.content import as_signed, low_half
from kvcheck.kernels.digest_numba import GOLDEN, folded


def fill_digest_numba(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, start: int) -> torch.Tensor:
    """Fill int64 `rows`. Returns the digest of the words. start: what the place of the first word adds, unsigned."""
    return torch.tensor(as_signed(int(_FILL_DIGEST(_words(rows), _words(codes), _words(mask), np.uint64(start)))))


def verify_numba(
    rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, start: int | None
) -> tuple[torch.Tensor, bool, torch.Tensor | None]:
    """Which rows differ, bool [T]; whether any does; and, if `start` is given, the digest of int64 rows."""
    if rows.dtype == torch.int32:
        codes, mask = low_half(codes), low_half(mask)
    differing = torch.empty(len(rows), dtype=torch.bool)
    seen = (_words(rows), _words(codes), _words(mask), differing.numpy())
    if start is None:
        return differing, bool(_VERIFY(*seen)), None
    is_any, total = _VERIFY_DIGEST(*seen, np.uint64(start))
    return differing, bool(is_any), torch.tensor(as_signed(int(total)))


def _words(tensor: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """Words in one piece, unsigned, so that every call compiles to the same few loops."""
    return tensor.contiguous().numpy().view(np.uint64 if tensor.dtype == torch.int64 else np.uint32)


def _fill_digest(rows, codes, mask, start):  # type: ignore[no-untyped-def]  # numba infers the types
    total = np.uint64(0)
    for row in range(rows.shape[0]):
        for at in range(rows.shape[1]):
            word = codes[row] ^ mask[at]
            rows[row, at] = word
            total += folded(word, start + np.uint64(at) * GOLDEN)
        start += np.uint64(rows.shape[1]) * GOLDEN
    return total


def _verify(rows, codes, mask, differing):  # type: ignore[no-untyped-def]
    # Two runs of rows at a time: one core then has more memory reads in flight than with one run. With more than two
    # runs its prefetcher loses track of their pages.
    zero = codes.dtype.type(0)
    every = zero
    run = rows.shape[0] // 2
    for row in range(run):
        near, far, code, far_code = rows[row], rows[row + run], codes[row], codes[row + run]
        bits, far_bits = zero, zero
        for at in range(mask.shape[0]):
            bits |= near[at] ^ mask[at] ^ code
            far_bits |= far[at] ^ mask[at] ^ far_code
        differing[row], differing[row + run] = bits != 0, far_bits != 0
        every |= bits | far_bits
    for row in range(2 * run, rows.shape[0]):
        bits = zero
        for at in range(mask.shape[0]):
            bits |= rows[row, at] ^ mask[at] ^ codes[row]
        differing[row] = bits != 0
        every |= bits
    return every != 0


def _verify_digest(rows, codes, mask, differing, start):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    every = np.uint64(0)
    for row in range(rows.shape[0]):
        bits = np.uint64(0)
        for at in range(rows.shape[1]):
            word = rows[row, at]
            bits |= word ^ mask[at] ^ codes[row]
            total += folded(word, start + np.uint64(at) * GOLDEN)
        differing[row] = bits != 0
        every |= bits
        start += np.uint64(rows.shape[1]) * GOLDEN
    return every != 0, total


_FILL_DIGEST = numba.njit(nogil=True)(_fill_digest)
_VERIFY = numba.njit(nogil=True)(_verify)
_VERIFY_DIGEST = numba.njit(nogil=True)(_verify_digest)
