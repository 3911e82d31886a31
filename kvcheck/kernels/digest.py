"""A keyed digest of words that depends on every word's value, place and key.

digest = sum over i of mix64(word[i] + mix64(start(key) + (first + i) * GOLDEN)), modulo 2**64.

Invariants:
- Integer arithmetic that wraps: the same on every device and in every order of the sum.
- mix64 is a bijection, so a change of a single word always changes the digest. Any other change is missed with
  probability 2**-64. There is no protection from deliberate forgery.
- Digests of sections add up to the digest of the whole if each section gives its `first`.
- Zero words count too, so a missing word changes the digest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvcheck.kernels.compilers import asks_numba, asks_triton
from kvcheck.kernels.content import as_signed, mix64_int, mix64_torch

GOLDEN = 0x9E3779B97F4A7C15
_KEYED = 0xD1B54A32D192ED03
_U64 = (1 << 64) - 1
_STEPS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
BLOCK_WORDS = 32768
"""Words that digest_blocks works on at a time: two blocks and the words themselves fit the L2 cache."""

FEW_WORDS = 8
"""Most host words for which Python integers are faster: blocks take tens of microseconds to begin."""


def digest_torch(words: torch.Tensor, *, key: int, first: int = 0) -> torch.Tensor:
    """Digest of int64 `words` [n], the first of which has place `first` under `key`: an int64 scalar on their device.

    key: any unsigned 64-bit value; the digests of neighbouring keys are independent.
    """
    _check_words(words)
    places = torch.arange(len(words), device=words.device) * as_signed(GOLDEN) + as_signed(start_of(key, first))
    return combined(mix64_torch(words + mix64_torch(places)))


def digest(words: torch.Tensor, *, key: int, first: int = 0) -> torch.Tensor:
    _check_words(words)
    if asks_triton(words):
        from kvcheck.kernels import digest_triton

        if words.is_cuda or digest_triton.IS_INTERPRETED:
            return combined(digest_triton.partial_digests_triton(words, as_signed(start_of(key, first))))
    if words.device.type != "cpu":
        return digest_torch(words, key=key, first=first)
    if len(words) <= FEW_WORDS:
        return torch.tensor(as_signed(digest_int(words.tolist(), key=key, first=first)))
    if asks_numba(words):
        from kvcheck.kernels.digest_numba import digest_numba

        return digest_numba(words, start_of(key, first))
    return digest_blocks(words, key=key, first=first)


def digest_blocks(words: torch.Tensor, *, key: int, first: int = 0) -> torch.Tensor:
    _check_words(words)
    seen, start, total = words.numpy().view(np.uint64), start_of(key, first), 0
    block = min(len(seen), BLOCK_WORDS)
    ramp = np.arange(block, dtype=np.uint64) * np.uint64(GOLDEN)
    sums, scratch = np.empty_like(ramp), np.empty_like(ramp)
    for at in range(0, len(seen), BLOCK_WORDS):
        part = seen[at : at + BLOCK_WORDS]
        into, spare = sums[: len(part)], scratch[: len(part)]
        np.add(ramp[: len(part)], np.uint64((start + at * GOLDEN) & _U64), out=into)
        _mix64_in_place(into, spare)
        np.add(into, part, out=into)
        _mix64_in_place(into, spare)
        total += int(np.add.reduce(into))
    return torch.tensor(as_signed(total & _U64))


def digest_int(words: Sequence[int], *, key: int, first: int = 0) -> int:
    """digest_torch of a few host words, signed or not; the result is unsigned."""
    start = start_of(key, first)
    places = (mix64_int((start + at * GOLDEN) & _U64) for at in range(len(words)))
    return sum(mix64_int((word + place) & _U64) for word, place in zip(words, places, strict=True)) & _U64


def combined(parts: torch.Tensor) -> torch.Tensor:
    return parts.sum()


def start_of(key: int, first: int) -> int:
    """The unsigned term of place `first`. Keys are mixed, so that neighbouring keys have unrelated starts."""
    assert 0 <= key <= _U64 and first >= 0, f"key is an unsigned 64-bit value and first at least 0, got {key}, {first}"
    return (mix64_int(key ^ _KEYED) + first * GOLDEN) & _U64


def _check_words(words: torch.Tensor) -> None:
    assert words.dtype == torch.int64 and words.ndim == 1, f"words are int64 [n], got {words.dtype}{[*words.shape]}"


def _mix64_in_place(values: npt.NDArray[np.uint64], spare: npt.NDArray[np.uint64]) -> None:
    for shift, factor in _STEPS:
        np.right_shift(values, shift, out=spare)
        np.bitwise_xor(values, spare, out=values)
        np.multiply(values, factor, out=values)
    np.right_shift(values, _LAST_SHIFT, out=spare)
    np.bitwise_xor(values, spare, out=values)
