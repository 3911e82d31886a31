"""Stand-in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheEngineKey:
    """Of a chunk."""

    chunk_hash: int
    fmt: str
