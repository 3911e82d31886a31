"""Stand-in."""

from dataclasses import dataclass
from types import SimpleNamespace as VllmConfig  # noqa: F401
from typing import Any


@dataclass
class ModelConfig:
    model: str


@dataclass
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int


@dataclass
class CacheConfig:
    block_size: int


@dataclass
class SpeculativeConfig:
    method: str
    model: str
    num_speculative_tokens: int
    target_model_config: Any
    target_parallel_config: Any


@dataclass
class ParallelConfig:
    """One rank."""


@dataclass
class KVTransferConfig:
    kv_connector: str
    kv_role: str
    engine_id: str
    kv_connector_extra_config: dict


@dataclass
class DeviceConfig:
    device: Any
