"""Prefixes: what a prefix cache of whole blocks has to know, kept in a dictionary beside the engine's.

Invariants:
- A block stands for a prefix from when it was registered until it is handed out again or the cache is emptied.
- Whole tuples of tokens are keys: nothing of the engine's hashes or chains is believed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.targets.vllm.floor import BLOCK


class Prefixes:
    """Blocks by the prefix whose end they hold."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, ...], set[int]] = {}
        self._prefix: dict[int, tuple[int, ...]] = {}

    def hit(self, tokens: Sequence[int]) -> int:
        """How many blocks of these tokens are there; the last token is always computed again."""
        count = 0
        while (count + 1) * BLOCK < len(tokens) and self._blocks.get(tuple(tokens[: (count + 1) * BLOCK])):
            count += 1
        return count

    def holds(self, tokens: Sequence[int], block: int) -> bool:
        """Whether the block stands for exactly this prefix."""
        return self._prefix.get(block) == tuple(tokens)

    def hand_out(self, block: int) -> bool:
        """The block gets a new owner; whether a prefix is lost by it."""
        prefix = self._prefix.pop(block, None)
        if prefix is None:
            return False
        self._blocks[prefix].discard(block)
        return True

    def register(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """These tokens are computed, or will be before the step is over, in the blocks of this table."""
        for place in range(len(tokens) // BLOCK):
            prefix, block = tuple(tokens[: (place + 1) * BLOCK]), table[place]
            if self._prefix.get(block) != prefix:
                self.hand_out(block)
                self._prefix[block] = prefix
                self._blocks.setdefault(prefix, set()).add(block)

    def clear(self) -> None:
        """The cache was emptied."""
        self._blocks.clear()
        self._prefix.clear()
