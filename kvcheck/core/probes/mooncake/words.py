"""Words: the content of writes. Each 64-bit word encodes its owner, the generation of the write, and its place.

    word = owner:8 | generation:24 | place:32        place: the number of the word in its peer's region

An unwritten word is 0, and no write has generation 0.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

WORD = 8
MOST_GENERATIONS = 1 << 24
MOST_WORDS = 1 << 10
_LOW = 0 if sys.byteorder == "little" else 1


class WordPlaces:
    def __init__(self, region_bytes: int) -> None:
        self._places = array("I", range(region_bytes // WORD))

    def content(self, *, owner: int, generation: int, at: int, size: int) -> memoryview:
        assert at % WORD == 0 and 0 < generation < MOST_GENERATIONS and 0 < owner < 256
        first, count = at // WORD, -(-size // WORD)
        words = array("I", bytes(WORD * count))
        words[_LOW::2] = self._places[first : first + count]
        words[1 - _LOW :: 2] = array("I", [owner << 24 | generation]) * count
        return memoryview(words).cast("B")[:size]


@dataclass(frozen=True, slots=True)
class HeldWords:
    """Content of bytes, in words. wanted: of the expected owner and generation. older, newer: of other generations of
    that owner. unwritten: 0. strange: of no write."""

    words: int
    wanted: int = 0
    older: int = 0
    newer: int = 0
    foreign: int = 0
    misplaced: int = 0
    unwritten: int = 0
    strange: int = 0

    def text(self) -> str:
        parts = {
            "of this write": self.wanted,
            "of earlier writes": self.older,
            "of later writes": self.newer,
            "of another peer": self.foreign,
            "of another place": self.misplaced,
            "that nobody wrote": self.unwritten,
            "of no write": self.strange,
        }
        return (
            ", ".join(f"{count} {name}" for name, count in parts.items() if count)
            + f", of {self.words} words looked at"
        )


def generation_of(content: bytes) -> int:
    return array("I", content[:WORD])[1 - _LOW] & (MOST_GENERATIONS - 1)


def held(
    seen: bytes,
    *,
    owner: int,
    generation: int,
    at: int,
    owners: int,
    latest: int,
    before: bytes,
    after: bytes | None = None,
) -> HeldWords:
    """Classify the whole words of `seen`, which lies at `at`. owners, latest: highest owner and generation of any
    write.

    before: the former content. after: the written content; None: unchanged words are right, and only others are
    counted. A cut word has landed in part. Of many words about MOST_WORDS are classified.
    """
    count = len(seen) // WORD
    halves = array("I", seen[: count * WORD])
    counts = dict.fromkeys(("wanted", "older", "newer", "foreign", "misplaced", "unwritten", "strange"), 0)
    for number in range(0, count, max(1, count // MOST_WORDS)):
        start = number * WORD
        word, old = seen[start : start + WORD], before[start : start + WORD]
        if after is None and word == old:
            continue
        place, tag = halves[2 * number + _LOW], halves[2 * number + 1 - _LOW]
        kind = _kind(place, tag, at // WORD + number, owner, generation, owners, latest)
        if kind not in ("wanted", "unwritten") and after is not None:
            kind = "older" if word == old else "wanted" if _is_cut(word, old, after[start : start + WORD]) else kind
        counts[kind] += 1
    return HeldWords(sum(counts.values()), **counts)


def _is_cut(word: bytes, old: bytes, new: bytes) -> bool:
    return all(byte in pair for byte, *pair in zip(word, old, new, strict=True))


def _kind(place: int, tag: int, expected: int, owner: int, generation: int, owners: int, latest: int) -> str:
    if not place and not tag:
        return "unwritten"
    whose, when = tag >> 24, tag & (MOST_GENERATIONS - 1)
    if not (0 < whose <= owners and 0 < when <= latest):
        return "strange"
    if whose != owner:
        return "foreign"
    if place != expected:
        return "misplaced"
    return "wanted" if when == generation else "older" if when < generation else "newer"
