"""The recurrent layers of known-answer models in float32: gated delta nets, on the state slots of a pool.

    conv   [channels, kernel - 1]          inputs of the convolution at the last positions, the oldest first
    ssm    [value heads, key dim, value dim]   S <- g S;  S <- S + beta k (v - S^T k)^T;  o = S^T q

Norms, convolution and recurrence follow transformers' Qwen3NextGatedDeltaNet. A state is used as read, that of a new
request too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import silu, softplus

from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.workload.known_model import KnownModel

L2_EPS = 1e-6


class DeltaNet:
    def __init__(self, model: KnownModel, shape: ModelShape) -> None:
        self._model = model
        sizes = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
        self._keys, self._key_dim, values, self._value_dim = (int(model.number(f"linear_{each}")) for each in sizes)
        self._group = values // self._keys
        self._conv = (shape.conv_dim, shape.conv_kernel - 1)
        self._ssm = (shape.ssm_heads, shape.ssm_key_dim, shape.ssm_value_dim)

    def added(
        self, layer: int, x: torch.Tensor, state: Mapping[str, torch.Tensor], *, times: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the layer's addition to the residual, [T, width], and the state after the tokens, [W] words by buffer.
        x: [T, width] of one request, after its norm. times: how often the first token updates the state."""
        conv, ssm = (
            state[name].view(torch.float32).view(size) for name, size in (("conv", self._conv), ("ssm", self._ssm))
        )
        q, k, v, gate = self._projected(layer, x)
        channels = torch.cat([each.flatten(1) for each in (q, k, v)], 1)
        seen = torch.cat([conv, channels.T], 1)
        kernel = self._weights(layer, "conv1d")[:, 0]
        mixed = silu((seen.unfold(1, kernel.shape[1], 1) * kernel[:, None]).sum(-1)).T
        q, k, v = torch.split(mixed, [each.flatten(1).shape[1] for each in (q, k, v)], 1)
        by_head = (each.view(len(x), self._keys, -1) for each in (q, k))
        q, k = (_unit(each).repeat_interleave(self._group, 1) for each in by_head)
        strength, decay = self._strengths_and_decays(layer, x)
        read = []
        for at, value in enumerate(v.view(len(x), -1, self._value_dim)):
            for _ in range(1 if at else times):
                ssm = ssm * decay[at, :, None, None]
                change = strength[at, :, None] * (value - torch.einsum("hkv,hk->hv", ssm, k[at]))
                ssm = ssm + k[at, :, :, None] * change[:, None]
            read.append(torch.einsum("hkv,hk->hv", ssm, q[at] / self._key_dim**0.5))
        out = self._model.normed(torch.stack(read)) * self._weights(layer, "norm") * silu(gate)
        left = {"conv": seen[:, -self._conv[1] :], "ssm": ssm}
        words = {name: each.contiguous().view(-1).view(torch.int64) for name, each in left.items()}
        return out.flatten(1) @ self._weights(layer, "out_proj").T, words

    def _projected(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [T, key heads, ...] before the convolution; gates [T, value heads, dim]."""
        into = (x @ self._weights(layer, "in_proj_qkvz").T).view(len(x), self._keys, -1)
        values = self._group * self._value_dim
        q, k, v, gate = torch.split(into, [self._key_dim, self._key_dim, values, values], -1)
        return q, k, v, gate.reshape(len(x), -1, self._value_dim)

    def _strengths_and_decays(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, value heads] each: beta, and the factor of the state."""
        into = (x @ self._weights(layer, "in_proj_ba").T).view(len(x), self._keys, 2, self._group)
        strength, decay = (each.flatten(1) for each in into.unbind(2))
        rate = softplus(decay + self._model.tensor(layer, "linear_attn.dt_bias"))
        return strength.sigmoid(), (-self._model.tensor(layer, "linear_attn.A_log").exp() * rate).exp()

    def _weights(self, layer: int, name: str) -> torch.Tensor:
        return self._model.tensor(layer, f"linear_attn.{name}.weight")


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.pow(2).sum(-1, keepdim=True) + L2_EPS)
