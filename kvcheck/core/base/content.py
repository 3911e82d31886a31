"""The content rule: every word of KV, state and metadata encodes its request, its position and its place.

`classify` gives the verdict on words that a read should not have seen. The oracle and the probes both call it.

word = mix64(tag) XOR mask(space, buffer, piece, layer, word index),   tag = request:24 | attempt:8 | position:32

Invariants:
- The rule is a bijection in the tag for 64-bit words: one word is enough to name its owner. 32-bit words keep the low
  half and are resolved by trying the tags of the run.
- Buffer, layer and word index enter through the mask: a word of another buffer, layer or place decodes to no owner.
- Words are integers from end to end.
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
    """The owner of a word: the request that wrote it, its attempt, and the token position (or state version)."""

    request: int
    attempt: int
    position: int

    def packed(self) -> int:
        """The three numbers in 64 bits, as mix64 takes them."""
        return (self.request << 40) | (self.attempt << 32) | self.position


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a word, as the mask uses it. first_word: the word of the model's whole row at which a rank's row
    begins."""

    space: str
    buffer: str
    piece: str
    layer: int
    first_word: int = 0


def codes(authors: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
    """mix64(tag) of first attempts. authors, positions: [T]. Returns [T] int64."""
    return mix64_torch(torch.from_numpy((authors << 40) | positions))


@lru_cache(maxsize=1024)
def mask(site: Site, words: int) -> torch.Tensor:
    """The masks of a row's words: [W] int64. All callers share this tensor, so nobody may write it."""
    places = np.arange(1, words + 1, dtype=np.uint64) + np.uint64(site.first_word)
    counts = places * np.uint64(_GOLDEN) ^ np.uint64(_site_key(site))
    return mix64_torch(torch.from_numpy(counts.view(np.int64)))


def word(tag: Tag, site: Site, index: int) -> int:
    """One 64-bit word by the rule, signed."""
    return as_signed(mix64_int(tag.packed()) ^ _mask_int(site, index))


def decode(value: int, site: Site, index: int, *, requests: int) -> Tag | None:
    """The tag that a 64-bit word (signed) carries at that place; None if it carries no tag of this run."""
    packed = unmix64_int((value & _U64) ^ _mask_int(site, index))
    tag = Tag(packed >> 40, (packed >> 32) & 0xFF, packed & 0xFFFFFFFF)
    plausible = 1 <= tag.request <= requests and tag.attempt == 0 and tag.position < 1 << 22
    return tag if plausible else None


def decode_half(
    value: int, site: Site, index: int, *, requests: int, positions: int, first: Sequence[int] = ()
) -> Tag | None:
    """The tag whose word has that low half (32 bits, signed), by trying all tags, requests `first` first."""
    wanted = ((value ^ _mask_int(site, index)) & 0xFFFFFFFF) - (1 << 32)
    wanted = wanted + (1 << 32) if wanted < -(1 << 31) else wanted
    for request in (*first, *range(1, requests + 1)):
        at = np.arange(positions, dtype=np.int64)
        halves = codes(np.full(positions, request, dtype=np.int64), at).view(torch.int32)[::2]
        hits = torch.nonzero(halves == wanted)
        if len(hits):
            return Tag(request, 0, int(hits[0, 0]))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a row should hold: the words that `author` wrote for `position`. request: who reads, the author or a sharer.

    is_state: the row is a recurrent state and the position counts its tokens; -1: no token has been computed.
    """

    request: int
    author: int
    position: int
    is_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The possible writers of a row: requests 1 to `requests`, or nobody. A row that nobody wrote has the words
    `unwritten`.

    positions: those to try for 32-bit words; None for 64-bit words. has_others: somebody else also writes there, with
    words that do not follow the rule.
    """

    requests: int
    unwritten: tuple[int, ...]
    positions: int | None = None
    has_others: bool = False


@dataclass(frozen=True, slots=True)
class Deviation:
    """What a row holds instead. owner: the request whose words it holds. story: a text that follows "saw" or
    "holds"."""

    code: str
    owner: int | None
    story: str


def classify(words: Sequence[int | None], site: Site, expected: Expectation, owners: Owners) -> Deviation:
    """Say what is wrong with a row that differs. words: as read, signed; None for a word that was not read."""
    read = {at: word for at, word in enumerate(words) if word is not None}
    if read and all(word in owners.unwritten for word in read.values()):
        return Deviation("KV104", None, "memory that was never written")
    tags = {at: _tag(word, site, at, expected, owners) for at, word in read.items()}
    known = [tag for tag in tags.values() if tag is not None]
    if not known:
        first = f" (first: {next(iter(read.values())) & _U64:#018x})" if read else ""
        return Deviation("KV105", None, f"words that nobody writes there{first}")
    odd = [word for at, word in read.items() if tags[at] is None]
    if set(known) == {Tag(expected.author, 0, expected.position)}:
        if not odd:
            return Deviation("KV105", None, "its own row, which ends in other bytes")
        if not owners.has_others and not any(word in owners.unwritten for word in odd):
            return Deviation("KV105", None, f"its own row with {len(odd)} words that nobody writes there")
    own = (expected.author, expected.request)
    if odd or len(set(known)) > 1:
        found = sorted({tag.request for tag in known})
        foreign = [owner for owner in found if owner not in own]
        return Deviation("KV103", foreign[0] if foreign else found[0], f"a torn row with words of requests {found}")
    tag = known[0]
    if tag.request not in own:
        return Deviation("KV102", tag.request, f"request {tag.request}'s bytes (its position {tag.position})")
    if expected.is_state and (tag.position < expected.position or expected.position < 0):
        return Deviation("KV101", tag.request, f"its own state as of token {tag.position}")
    return Deviation("KV301", tag.request, f"the bytes of position {tag.position}")


def _tag(value: int, site: Site, index: int, expected: Expectation, owners: Owners) -> Tag | None:
    if owners.positions is None:
        return decode(value, site, index, requests=owners.requests)
    likely = (expected.author, expected.request)  # 32 bits do not name one for sure
    return decode_half(value, site, index, requests=owners.requests, positions=owners.positions, first=likely)


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
    """mix64(tag) of a request at position 0, signed: the code of its metadata."""
    return as_signed(mix64_int(Tag(request, 0, 0).packed()))
