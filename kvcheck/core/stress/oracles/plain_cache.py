"""PlainCache: an LRU cache without locks, as large as the larger tier, for a comparison of hits."""

from __future__ import annotations

from collections.abc import Iterable


class PlainCache:
    def __init__(self, pages: int) -> None:
        self._room = pages
        self._held: dict[bytes, None] = {}

    def look_up(self, chain: tuple[bytes, ...]) -> int:
        found = next((at for at, each in enumerate(chain) if each not in self._held), len(chain))
        self._use(chain[:found])
        return found

    def keep(self, chain: tuple[bytes, ...]) -> None:
        self._use(chain)
        while len(self._held) > self._room:
            del self._held[next(iter(self._held))]

    def _use(self, chain: Iterable[bytes]) -> None:
        """The end of a prefix is evicted before its beginning."""
        for each in reversed([*chain]):
            self._held.pop(each, None)
            self._held[each] = None
