"""Shards of a row under tensor parallelism: the shards of each rank, and the shape of one rank."""

from __future__ import annotations

from dataclasses import replace

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.pools.shape import ModelShape


def rank_shape(shape: ModelShape, rank: int, size: int) -> ModelShape:
    """Dimensions on rank `rank` of `size`: its heads; latents and index keys are whole on every rank."""
    if shape.ssm_heads and shape.conv_dim % shape.ssm_heads:
        raise LayoutMismatch(
            f"shape {shape.name}: conv_dim must be a multiple of ssm_heads to be dealt out with them, got "
            f"{shape.conv_dim} and {shape.ssm_heads}"
        )
    kv_heads = len(shard_range(shape.num_kv_heads, rank, size)) if shape.num_kv_heads else 0
    ssm_heads = len(shard_range(shape.ssm_heads, rank, size)) if shape.ssm_heads else 0
    conv_dim = shape.conv_dim // shape.ssm_heads * ssm_heads if shape.ssm_heads else shape.conv_dim
    return replace(shape, num_kv_heads=kv_heads, ssm_heads=ssm_heads, conv_dim=conv_dim)


def shard_range(shards: int, rank: int, size: int) -> range:
    """Shards of a whole row on rank `rank` of `size`. Raise LayoutMismatch if neither number divides the other."""
    if shards < 1 or not 0 <= rank < size:
        raise LayoutMismatch(f"shards must be at least 1 and 0 <= rank < size, got {shards} shards, rank {rank}/{size}")
    # 8 shards on 4 ranks      0 1 | 2 3 | 4 5 | 6 7       in order
    # 2 shards on 4 ranks      0   | 0   | 1   | 1         one each, replicated on neighbouring ranks
    if size > shards:
        if size % shards:
            raise LayoutMismatch(f"{size} ranks cannot replicate {shards} shards evenly: {shards} must divide {size}")
        first = rank * shards // size
        return range(first, first + 1)
    if shards % size:
        raise LayoutMismatch(f"{shards} shards cannot be dealt out over {size} ranks: {size} must divide {shards}")
    return range(rank * shards // size, (rank + 1) * shards // size)
