"""A forward pass of a GPT-OSS folder's tensors: windows, sinks, and both at fault where a test asks for it.

Invariants:
- A token of a layer with a window of w reads the last w positions, its own among them, as transformers has it.
- A sink is one more score of a softmax, of its query head, whose value is zero.
- A prompt is read with scores and weights in the model's dtype, as transformers' own attention has them.
"""

from __future__ import annotations

import torch
from rigs.llama_forward import LlamaForward


class GptOssForward(LlamaForward):
    """One model. Its faults are by layer. window_off: positions that a window has too many. ahead: positions behind its
    own that a token reads. sink_times: what sinks are multiplied by; infinity: they are lost.
    """

    def begin(self) -> None:
        self.window_off: dict[int, int] = {}
        self.ahead: dict[int, int] = {}
        self.sink_times: dict[int, float] = {}
        if any(self.w[name].any() for name in self.w if name.endswith("bias")):
            raise ValueError("a bias is not zero")

    def has_window(self, layer: int) -> bool:
        return bool(self.config["layer_types"][layer] == "sliding_attention")

    def _visible(self, layer: int, positions: torch.Tensor, count: int) -> torch.Tensor:
        """Whether a position reads a key, [positions, keys]."""
        back = positions[:, None] - torch.arange(count)[None]
        window = self.config["sliding_window"] + self.window_off.get(layer, 0) if self.has_window(layer) else count
        return (back >= -self.ahead.get(layer, 0)) & (back < window)

    def _sinks(self, layer: int) -> torch.Tensor:
        """The scores of a layer's sinks, [heads]."""
        sinks, times = self.w[f"model.layers.{layer}.self_attn.sinks"], self.sink_times.get(layer, 1.0)
        return torch.full_like(sinks, -torch.inf) if times == torch.inf else sinks * times

    def _prompt(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attention(layer, q, k, v, torch.arange(len(q)), self._sinks(layer))

    def _later(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        sinks = self._sinks(layer).to(wide)
        return self._attention(layer, q.to(wide), k.to(wide), v.to(wide), positions, sinks).to(self.dtype)

    def _attention(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        grouped = q.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("thgd,shd->thgs", grouped, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~self._visible(layer, positions, len(k))[:, None, None], -torch.inf)
        sink = sinks.view(k.shape[1], -1)[None, :, :, None].expand(len(q), -1, -1, -1)
        chance = torch.cat([scores, sink.to(scores.dtype)], -1).softmax(-1)[..., :-1]
        return torch.einsum("thgs,shd->thgd", chance, v).flatten(1)
