"""Attention of known-answer models in float32: what a token stores in each buffer of a pool, and how rows are read.

Invariants:
- One class for each architecture. It knows rows as the pool's buffer table has them, and no page, table or request.
- Rotary embedding and norm follow transformers' models of these architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from kvcheck.core.cache.pools.attention import AttentionInputs
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.workload.known_model import KnownModel

KEY_SHARE = 64
"""Keys of heads are stored so much smaller, and queries made so much larger. Scales of 8-bit keys are then so small
that a lookup finds nothing where one is applied twice."""
MOST_FP8 = 448.0


class KnownAttention(Protocol):
    """The attention of one architecture. x: [T, width], the residual after its norm; turned: [T] positions."""

    def stored(self, layer: int, x: torch.Tensor, turned: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What the tokens write, by buffer: [T, W] words."""

    def queries(self, layer: int, x: torch.Tensor, turned: torch.Tensor, *, reads_itself: bool) -> torch.Tensor:
        """[T, heads, D] of one request's tokens."""

    def keys_and_values(self, layer: int, rows: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, heads, D] each, of [n, W] words by buffer."""


class HeadAttention:
    """Llama: rows hold keys and values of each KV head, in 8 bits with scales beside them."""

    def __init__(self, model: KnownModel, shape: ModelShape, told: AttentionInputs) -> None:
        self._model, self._shape, self._told = model, shape, told
        self._frequencies = _frequencies(model, shape.head_dim)

    def stored(self, layer: int, x: torch.Tensor, turned: torch.Tensor) -> Mapping[str, torch.Tensor]:
        keys = self._turn(self._heads(x, self._model.weights(layer, "k_proj")), turned) / KEY_SHARE
        values = self._heads(x, self._model.weights(layer, "v_proj"))
        kept: dict[str, torch.Tensor] = {}
        for name, rows in (("k", keys), ("v", values)):
            if block := self._shape.scale_block:
                parts = rows.reshape(len(rows), -1, block)
                scales = _scales(parts)
                rows, kept[f"{name}_scale"] = parts / scales, _words(scales)
            kept[name] = _words(rows.to(self._shape.kv_dtype))
        return kept

    def queries(self, layer: int, x: torch.Tensor, turned: torch.Tensor, *, reads_itself: bool) -> torch.Tensor:
        weights = self._model.weights(layer, "q_proj", reads_itself=reads_itself)
        return self._turn(self._heads(x, weights), turned) * KEY_SHARE

    def keys_and_values(self, layer: int, rows: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (self._read(name, rows) for name in ("k", "v"))
        return keys, values

    def _heads(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (x @ weights.T).view(len(x), -1, self._shape.head_dim)

    def _read(self, name: str, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        values = rows[name].view(self._shape.kv_dtype).to(torch.float32)
        if self._shape.scale_block:
            scales = rows[f"{name}_scale"].view(torch.float32)[..., None]
            values = self._told.scaled(values.view(len(values), -1, self._shape.scale_block), scales)
        return values.view(len(values), -1, self._shape.head_dim)

    def _turn(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding in halves. rows: [T, heads, head_dim]."""
        cos, sin = (torch.cat([each] * 2, -1) for each in _rotation(self._frequencies, positions))
        first, second = rows.chunk(2, -1)
        return rows * cos + torch.cat([-second, first], -1) * sin


class LatentAttention:
    """DeepSeek V3: a row holds the latent that all heads make keys and values of, and the part of a key that turns."""

    def __init__(self, model: KnownModel, shape: ModelShape, told: AttentionInputs) -> None:
        self._model = model
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        self._latent, self._still, self._rope, self._values = (int(model.number(name)) for name in sizes)
        self._frequencies = _frequencies(model, self._rope)

    def stored(self, layer: int, x: torch.Tensor, turned: torch.Tensor) -> Mapping[str, torch.Tensor]:
        into = x @ self._model.weights(layer, "kv_a_proj_with_mqa").T
        latent, rope = torch.split(into, [self._latent, self._rope], -1)
        return {"latent": _words(torch.cat([self._model.normed(latent), self._turn(rope[:, None], turned)[:, 0]], -1))}

    def queries(self, layer: int, x: torch.Tensor, turned: torch.Tensor, *, reads_itself: bool) -> torch.Tensor:
        weights = self._model.weights(layer, "q_proj", reads_itself=reads_itself)
        rows = (x @ weights.T).view(len(x), -1, self._still + self._rope)
        still, rope = torch.split(rows, [self._still, self._rope], -1)
        return torch.cat([still, self._turn(rope, turned)], -1)

    def keys_and_values(self, layer: int, rows: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = torch.split(rows["latent"].view(torch.float32), [self._latent, self._rope], -1)
        by_head = latent @ self._model.weights(layer, "kv_b_proj").T
        by_head = by_head.view(len(latent), -1, self._still + self._values)
        still, values = torch.split(by_head, [self._still, self._values], -1)
        return torch.cat([still, rope[:, None].expand(-1, still.shape[1], -1)], -1), values

    def _turn(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding in pairs of neighbours. rows: [T, heads, rope]."""
        cos, sin = _rotation(self._frequencies, positions)
        first, second = rows[..., 0::2], rows[..., 1::2]
        return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


ATTENTION: Mapping[str, type[HeadAttention | LatentAttention]] = {
    "llama": HeadAttention,
    "deepseek-v3": LatentAttention,
}
"""By architecture of the weights."""


def known_attention(model: KnownModel, shape: ModelShape, told: AttentionInputs) -> KnownAttention:
    """The attention of a model. told: of the pool that it reads."""
    return ATTENTION[model.family](model, shape, told)


def _frequencies(model: KnownModel, dims: int) -> torch.Tensor:
    """Radians a position of each rotary pair, [dims / 2]."""
    half = dims // 2
    return model.number("rope_theta") ** (-torch.arange(half, dtype=torch.float64) / half)


def _rotation(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each pair's angle, [T, 1, pairs] each."""
    angle = (positions.double()[:, None] * frequencies)[:, None]
    return angle.cos().float(), angle.sin().float()


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Rows as the pool holds them, [n, W] int64."""
    return rows.contiguous().flatten(1).view(torch.uint8).view(torch.int64)


def _scales(parts: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two by which parts fit into FP8 E4M3, [n, groups, 1]. parts: [n, groups, block]."""
    most = parts.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.ceil(torch.log2(most / MOST_FP8)))
