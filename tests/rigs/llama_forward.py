"""A forward pass of a Llama folder's tensors on a cache that a test can damage, in torch.

Invariants:
- Rotary embedding, norm and scores follow transformers' Llama: half split, float32 norm, scores over sqrt(head_dim).
- `rounded` is applied to what the cache stores, so that a narrower cache is tried without an engine. What is stored
  is divided by the layer's scales, where the model has some, and multiplied by them when it is read.
- A prompt is read by torch's own attention in the model's dtype, as engines do it; tokens after it in float32 or wider.
- Products with weights are added up in float32 or wider and rounded once, as kernels for bf16 and fp16 do it.
- The MLP is not computed: the rig is for models whose MLP is zero, and refuses another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

Rounding = Callable[[torch.Tensor], torch.Tensor]


def as_fp8(values: torch.Tensor) -> torch.Tensor:
    """Values as a cache in FP8 E4M3 with scale 1 gives them back."""
    return values.to(torch.float8_e4m3fn).to(values.dtype)


@dataclass(slots=True)
class Cache:
    """Keys and values by layer, [tokens, kv_heads, head_dim] each. index: keys of an indexer, where there is one."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    index: list[torch.Tensor] = field(default_factory=list)

    def copy(self) -> Cache:
        return Cache(*([each.clone() for each in held] for held in (self.keys, self.values, self.index)))

    def differs(self, other: Cache) -> bool:
        mine, others = (cache.keys + cache.values + cache.index for cache in (self, other))
        return not all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


class LlamaForward:
    """One model. step() appends tokens to a cache and returns logits of the last one."""

    def __init__(
        self,
        config: Mapping[str, object],
        tensors: Iterable[tuple[str, np.ndarray]],
        dtype: torch.dtype,
        rounded: Rounding | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.rounded = rounded or (lambda values: values)
        self.rounds_queries = False  # as some attention kernels do where the cache is narrower
        self.w = {}
        self._wide_w: dict[str, torch.Tensor] = {}
        for name, array in tensors:
            if ".mlp." not in name:
                self.w[name] = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
            elif array.any():
                raise ValueError(f"{name} is not zero")
        half = self.turned // 2
        self.frequencies = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        self.begin()

    def begin(self) -> None:
        """What a model of another family keeps besides."""

    @property
    def turned(self) -> int:
        return int(self.config["head_dim"])

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def times(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x through the weights of that name. In float32 a CPU is far faster than in bf16."""
        if name not in self._wide_w:
            self._wide_w[name] = self.w[name].to(self.wide)
        return (x.to(self.wide) @ self._wide_w[name].T).to(self.dtype)

    def scales(self, layer: int) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """What the checkpoint says of a layer's keys and values in FP8; 1 where it says nothing."""
        prefix = f"model.layers.{layer}.self_attn"
        return self.w.get(f"{prefix}.k_scale", 1.0), self.w.get(f"{prefix}.v_scale", 1.0)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.wide)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])).to(self.dtype)

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding. x: [T, heads, head_dim]; positions: [T]."""
        angle = positions.double()[:, None] * self.frequencies
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None].to(self.dtype) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def embedded(self, ids: Sequence[int]) -> torch.Tensor:
        return self.w["model.embed_tokens.weight"][torch.as_tensor(list(ids))]

    def projected(self, layer: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values before rotation, [tokens, heads, head_dim] each."""
        y = self.norm(x)
        return [
            self.times(y, f"model.layers.{layer}.self_attn.{name}_proj.weight").unflatten(
                1, (-1, self.config["head_dim"])
            )
            for name in ("q", "k", "v")
        ]

    def mixed(
        self, layer: int, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """What the heads return for the tokens whose residual is x: the last ones of k and v. [tokens, heads * dims]"""
        del x, cache
        if len(k) == len(q):
            return self._prompt(layer, q, k, v)
        return self._later(layer, q, k, v, torch.arange(len(k) - len(q), len(k)))

    def _prompt(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)

    def _later(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        grouped = q.unflatten(1, (k.shape[1], -1)).to(self.wide)
        scores = torch.einsum("thgd,shd->hgts", grouped, k.to(self.wide)) / q.shape[-1] ** 0.5
        future = torch.arange(len(k))[None] > positions[:, None]
        chance = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hgts,shd->thgd", chance, v.to(self.wide)).to(self.dtype).flatten(1)

    def past(self, cache: Cache) -> int:
        return cache.keys[0].shape[0] if cache.keys else 0

    def attended(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor, cache: Cache, query_shift: int
    ) -> torch.Tensor:
        """What a layer adds to the residual of the tokens at `positions`, which it appends to its cache."""
        past = int(positions[0])
        q, k, v = self.projected(layer, x)
        q, k = self.turn(q, positions + query_shift), self.turn(k, positions)
        k_scale, v_scale = self.scales(layer)
        k, v = self.rounded(k / k_scale), self.rounded(v / v_scale)
        q = self.rounded(q) if self.rounds_queries else q
        if past:
            k, v = torch.cat([cache.keys[layer], k]), torch.cat([cache.values[layer], v])
            cache.keys[layer], cache.values[layer] = k, v
        else:
            cache.keys.append(k)
            cache.values.append(v)
        mixed = self.mixed(layer, x, q, k * k_scale, v * v_scale, cache)
        return self.times(mixed, f"model.layers.{layer}.self_attn.o_proj.weight")

    def step(self, ids: Sequence[int], cache: Cache, *, query_shift: int = 0, every: bool = False) -> torch.Tensor:
        """Logits [ids] of the last token, or [T, ids] where every is set. query_shift shifts the queries' positions."""
        past = self.past(cache)
        positions = torch.arange(past, past + len(ids))
        x = self.embedded(ids)
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self.attended(layer, x, positions, cache, query_shift)
        if not every:
            x = x[-1:]
        logits = self.times(self.norm(x), "lm_head.weight").to(torch.float64)
        return logits if every else logits[0]
