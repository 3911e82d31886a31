"""Runtime: what vLLM wants to have been set before a block can be hashed.

Invariants:
- The same hash function begins the chain of blocks and continues it, as in the engine.
"""

from __future__ import annotations

from kvcheck.core.probes.frame.names import Names

HASHES = ("hash.function", "hash.begin", "hash.blocks")


def prepare(names: Names) -> None:
    """Begin the chain of hashes, where a release has one to begin."""
    if names.has("hash.begin") and names.has("hash.function"):
        names["hash.begin"](names["hash.function"])
