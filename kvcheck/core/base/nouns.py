"""Counted nouns: "1 cell", "24 cells", "2 processes", "2 planned schedules".

Invariants:
- Every text for people that counts something takes its noun from here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

VOWELS = frozenset("aeiou")
HISSING = ("s", "x", "z", "ch", "sh")


def counted(number: int, noun: str) -> str:
    return f"{number:,} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    if number == 1:
        return noun
    if noun.endswith("y") and noun[-2:-1] not in VOWELS:
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(HISSING) else f"{noun}s"


def some_of(names: Sequence[str], most: int) -> str:
    """Return "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def span(numbers: Collection[int]) -> str:
    """Return "3", or "3 to 12"; "" for none."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)}))) if numbers else ""


def counted_field(number: int, name: str) -> str:
    """A count of a record in words: "1 host eviction during load" of host_evictions_during_load."""
    words = name.split("_")
    if number == 1:
        words = [_singular(word) for word in words]
    return f"{number:,} {' '.join(words)}"


def _singular(word: str) -> str:
    return f"{word[:-3]}y" if word.endswith("ies") else word.removesuffix("s")
