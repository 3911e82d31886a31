"""MLA pools: one latent row a token. A packed FP8 row (nope, scales, rope) of DeepSeek-V3.2 has 656 bytes."""

from __future__ import annotations

import torch

from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, SpaceSpec
from kvcheck.core.cache.pools.shape import ModelShape


def latent_buffer(shape: ModelShape) -> BufferSpec:
    """[1, latent_dim] elements, or [1, latent_row_bytes] bytes if the row is packed."""
    if shape.latent_row_bytes:
        return BufferSpec(
            name="latent", rows=Granularity.TOKEN, item_shape=(1, shape.latent_row_bytes), dtype=torch.uint8
        )
    return BufferSpec(name="latent", rows=Granularity.TOKEN, item_shape=(1, shape.latent_dim), dtype=shape.kv_dtype)


def mla_spaces(shape: ModelShape) -> tuple[SpaceSpec, ...]:
    return (SpaceSpec(name="full", unit=Granularity.PAGE, layers=shape.full_layers, buffers=(latent_buffer(shape),)),)
