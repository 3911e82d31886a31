"""digest_torch and digest_rows_torch as compiled loops over host memory.

Invariants:
- All constants are unsigned 64-bit, because numba turns a signed and an unsigned operand into a float.
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
    """Digest of int64 `words` [n] on the CPU; start: the unsigned term of the first place."""
    return torch.tensor(as_signed(int(_DIGEST(words.numpy().view(np.uint64), np.uint64(start)))))


def digest_rows_numba(source: torch.Tensor, rows: torch.Tensor, start: int) -> torch.Tensor:
    layers, wide = source.shape[0], source.shape[2]
    # The words of a row lie side by side, so the inner loop runs over neighbours.
    span = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    words = source.as_strided((span,), (1,)).numpy().view(np.uint64)
    layer_stride, row_stride = source.stride(0), source.stride(1)
    total = _DIGEST_ROWS(words, rows.numpy(), layers, layer_stride, row_stride, wide, np.uint64(start))
    return torch.tensor(as_signed(int(total)))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def folded(word: np.uint64, place: np.uint64) -> np.uint64:
    """The term of one word; place: start of the key + place * GOLDEN."""
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


def _digest_rows(words, rows, layers, layer_stride, row_stride, wide, start):  # type: ignore[no-untyped-def]
    total = _0
    for layer in range(layers):
        for at in range(len(rows)):
            begin = layer * layer_stride + rows[at] * row_stride
            row = words[begin : begin + wide]
            for place in range(wide):
                total += folded(row[place], start + np.uint64(place) * GOLDEN)
            start += np.uint64(wide) * GOLDEN
    return total


_DIGEST_ROWS = numba.njit(nogil=True)(_digest_rows)
_DIGEST = numba.njit(nogil=True)(_digest)
