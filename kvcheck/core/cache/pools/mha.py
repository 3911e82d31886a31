"""MHA and GQA pools: keys and values of each token, with their scales as buffers if rows are 8-bit."""

from __future__ import annotations

from math import gcd

import torch

from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, SpaceSpec
from kvcheck.core.cache.pools.shape import ModelShape


def kv_buffers(shape: ModelShape) -> tuple[BufferSpec, ...]:
    """k and v rows [heads, dim]; with scale_block, one fp32 scale for each `scale_block` elements.

    A shard holds whole heads, and no head lies in two shards.
    """
    rows = [
        BufferSpec(
            name=name,
            rows=Granularity.TOKEN,
            item_shape=(shape.num_kv_heads, shape.head_dim),
            dtype=shape.kv_dtype,
            shards=shape.num_kv_heads,
        )
        for name in ("k", "v")
    ]
    if shape.scale_block:
        scales = shape.num_kv_heads * shape.head_dim // shape.scale_block
        # One head may have a single scale of 4 bytes; a shard is whole heads and whole words of 8 bytes.
        shards = gcd(shape.num_kv_heads, scales * 4 // 8)
        rows += [
            BufferSpec(name=name, rows=Granularity.TOKEN, item_shape=(scales,), dtype=torch.float32, shards=shards)
            for name in ("k_scale", "v_scale")
        ]
    return tuple(rows)


def mha_spaces(shape: ModelShape) -> tuple[SpaceSpec, ...]:
    return (SpaceSpec(name="full", unit=Granularity.PAGE, layers=shape.full_layers, buffers=kv_buffers(shape)),)
