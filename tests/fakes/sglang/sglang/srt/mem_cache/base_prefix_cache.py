"""What a tree is asked with, and what it answers."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class InsertParams:
    key: Any
    value: Any = None
    mamba_value: Any = None


@dataclasses.dataclass
class MatchPrefixParams:
    key: Any


@dataclasses.dataclass
class EvictParams:
    num_tokens: int = 0
    mamba_num: int = 0


@dataclasses.dataclass
class InitLoadBackParams:
    last_host_node: Any
    host_hit_length: int
    req: Any = None


@dataclasses.dataclass
class MatchResult:
    last_device_node: Any
    last_host_node: Any
    host_hit_length: int
