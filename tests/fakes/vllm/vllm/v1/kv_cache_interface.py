"""Stand-in."""

from dataclasses import dataclass


@dataclass
class FullAttentionSpec:
    """Size of a block."""

    block_size: int
    page_size_bytes = 32


@dataclass
class KVCacheTensor:
    """Where a layer lies."""

    size: int
    layers: list


@dataclass
class KVCacheGroupSpec:
    """Layers that share a table."""

    layer_names: list
    kv_cache_spec: FullAttentionSpec


@dataclass
class KVCacheConfig:
    """Blocks and groups."""

    num_blocks: int
    kv_cache_tensors: list
    kv_cache_groups: list
