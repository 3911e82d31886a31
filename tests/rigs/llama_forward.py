"""A forward pass of a Llama folder's tensors on a cache that a test can damage, in torch.

Invariants:
- Rotary embedding, norm and scores follow transformers' Llama: half split, float32 norm, scores over sqrt(head_dim).
- `rounded` is applied to what the cache stores, so that a narrower cache is tried without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]


def as_fp8(values: torch.Tensor) -> torch.Tensor:
    """Values as a cache in FP8 E4M3 with scale 1 gives them back."""
    return values.to(torch.float8_e4m3fn).to(values.dtype)


@dataclass(slots=True)
class Cache:
    """Keys and values by layer, [tokens, kv_heads, head_dim] each."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def copy(self) -> Cache:
        return Cache([k.clone() for k in self.keys], [v.clone() for v in self.values])

    def differs(self, other: Cache) -> bool:
        mine, others = (cache.keys + cache.values for cache in (self, other))
        return not all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


class LlamaForward:
    """One model. step() appends tokens to a cache and returns logits of the last one."""

    def __init__(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, np.ndarray],
        dtype: torch.dtype,
        rounded: Rounding | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.rounded = rounded or (lambda values: values)
        self.w = {name: torch.from_numpy(np.ascontiguousarray(array)).to(dtype) for name, array in tensors.items()}
        half = config["head_dim"] // 2
        self.frequencies = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double() if self.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])).to(self.dtype)

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding. x: [T, heads, head_dim]; positions: [T]."""
        angle = positions.double()[:, None] * self.frequencies
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None].to(self.dtype) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def step(self, ids: Sequence[int], cache: Cache, *, query_shift: int = 0, every: bool = False) -> torch.Tensor:
        """Logits [ids] of the last token, or [T, ids] where every is set. query_shift shifts the queries' positions."""
        c = self.config
        heads, kv_heads, head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        past = cache.keys[0].shape[0] if cache.keys else 0
        count = len(ids)
        positions = torch.arange(past, past + count)
        x = self.w["model.embed_tokens.weight"][torch.as_tensor(list(ids))]
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}.self_attn."
            y = self.norm(x)
            q, k, v = (
                (y @ self.w[f"{prefix}{name}_proj.weight"].T).view(count, n, head_dim)
                for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            )
            q, k = self.turn(q, positions + query_shift), self.turn(k, positions)
            k, v = self.rounded(k), self.rounded(v)
            if past:
                k, v = torch.cat([cache.keys[layer], k]), torch.cat([cache.values[layer], v])
                cache.keys[layer], cache.values[layer] = k, v
            else:
                cache.keys.append(k)
                cache.values.append(v)
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            grouped = q.view(count, kv_heads, heads // kv_heads, head_dim).to(wide)
            scores = torch.einsum("thgd,shd->hgts", grouped, k.to(wide)) / head_dim**0.5
            future = torch.arange(past + count)[None] > positions[:, None]
            chance = scores.masked_fill(future, -torch.inf).softmax(-1)
            mixed = torch.einsum("hgts,shd->thgd", chance, v.to(wide)).to(self.dtype).reshape(count, -1)
            x = x + mixed @ self.w[f"{prefix}o_proj.weight"].T
        if not every:
            x = x[-1:]
        logits = (self.norm(x) @ self.w["lm_head.weight"].T).to(torch.float64)
        return logits if every else logits[0]
