"""Mamba hybrid pools: attention pages, and one slot of conv and ssm state a request.

Invariants:
- A slot is overwritten in place at every step: the version of its content is the number of tokens absorbed.
"""

from __future__ import annotations

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, SpaceSpec
from kvcheck.core.cache.pools.mha import kv_buffers
from kvcheck.core.cache.pools.shape import ModelShape


def mamba_spaces(shape: ModelShape) -> tuple[SpaceSpec, ...]:
    if shape.ssm_heads < 1 or shape.conv_dim % shape.ssm_heads:
        raise LayoutMismatch(
            f"shape {shape.name}: conv_dim must be a multiple of ssm_heads, got {shape.conv_dim} and {shape.ssm_heads}"
        )
    conv = BufferSpec(
        name="conv",
        rows=Granularity.SLOT,
        item_shape=(shape.conv_dim, shape.conv_kernel - 1),
        dtype=shape.conv_dtype,
        shards=shape.ssm_heads,
    )
    ssm = BufferSpec(
        name="ssm",
        rows=Granularity.SLOT,
        item_shape=(shape.ssm_heads, shape.ssm_key_dim, shape.ssm_value_dim),
        dtype=shape.ssm_dtype,
        shards=shape.ssm_heads,
    )
    return (
        SpaceSpec(name="full", unit=Granularity.PAGE, layers=shape.full_layers, buffers=kv_buffers(shape)),
        SpaceSpec(name="state", unit=Granularity.SLOT, layers=shape.state_layers, buffers=(conv, ssm)),
    )
