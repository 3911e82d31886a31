"""Stand-in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheEngineKey:
    chunk_hash: int
    fmt: str
