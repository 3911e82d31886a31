"""MHA and GQA pools: keys and values a token, with their scales as buffers when rows are 8-bit.

Invariants:
- Scales are rows of the same table as the payload they belong to.
"""

from __future__ import annotations

import torch

from kvcheck.core.pools.buffers import BufferSpec, Granularity, SpaceSpec
from kvcheck.core.pools.shape import ModelShape


def kv_buffers(shape: ModelShape) -> tuple[BufferSpec, ...]:
    """k and v rows [heads, dim]; with scale_block, one fp32 scale for each `scale_block` elements."""
    value_dim = shape.v_head_dim or shape.head_dim
    rows = [
        BufferSpec(
            name="k", rows=Granularity.TOKEN, item_shape=(shape.num_kv_heads, shape.head_dim), dtype=shape.kv_dtype
        ),
        BufferSpec(name="v", rows=Granularity.TOKEN, item_shape=(shape.num_kv_heads, value_dim), dtype=shape.kv_dtype),
    ]
    if shape.scale_block:
        for name, dim in (("k_scale", shape.head_dim), ("v_scale", value_dim)):
            scales = shape.num_kv_heads * dim // shape.scale_block
            rows.append(BufferSpec(name=name, rows=Granularity.TOKEN, item_shape=(scales,), dtype=torch.float32))
    return tuple(rows)


def mha_spaces(shape: ModelShape) -> tuple[SpaceSpec, ...]:
    """One space of pages over all layers."""
    return (SpaceSpec(name="full", unit=Granularity.PAGE, layers=shape.full_layers, buffers=kv_buffers(shape)),)
