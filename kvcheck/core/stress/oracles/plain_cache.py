"""PlainCache: a cache of pages that gives up the least recently used one and never locks, to compare hits with.

Invariants:
- It holds at most as many pages as the tiers' largest, and serves whole prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable


class PlainCache:
    """So many pages, by their hashes; the first of the dict is the next to go."""

    def __init__(self, pages: int) -> None:
        self._room = pages
        self._held: dict[bytes, None] = {}

    def look_up(self, chain: tuple[bytes, ...]) -> int:
        """Leading pages of a prompt that it holds. They are used by that."""
        found = next((at for at, each in enumerate(chain) if each not in self._held), len(chain))
        self._use(chain[:found])
        return found

    def keep(self, chain: tuple[bytes, ...]) -> None:
        """Hold a prefix that was computed."""
        self._use(chain)
        while len(self._held) > self._room:
            del self._held[next(iter(self._held))]

    def _use(self, chain: Iterable[bytes]) -> None:
        """The end of a prefix goes before what lies before it."""
        for each in reversed([*chain]):
            self._held.pop(each, None)
            self._held[each] = None
