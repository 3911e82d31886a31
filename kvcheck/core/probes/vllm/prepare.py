"""Prepare: settings that vLLM needs before it can hash a block."""

from __future__ import annotations

from kvcheck.core.probes.frame.names import Names

HASHES = ("hash.function", "hash.begin", "hash.blocks")


def prepare(names: Names) -> None:
    """Set the first hash of every chain, in releases that have one, with the hash function that continues the chain."""
    if names.has("hash.begin") and names.has("hash.function"):
        names["hash.begin"](names["hash.function"])
