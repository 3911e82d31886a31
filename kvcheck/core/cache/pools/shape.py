"""ModelShape: the dimensions of a model from which every buffer table of a pool family is derived.

Invariants:
- A shape is a value: frozen, validated when made, never read from a device.
- Layer ids are global (0 .. num_layers - 1); each layer belongs to exactly one of the three layer lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcheck.core.base.errors import LayoutMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of one model, in the field's words. Sizes are elements unless the name says bytes.

    name: preset name. family: row of POOLS (mha, mla, nsa, swa, mamba).
    page_size: tokens a page. full_layers / window_layers / state_layers: global layer ids that keep the
    whole context, a sliding window of it, or a recurrent state.
    num_kv_heads, head_dim, v_head_dim: GQA rows. latent_dim: MLA row (kv_lora_rank + qk_rope_head_dim).
    latent_row_bytes: 0, or the exact bytes of a packed latent row (656 for FP8 nope + scales + bf16 rope).
    index_head_dim, index_quant_block: NSA indexer key and its quantisation block (one fp32 scale a block).
    scale_block: 0, or elements that share one fp32 scale when kv_dtype is 8-bit (scales become buffers).
    window: tokens a window layer sees. conv_* and ssm_*: recurrent state of a linear-attention layer.
    source: where the numbers come from.
    """

    name: str
    family: str
    page_size: int
    full_layers: tuple[int, ...]
    window_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = ()
    kv_dtype: torch.dtype = torch.bfloat16
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    latent_dim: int = 0
    latent_row_bytes: int = 0
    index_head_dim: int = 0
    index_quant_block: int = 128
    scale_block: int = 0
    window: int = 0
    conv_dim: int = 0
    conv_kernel: int = 0
    conv_dtype: torch.dtype = torch.bfloat16
    ssm_heads: int = 0
    ssm_key_dim: int = 0
    ssm_value_dim: int = 0
    ssm_dtype: torch.dtype = torch.float32
    hidden_size: int = 16
    source: str = ""

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
        """All layers, whatever they keep."""
        return len(self.full_layers) + len(self.window_layers) + len(self.state_layers)
