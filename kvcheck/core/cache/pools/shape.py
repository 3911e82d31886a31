"""ModelShape: the dimensions of a model, from which the buffer tables of a pool are derived; the share of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcheck.core.base.errors import LayoutMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes are elements unless the name contains bytes. Layer ids are global, each in exactly one layer list."""

    name: str
    family: str  # row of POOLS
    page_size: int
    full_layers: tuple[int, ...]  # they keep the whole context
    window_layers: tuple[int, ...] = ()  # they keep a sliding window of it
    state_layers: tuple[int, ...] = ()  # they keep a recurrent state
    kv_dtype: torch.dtype = torch.bfloat16
    num_kv_heads: int = 0  # GQA rows: num_kv_heads, head_dim
    head_dim: int = 0
    latent_dim: int = 0  # MLA row: kv_lora_rank + qk_rope_head_dim
    latent_row_bytes: int = 0  # of a packed latent row: 656 for FP8 nope + scales + bf16 rope; 0: not packed
    index_head_dim: int = 0  # key of the NSA indexer
    index_quant_block: int = 128  # elements of an index key that share one fp32 scale
    scale_block: int = 0  # elements that share one fp32 scale if kv_dtype is 8-bit; 0: no scale buffers
    window: int = 0  # tokens that a window layer sees
    conv_dim: int = 0  # conv_* and ssm_*: recurrent state of a linear-attention layer
    conv_kernel: int = 0
    conv_dtype: torch.dtype = torch.bfloat16
    ssm_heads: int = 0
    ssm_key_dim: int = 0
    ssm_value_dim: int = 0
    ssm_dtype: torch.dtype = torch.float32
    hidden_size: int = 16
    source: str = ""  # origin of the numbers

    def __post_init__(self) -> None:
        layers = sorted((*self.full_layers, *self.window_layers, *self.state_layers))
        if layers != list(range(len(layers))) or not layers:
            raise LayoutMismatch(f"shape {self.name}: layer lists must partition 0..n-1, got {layers}")
        if self.page_size < 1:
            raise LayoutMismatch(f"shape {self.name}: page_size must be at least 1, got {self.page_size}")
        if self.window_layers and self.window < 1:
            raise LayoutMismatch(
                f"shape {self.name}: window layers need a window of at least 1 token, got {self.window}"
            )
        if self.index_head_dim and self.index_head_dim % self.index_quant_block:
            raise LayoutMismatch(
                f"shape {self.name}: index_head_dim {self.index_head_dim} is not a multiple of "
                f"index_quant_block {self.index_quant_block}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.full_layers) + len(self.window_layers) + len(self.state_layers)


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
