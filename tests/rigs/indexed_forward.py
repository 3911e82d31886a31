"""A forward pass of a DeepSeek V3.2 folder's tensors: MLA over the positions that an indexer picks, in torch.

Invariants:
- The indexer follows transformers' DeepseekV32Indexer; its rotary part comes first and turns in halves.
- `index_rounded` is applied to index keys as they are stored and to index queries, as engines quantise both.
- What ties at the edge of the top-k is picked as torch.topk does it.
"""

from __future__ import annotations

import torch
from rigs.deepseek_forward import DeepseekForward
from rigs.llama_forward import Cache, Rounding

_ROWS = 64  # of scores that are held at a time


def as_fp8_with_scales(values: torch.Tensor) -> torch.Tensor:
    """Values [..., dims] as FP8 E4M3 with a scale a row, which is a power of two, gives them back."""
    scale = torch.exp2(torch.ceil(torch.log2(values.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


def hadamard_as_fp8(values: torch.Tensor) -> torch.Tensor:
    """The same after a Hadamard rotation, which leaves products as they are but for the rounding."""
    rotated = values.float()
    for bit in range(values.shape[-1].bit_length() - 1):
        first, second = rotated.unflatten(-1, (-1, 2, 1 << bit)).unbind(-2)
        rotated = torch.stack([first + second, first - second], -2).flatten(-3)
    scale = rotated.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448 / values.shape[-1] ** 0.5
    rotated = rotated / values.shape[-1] ** 0.5
    return ((rotated / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


class IndexedForward(DeepseekForward):
    def begin(self) -> None:
        self.index_rounded: Rounding = lambda values: values

    def queries(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """They come out of a latent of their own."""
        return self._query_latent(layer, x) @ self.w[f"model.layers.{layer}.self_attn.q_b_proj.weight"].T

    def _query_latent(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x) @ self.w[f"model.layers.{layer}.self_attn.q_a_proj.weight"].T)

    def turn_index(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of the first dimensions, in halves. x: [T, heads, dims]; positions: [T]."""
        turning, still = x[..., : self.turned], x[..., self.turned :]
        angle = positions.double()[:, None] * self.frequencies
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
        first, second = turning.chunk(2, -1)
        return torch.cat([turning * cos + torch.cat([-second, first], -1) * sin, still], -1)

    def indexed(self, layer: int, x: torch.Tensor, past: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Index queries [T, heads, dims], keys [T, dims] and head weights [T, heads], at their positions."""
        prefix = f"model.layers.{layer}.self_attn.indexer"
        y, positions = self.norm(x), torch.arange(past, past + len(x))
        q = (self._query_latent(layer, x) @ self.w[f"{prefix}.wq_b.weight"].T).unflatten(
            1, (self.config["index_n_heads"], -1)
        )
        k = y @ self.w[f"{prefix}.wk.weight"].T
        wide = k.double() if self.dtype == torch.float64 else k.float()
        wide = (wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(wide.var(-1, False, keepdim=True) + 1e-6)
        weight, bias = (self.w[f"{prefix}.k_norm.{name}"].to(wide.dtype) for name in ("weight", "bias"))
        k = (wide * weight + bias).to(self.dtype)
        q, k = self.turn_index(q, positions), self.turn_index(k[:, None], positions)[:, 0]
        weights = (y @ self.w[f"{prefix}.weights_proj.weight"].T).float() * self.config["index_n_heads"] ** -0.5
        return self.index_rounded(q), self.index_rounded(k), weights

    def hidden(self, layer: int, x: torch.Tensor, cache: Cache, past: int) -> torch.Tensor:
        """[T, S]: positions that each token does not read. Its index keys go into the cache."""
        q, k, weights = self.indexed(layer, x, past)
        if past:
            k = cache.index[layer] = torch.cat([cache.index[layer], k])
        else:
            cache.index.append(k)
        count = min(self.config["index_topk"], len(k))
        hidden = torch.ones(len(x), len(k), dtype=torch.bool)
        for start in range(0, len(x), _ROWS):
            rows = slice(start, start + _ROWS)
            scores = torch.einsum("thd,sd->ths", q[rows].float(), k.float()).relu() * k.shape[-1] ** -0.5
            scores = torch.einsum("ths,th->ts", scores, weights[rows])
            future = torch.arange(len(k))[None] > past + torch.arange(len(x))[rows, None]
            picked = scores.masked_fill(future, -torch.inf).topk(count, -1).indices
            hidden[rows] = hidden[rows].scatter(1, picked, value=False) | future
        return hidden

    def mixed(
        self, layer: int, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Attention over what the indexer picks, on the latents: engines' sparse kernels do so in prompts too."""
        return self._absorbed(layer, q, k, v, self.hidden(layer, x, cache, len(k) - len(q)))
