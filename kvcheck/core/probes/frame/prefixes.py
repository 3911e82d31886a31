"""Prefixes: pages by cached prefix, kept in a dictionary beside the engine's own prefix cache.

A page holds a prefix from `register` until it is handed out again or the cache is flushed. Keys are whole tuples of
tokens, not the engine's hashes, chains and trees.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixPages:
    """Pages by the prefix whose last tokens they hold. size: tokens of a page."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pages: dict[tuple[int, ...], set[int]] = {}
        self._prefix: dict[int, tuple[int, ...]] = {}

    def hit(self, tokens: Sequence[int]) -> int:
        """Pages of the longest cached prefix. The last token is always computed again, so it is no part of a hit."""
        count = 0
        while (count + 1) * self._size < len(tokens) and self._pages.get(tuple(tokens[: (count + 1) * self._size])):
            count += 1
        return count

    def holds(self, tokens: Sequence[int], page: int) -> bool:
        return self._prefix.get(page) == tuple(tokens)

    def hand_out(self, page: int) -> bool:
        """Return whether a cached prefix was lost."""
        prefix = self._prefix.pop(page, None)
        if prefix is None:
            return False
        self._pages[prefix].discard(page)
        return True

    def register(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        for place in range(len(tokens) // self._size):
            prefix, page = tuple(tokens[: (place + 1) * self._size]), table[place]
            if self._prefix.get(page) != prefix:
                self.hand_out(page)
                self._prefix[page] = prefix
                self._pages.setdefault(prefix, set()).add(page)

    def clear(self) -> None:
        self._pages.clear()
        self._prefix.clear()
