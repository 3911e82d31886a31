"""Stand-in."""

from dataclasses import dataclass


@dataclass
class FullAttentionSpec:
    block_size: int
    page_size_bytes = 32


@dataclass
class KVCacheTensor:
    size: int
    layers: list


@dataclass
class KVCacheGroupSpec:
    layer_names: list
    kv_cache_spec: FullAttentionSpec


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list
    kv_cache_groups: list
