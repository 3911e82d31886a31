"""NSA (DSA) pools: a latent row a token, and an index page of FP8 keys followed by their fp32 scales.

Invariants:
- A token's index bytes lie in the page of its latent row, so both share page ids.
"""

from __future__ import annotations

import torch

from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, Piece, SpaceSpec
from kvcheck.core.cache.pools.mla import latent_buffer
from kvcheck.core.cache.pools.shape import ModelShape


def nsa_spaces(shape: ModelShape) -> tuple[SpaceSpec, ...]:
    # Index page of 64 tokens and 128-byte keys, 8448 bytes:
    #     [0, 8192)      keys,   token o at [128 * o, 128 * o + 128)
    #     [8192, 8448)   scales, token o at [8192 + 4 * o, 8192 + 4 * o + 4)
    key_bytes = shape.index_head_dim
    scale_bytes = shape.index_head_dim // shape.index_quant_block * 4
    index = BufferSpec(
        name="index_k_with_scale",
        rows=Granularity.PAGE,
        item_shape=(shape.page_size * (key_bytes + scale_bytes),),
        dtype=torch.uint8,
        pieces=(Piece("key", 0, key_bytes), Piece("scale", shape.page_size * key_bytes, scale_bytes)),
    )
    return (
        SpaceSpec(name="full", unit=Granularity.PAGE, layers=shape.full_layers, buffers=(latent_buffer(shape), index)),
    )
