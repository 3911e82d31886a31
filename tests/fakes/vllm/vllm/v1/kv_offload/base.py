"""Stand-in."""

from dataclasses import dataclass
from enum import Enum, auto


class LookupResult(Enum):
    """What a lookup says."""

    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()


@dataclass
class ReqContext:
    """A request."""

    req_id: str


def make_offload_key(block_hash, group_idx):
    """Of a chunk."""
    return block_hash + bytes([group_idx])
