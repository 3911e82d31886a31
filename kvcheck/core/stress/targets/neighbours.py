"""Neighbours: engines of another model, dtype, layout or rank that keep pages of the same prompts in the same store.

Their objects are as long as the engine's, so only the key keeps them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from kvcheck.core.cache.hicache.storage import Namespace, PageStore

KeyOf = Callable[[Namespace, str, bytes], str]
"""See StorageTier.key_of."""


def others_of(mine: Namespace) -> tuple[Namespace, ...]:
    """Namespaces that differ from `mine` in one field each, but not in the page size, by which hashes differ
    already."""
    others = [replace(mine, model=f"{mine.model}-other"), replace(mine, dtype=f"{mine.dtype}-other")]
    others += [replace(mine, layout=f"{mine.layout}-other")]
    others += [replace(mine, rank=(mine.rank + 1) % mine.ranks)] if mine.ranks > 1 else []
    return tuple(others)


class Neighbours:
    """They serve prompts in turn. unit_bytes: length of an object, by space."""

    def __init__(self, store: PageStore, mine: Namespace, key_of: KeyOf, unit_bytes: Mapping[str, int]) -> None:
        self._store = store
        self._others = others_of(mine)
        self._key_of = key_of
        self._unit_bytes = dict(unit_bytes)

    def serve(self, chain: Sequence[bytes], turn: int) -> None:
        owner = self._others[turn % len(self._others)]
        for each in chain:
            for space, size in self._unit_bytes.items():
                seed = blake2b(f"{owner} {space}".encode() + each).digest()
                self._store.put(self._key_of(owner, space, each), (seed * (size // len(seed) + 1))[:size])
