"""What a tree hands over for a side pool."""

import dataclasses
import enum
from typing import Any


class PoolName(enum.StrEnum):
    KV = "kv"
    MAMBA = "mamba"


@dataclasses.dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
