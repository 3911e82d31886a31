"""Attention of known-answer models in float32: how tokens are stored in each buffer, and how rows are read.

Invariants:
- Rotary embedding, norms, gate and indexer follow transformers' models of these architectures.
- The weights attend to the token itself. A query rotated by an earlier position attends to the token there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import layer_norm

from kvcheck.core.cache.pools.attention import AttentionInputs
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.workload.known_model import KnownModel

KEY_SHARE = 64
"""Keys of heads are stored so much smaller, and queries made so much larger. Scales of 8-bit keys are then so small
that a lookup fails if one is applied twice."""
MOST_FP8 = 448.0
LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Asking:
    """Tokens of one request that read. x: [T, width], the residual after its norm; turned: [T] positions that rotate
    their queries. hidden: [T, n], rows masked for a token."""

    x: torch.Tensor
    turned: torch.Tensor
    hidden: torch.Tensor


class KnownAttention(Protocol):
    """x: [T, width], the residual after its norm; turned: [T] positions."""

    def stored(self, layer: int, x: torch.Tensor, turned: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the tokens' rows, by buffer, or by piece of a packed one: [T, W] words."""

    def added(self, layer: int, asking: Asking, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the layer's addition to the residual, [T, width]. rows: [n, W] words, by buffer or piece."""


class HeadAttention:
    """Llama: rows hold 8-bit keys and values of each KV head, with scales."""

    def __init__(self, model: KnownModel, shape: ModelShape, told: AttentionInputs) -> None:
        self._model, self._shape, self._told = model, shape, told
        self._frequencies = _frequencies(model, shape.head_dim)

    def stored(self, layer: int, x: torch.Tensor, turned: torch.Tensor) -> Mapping[str, torch.Tensor]:
        keys = self._turn(self._keys(layer, x), turned) / KEY_SHARE
        values = self._heads(x, self._model.weights(layer, "v_proj"))
        kept: dict[str, torch.Tensor] = {}
        for name, rows in (("k", keys), ("v", values)):
            if block := self._shape.scale_block:
                parts = rows.reshape(len(rows), -1, block)
                scales = _scales(parts)
                rows, kept[f"{name}_scale"] = parts / scales, _words(scales)
            kept[name] = _words(rows.to(self._shape.kv_dtype))
        return kept

    def added(self, layer: int, asking: Asking, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        queries = self._turn(self._queries(layer, asking.x), asking.turned) * KEY_SHARE
        mixed = _mixed(queries, *self.keys_and_values(rows), asking.hidden)
        return self._opened(layer, asking.x, mixed) @ self._model.weights(layer, "o_proj").T

    def keys_and_values(self, rows: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, heads, D] each."""
        keys, values = (self._read(name, rows) for name in ("k", "v"))
        return keys, values

    def _queries(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._heads(x, self._model.weights(layer, "q_proj"))

    def _keys(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._heads(x, self._model.weights(layer, "k_proj"))

    def _opened(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return mixed

    def _heads(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (x @ weights.T).view(len(x), -1, self._shape.head_dim)

    def _read(self, name: str, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        values = rows[name].view(self._shape.kv_dtype).to(torch.float32)
        if self._shape.scale_block:
            scales = rows[f"{name}_scale"].view(torch.float32)[..., None]
            values = self._told.scaled(values.view(len(values), -1, self._shape.scale_block), scales)
        return values.view(len(values), -1, self._shape.head_dim)

    def _turn(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return _turned_in_halves(rows, positions, self._frequencies)


class GatedHeadAttention(HeadAttention):
    """Qwen3-Next: norms of queries and keys, an output gate, and partial rotary embedding."""

    def __init__(self, model: KnownModel, shape: ModelShape, told: AttentionInputs) -> None:
        super().__init__(model, shape, told)
        self._frequencies = _frequencies(model, int(shape.head_dim * model.number("partial_rotary_factor")))

    def _queries(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._normed(layer, "q_norm", self._queries_and_gates(layer, x)[:, :, 0])

    def _keys(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._normed(layer, "k_norm", super()._keys(layer, x))

    def _opened(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return mixed * self._queries_and_gates(layer, x)[:, :, 1].flatten(1).sigmoid()

    def _queries_and_gates(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return super()._queries(layer, x).view(len(x), -1, 2, self._shape.head_dim)

    def _normed(self, layer: int, name: str, rows: torch.Tensor) -> torch.Tensor:
        # Weights of these norms are stored less 1.
        return self._model.normed(rows) * (1 + self._model.weights(layer, name))


class LatentAttention:
    """DeepSeek V3: a row holds the latent of all heads' keys and values, and the rotary part of a key."""

    def __init__(self, model: KnownModel, shape: ModelShape, told: AttentionInputs) -> None:
        self._model, self._told = model, told
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        self._latent, self._still, self._rope, self._values = (int(model.number(name)) for name in sizes)
        self._frequencies = _frequencies(model, self._rope)

    def stored(self, layer: int, x: torch.Tensor, turned: torch.Tensor) -> Mapping[str, torch.Tensor]:
        into = x @ self._model.weights(layer, "kv_a_proj_with_mqa").T
        latent, rope = torch.split(into, [self._latent, self._rope], -1)
        return {"latent": _words(torch.cat([self._model.normed(latent), self._turn(rope[:, None], turned)[:, 0]], -1))}

    def added(self, layer: int, asking: Asking, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        queries = self._queries(layer, asking.x).view(len(asking.x), -1, self._still + self._rope)
        still, rope = torch.split(queries, [self._still, self._rope], -1)
        queries = torch.cat([still, self._turn(rope, asking.turned)], -1)
        hidden = asking.hidden | self._left_out(layer, asking, rows)
        read = ~hidden.all(0)
        keys, values = self._keys_and_values(layer, rows["latent"][read])
        return _mixed(queries, keys, values, hidden[:, read]) @ self._model.weights(layer, "o_proj").T

    def _queries(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return x @ self._model.weights(layer, "q_proj").T

    def _left_out(self, layer: int, asking: Asking, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.zeros_like(asking.hidden)

    def _keys_and_values(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = torch.split(rows.view(torch.float32), [self._latent, self._rope], -1)
        by_head = latent @ self._model.weights(layer, "kv_b_proj").T
        by_head = by_head.view(len(latent), -1, self._still + self._values)
        still, values = torch.split(by_head, [self._still, self._values], -1)
        return torch.cat([still, rope[:, None].expand(-1, still.shape[1], -1)], -1), values

    def _turn(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = _rotation(self._frequencies, positions)
        first, second = rows[..., 0::2], rows[..., 1::2]
        return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


class IndexedAttention(LatentAttention):
    """DeepSeek V3.2: reads the rows picked by an indexer with FP8 keys and one scale a token."""

    def __init__(self, model: KnownModel, shape: ModelShape, told: AttentionInputs) -> None:
        super().__init__(model, shape, told)
        self._index_heads, self._index_dim, self._top_k = (
            int(model.number(name)) for name in ("index_n_heads", "index_head_dim", "index_topk")
        )

    def stored(self, layer: int, x: torch.Tensor, turned: torch.Tensor) -> Mapping[str, torch.Tensor]:
        weight, bias = (self._model.weights(layer, f"indexer.k_norm.{name}") for name in ("weight", "bias"))
        keys = x @ self._model.weights(layer, "indexer.wk").T
        keys = layer_norm(keys, (self._index_dim,), weight, bias, eps=LAYER_NORM_EPS)
        keys = self._turn_index(keys[:, None], turned)
        scales = _scales(keys)
        index = {"key": _words((keys / scales).to(torch.float8_e4m3fn)), "scale": _words(scales, torch.int32)}
        return {**super().stored(layer, x, turned), **index}

    def _queries(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._query_latent(layer, x) @ self._model.weights(layer, "q_b_proj").T

    def _query_latent(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._model.normed(x @ self._model.weights(layer, "q_a_proj").T)

    def _left_out(self, layer: int, asking: Asking, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        ranked = self._told.ranked(asking.hidden.shape[1])
        keys = rows["key"][:ranked].view(torch.float8_e4m3fn).to(torch.float32)[:, None]
        keys = self._told.scaled(keys, rows["scale"][:ranked].view(torch.float32)[..., None])[:, 0]
        into = self._query_latent(layer, asking.x) @ self._model.weights(layer, "indexer.wq_b").T
        queries = self._turn_index(into.view(len(into), self._index_heads, -1), asking.turned)
        weights = asking.x @ self._model.weights(layer, "indexer.weights_proj").T * self._index_heads**-0.5
        by_head = torch.einsum("thd,sd->ths", queries, keys).relu() * self._index_dim**-0.5
        scores = torch.einsum("ths,th->ts", by_head, weights).masked_fill(asking.hidden[:, :ranked], -torch.inf)
        picked = self._told.picked(scores, self._top_k)
        return torch.ones_like(asking.hidden).scatter(1, picked, value=False)

    def _turn_index(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate in halves, and the first dimensions alone, unlike a key of attention."""
        return _turned_in_halves(rows, positions, self._frequencies)


ATTENTION: Mapping[str, type[HeadAttention | LatentAttention]] = {
    "llama": HeadAttention,
    "qwen3-next": GatedHeadAttention,
    "deepseek-v3": LatentAttention,
    "deepseek-v32": IndexedAttention,
}


def known_attention(model: KnownModel, shape: ModelShape, told: AttentionInputs) -> KnownAttention:
    return ATTENTION[model.family](model, shape, told)


def _mixed(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """[T, heads * D] of queries [T, heads, D], and keys and values [n, heads, D]. hidden: [T, n]."""
    scores = torch.einsum("thd,shd->hts", queries, keys) / queries.shape[-1] ** 0.5
    chances = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", chances, values).flatten(1)


def _frequencies(model: KnownModel, dims: int) -> torch.Tensor:
    """Radians a position of each rotary pair, [dims / 2]."""
    half = dims // 2
    return model.number("rope_theta") ** (-torch.arange(half, dtype=torch.float64) / half)


def _rotation(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each pair's angle, [T, 1, pairs] each."""
    angle = (positions.double()[:, None] * frequencies)[:, None]
    return angle.cos().float(), angle.sin().float()


def _turned_in_halves(rows: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first dimensions: pair j is dimensions j and j + pairs. rows: [T, heads, D]."""
    cos, sin = (torch.cat([each] * 2, -1) for each in _rotation(frequencies, positions))
    turning, still = rows[..., : 2 * len(frequencies)], rows[..., 2 * len(frequencies) :]
    first, second = turning.chunk(2, -1)
    return torch.cat([turning * cos + torch.cat([-second, first], -1) * sin, still], -1)


def _words(rows: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return rows.contiguous().flatten(1).view(torch.uint8).view(dtype)


def _scales(parts: torch.Tensor) -> torch.Tensor:
    most = parts.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.ceil(torch.log2(most / MOST_FP8)))
