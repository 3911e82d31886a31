"""The content rule: every word of KV, state and metadata encodes its request, position and place.

word = mix64(tag) XOR mask(space, buffer, piece, layer, word index),   tag = request:24 | attempt:8 | position:32

Invariants:
- One 64-bit word names its owner: the rule is a bijection in the tag. 32-bit words keep the low half and are resolved
  by trying the tags of the run.
- At another buffer, layer or index a word decodes to no owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from kvcheck.kernels.content import as_signed, mix64_int, mix64_torch, unmix64_int

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
POISON_WORD = as_signed(0xA5A5A5A5A5A5A5A5)
POISON_HALF = POISON_WORD >> 32


@dataclass(frozen=True, slots=True)
class Tag:
    """The owner of a word. position: of a token, or a state version."""

    request: int
    attempt: int
    position: int

    def packed(self) -> int:
        return (self.request << 40) | (self.attempt << 32) | self.position


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a word. first_word: index in the model's whole row at which a rank's row begins."""

    space: str
    buffer: str
    piece: str
    layer: int
    first_word: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSites:
    """The sites of one buffer's rows, or of one piece of its packed pages, in the whole model.

    layers: global ids. words: of a whole row, over all ranks. heads: equal runs of words; 1 if heads do not split it.
    is_half: words have 32 bits.
    """

    space: str
    buffer: str
    piece: str
    layers: tuple[int, ...]
    words: int
    heads: int = 1
    is_half: bool = False

    def site(self, layer: int) -> Site:
        return Site(self.space, self.buffer, self.piece, layer)


def codes(authors: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
    """mix64(tag) of first attempts. authors, positions: [T]. Returns [T] int64."""
    return mix64_torch(torch.from_numpy((authors << 40) | positions))


@lru_cache(maxsize=1024)
def mask(site: Site, words: int) -> torch.Tensor:
    """The masks of a row's words: [W] int64, cached and shared; never write it."""
    places = np.arange(1, words + 1, dtype=np.uint64) + np.uint64(site.first_word)
    counts = places * np.uint64(_GOLDEN) ^ np.uint64(_site_key(site))
    return mix64_torch(torch.from_numpy(counts.view(np.int64)))


def word(tag: Tag, site: Site, index: int) -> int:
    return as_signed(mix64_int(tag.packed()) ^ _mask_int(site, index))


def decode(value: int, site: Site, index: int, *, requests: int) -> Tag | None:
    """The tag of a signed 64-bit word at that place; None if it carries no tag of this run."""
    packed = unmix64_int((value & _U64) ^ _mask_int(site, index))
    tag = Tag(packed >> 40, (packed >> 32) & 0xFF, packed & 0xFFFFFFFF)
    plausible = 1 <= tag.request <= requests and tag.attempt == 0 and tag.position < 1 << 22
    return tag if plausible else None


def decode_half(
    value: int, site: Site, index: int, *, requests: int, positions: int, first: Sequence[int] = ()
) -> Tag | None:
    """The tag whose word has that low half (32 bits, signed). Tries all tags, requests `first` first."""
    wanted = ((value ^ _mask_int(site, index)) & 0xFFFFFFFF) - (1 << 32)
    wanted = wanted + (1 << 32) if wanted < -(1 << 31) else wanted
    for request in (*first, *range(1, requests + 1)):
        at = np.arange(positions, dtype=np.int64)
        halves = codes(np.full(positions, request, dtype=np.int64), at).view(torch.int32)[::2]
        hits = torch.nonzero(halves == wanted)
        if len(hits):
            return Tag(request, 0, int(hits[0, 0]))
    return None


@lru_cache(maxsize=1024)
def _site_key(site: Site) -> int:
    """FNV-1a over the site's names, mixed with the layer."""
    key = 0xCBF29CE484222325
    for byte in f"{site.space}/{site.buffer}/{site.piece}".encode():
        key = ((key ^ byte) * 0x100000001B3) & _U64
    return mix64_int((key + (site.layer + 1) * _GOLDEN) & _U64)


def _mask_int(site: Site, index: int) -> int:
    return mix64_int((((site.first_word + index + 1) * _GOLDEN) & _U64) ^ _site_key(site))


def codes_of(request: int) -> int:
    """The code of a request's metadata: mix64(tag) at position 0, signed."""
    return as_signed(mix64_int(Tag(request, 0, 0).packed()))
