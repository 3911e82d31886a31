"""A keyed digest of words that depends on every word's value, place and key.

digest = sum over i of mix64(word[i] + mix64(start(key) + (first + i) * GOLDEN)), modulo 2**64.

Invariants:
- Integer arithmetic that wraps, exact and the same on every device and in every order of the sum.
- mix64 is a bijection, so a change of a single word always changes the digest; any other change goes unseen by chance
  alone, once in 2**64. It is no protection from somebody who means to forge one.
- Digests of parts add up to the digest of the whole, if each part says where it starts.
- A zero word counts: a word left out is seen, whatever it was.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

import torch

from kvcheck.kernels.content import as_signed, mix64_int, mix64_torch

GOLDEN = 0x9E3779B97F4A7C15
_KEYED = 0xD1B54A32D192ED03
_U64 = (1 << 64) - 1


def digest_torch(words: torch.Tensor, *, key: int, first: int = 0) -> torch.Tensor:
    """Digest of int64 `words` [n], the first of which has place `first` under `key`: an int64 scalar, there.

    key: any unsigned 64-bit value; neighbouring keys have nothing in common. Nothing waits for the device.
    """
    assert words.dtype == torch.int64 and words.ndim == 1, f"words are int64 [n], got {words.dtype}{[*words.shape]}"
    places = torch.arange(len(words), device=words.device) * as_signed(GOLDEN) + as_signed(start_of(key, first))
    return combined(mix64_torch(words + mix64_torch(places)))


def digest(words: torch.Tensor, *, key: int, first: int = 0) -> torch.Tensor:
    """digest_torch by one pass over the words, where triton is installed; on CPU tensors where it is loaded."""
    if _has_kernel(words):
        from kvcheck.kernels import digest_triton

        if words.is_cuda or digest_triton.IS_INTERPRETED:
            return combined(digest_triton.partial_digests_triton(words, as_signed(start_of(key, first))))
    return digest_torch(words, key=key, first=first)


def digest_int(words: Sequence[int], *, key: int, first: int = 0) -> int:
    """digest_torch of a few words on the host, signed or not; the result is unsigned."""
    start = start_of(key, first)
    places = (mix64_int((start + at * GOLDEN) & _U64) for at in range(len(words)))
    return sum(mix64_int((word + place) & _U64) for word, place in zip(words, places, strict=True)) & _U64


def combined(parts: torch.Tensor) -> torch.Tensor:
    """The digest of the whole from those of its parts, int64 of any shape: an int64 scalar."""
    return parts.sum()


def start_of(key: int, first: int) -> int:
    """What the place `first` adds under `key`, unsigned: keys are mixed, so that no key continues its neighbour."""
    assert 0 <= key <= _U64 and first >= 0, f"key is an unsigned 64-bit value and first at least 0, got {key}, {first}"
    return (mix64_int(key ^ _KEYED) + first * GOLDEN) & _U64


def _has_kernel(words: torch.Tensor) -> bool:
    """Whether to ask for triton: it takes long to import, so words on the CPU do not load it."""
    if words.is_cuda:
        return importlib.util.find_spec("triton") is not None
    return "triton" in sys.modules
