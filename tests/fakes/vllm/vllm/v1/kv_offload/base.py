"""Stand-in."""

from dataclasses import dataclass
from enum import Enum, auto


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()


@dataclass
class ReqContext:
    req_id: str


def make_offload_key(block_hash, group_idx):
    return block_hash + bytes([group_idx])
