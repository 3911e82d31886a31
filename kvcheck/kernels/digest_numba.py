"""The digest as one compiled loop over host memory; importing this module needs numba.

Invariants:
- It means what `digest_torch` means, for words of any stride.
- All constants are unsigned 64-bit: numba makes a float of a signed and an unsigned operand.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvcheck.kernels.content import as_signed

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _0 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(0)


def digest_numba(words: torch.Tensor, start: int) -> torch.Tensor:
    """Digest of int64 `words` [n] on the CPU; start: what the place of the first of them adds, unsigned."""
    return torch.tensor(as_signed(int(_DIGEST(words.numpy().view(np.uint64), np.uint64(start)))))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def folded(word: np.uint64, place: np.uint64) -> np.uint64:
    """What one word adds to a digest; place: the start of the key plus its place times the golden constant."""
    place = (place ^ (place >> _30)) * _M1
    place = (place ^ (place >> _27)) * _M2
    word = word + (place ^ (place >> _31))
    word = (word ^ (word >> _30)) * _M1
    word = (word ^ (word >> _27)) * _M2
    return word ^ (word >> _31)


def _digest(words, start):  # type: ignore[no-untyped-def]
    total = _0
    for at in range(len(words)):
        total += folded(words[at], start + np.uint64(at) * GOLDEN)
    return total


_DIGEST = numba.njit(nogil=True)(_digest)
