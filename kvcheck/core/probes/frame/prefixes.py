"""Prefixes: what a prefix cache of whole pages has to know, kept in a dictionary beside the engine's.

Invariants:
- A page stands for a prefix from when it was registered until it is handed out again or the cache is emptied.
- Whole tuples of tokens are keys: nothing of the engine's hashes, chains or trees is believed.
"""

from __future__ import annotations

from collections.abc import Sequence


class Prefixes:
    """Pages by the prefix whose end they hold. size: tokens of a page."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pages: dict[tuple[int, ...], set[int]] = {}
        self._prefix: dict[int, tuple[int, ...]] = {}

    def hit(self, tokens: Sequence[int]) -> int:
        """How many pages of these tokens are there; the last token is always computed again."""
        count = 0
        while (count + 1) * self._size < len(tokens) and self._pages.get(tuple(tokens[: (count + 1) * self._size])):
            count += 1
        return count

    def holds(self, tokens: Sequence[int], page: int) -> bool:
        """Whether the page stands for exactly this prefix."""
        return self._prefix.get(page) == tuple(tokens)

    def hand_out(self, page: int) -> bool:
        """The page gets a new owner; whether a prefix is lost by it."""
        prefix = self._prefix.pop(page, None)
        if prefix is None:
            return False
        self._pages[prefix].discard(page)
        return True

    def register(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """These tokens are computed, or will be before the step is over, in the pages of this table."""
        for place in range(len(tokens) // self._size):
            prefix, page = tuple(tokens[: (place + 1) * self._size]), table[place]
            if self._prefix.get(page) != prefix:
                self.hand_out(page)
                self._prefix[page] = prefix
                self._pages.setdefault(prefix, set()).add(page)

    def clear(self) -> None:
        """The cache was emptied."""
        self._pages.clear()
        self._prefix.clear()
