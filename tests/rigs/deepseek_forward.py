"""A forward pass of a DeepSeek V3 folder's tensors on a cache of latents that a test can damage, in torch.

Invariants:
- A prompt's keys and values are made from its latents for each head; later tokens take the query into the latent's
  space instead (absorbed MLA), rounded to the model's dtype there, as engines do.
- The cache has the normed latent as a layer's value and the turned rotary part as its key, one head each.
"""

from __future__ import annotations

import torch
from rigs.llama_forward import LlamaForward


class DeepseekForward(LlamaForward):
    """One model with MLA. Its layers are dense, with an MLP that is zero."""

    @property
    def turned(self) -> int:
        return int(self.config["qk_rope_head_dim"])

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of the last dimensions, in pairs of neighbours. x: [T, heads, dims]; positions: [T]."""
        still, turning = x[..., : -self.turned], x[..., -self.turned :]
        angle = (positions.double()[:, None] * self.frequencies)[:, None]
        cos, sin = (f(angle).to(self.dtype) for f in (torch.cos, torch.sin))
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
        return torch.cat([still, turned], -1)

    def projected(self, layer: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries [T, heads, nope + rope], rotary parts of keys [T, 1, rope] and normed latents [T, 1, latent]."""
        y, prefix = self.norm(x), f"model.layers.{layer}.self_attn"
        q = self.queries(layer, x).unflatten(1, (self.config["num_attention_heads"], -1))
        into = y @ self.w[f"{prefix}.kv_a_proj_with_mqa.weight"].T
        latent, rope = into.split([self.config["kv_lora_rank"], self.turned], -1)
        return [q, rope[:, None], self.norm(latent)[:, None]]

    def queries(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Of all heads side by side, [T, heads * (nope + rope)]."""
        return self.norm(x) @ self.w[f"model.layers.{layer}.self_attn.q_proj.weight"].T

    def _out_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes keys and values of the latent: [heads, nope, latent] and [heads, values, latent]."""
        weight = self.w[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        by_head = weight.unflatten(0, (self.config["num_attention_heads"], -1))
        return by_head.split([self.config["qk_nope_head_dim"], self.config["v_head_dim"]], 1)

    def _prompt(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        to_key, to_value = self._out_of(layer)
        still = torch.einsum("tl,hdl->thd", v[:, 0], to_key)
        keys = torch.cat([still, k.expand(-1, still.shape[1], -1)], -1)
        return super()._prompt(layer, q, keys, torch.einsum("tl,hdl->thd", v[:, 0], to_value))

    def _later(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._absorbed(layer, q, k, v, torch.arange(len(k))[None] > positions[:, None])

    def _absorbed(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """hidden: [T, S], keys that a query does not read."""
        to_key, to_value = self._out_of(layer)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        absorbed = torch.einsum("thd,hdl->thl", q[..., : -self.turned], to_key)
        scores = torch.einsum("thl,sl->hts", absorbed.to(wide), v[:, 0].to(wide))
        scores = scores + torch.einsum("thd,sd->hts", q[..., -self.turned :].to(wide), k[:, 0].to(wide))
        chance = (scores / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = torch.einsum("hts,sl->thl", chance, v[:, 0].to(wide)).to(self.dtype)
        return torch.einsum("thl,hdl->thd", mixed, to_value).flatten(1)
