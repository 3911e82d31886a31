"""A forward pass of a Qwen3-Next folder's tensors on states and a cache that a test can damage, in torch.

Invariants:
- A state layer has what its convolution remembers as its key, [positions - 1, channels], and its recurrent state as its
  value, [value heads, key dim, value dim].
- More than one token goes through the state in chunks, as engines read a prompt; one token by the recurrence.
- States and what is done with them are in float32, or in float64 where the model is.
"""

from __future__ import annotations

import torch
from rigs.llama_forward import Cache, LlamaForward
from torch.nn.functional import silu, softplus

CHUNK = 64
L2_EPS = 1e-6


class Qwen3NextForward(LlamaForward):
    """One model of gated delta nets and attention. Its experts are zero.

    left_over: layer -> the state that it begins with, in place of an empty one.
    """

    def begin(self) -> None:
        self.left_over: dict[int, torch.Tensor] = {}

    @property
    def turned(self) -> int:
        return int(self.config["head_dim"] * self.config["partial_rotary_factor"])

    def is_state(self, layer: int) -> bool:
        return bool(self.config["layer_types"][layer] == "linear_attention")

    def past(self, cache: Cache) -> int:
        return cache.keys[self.config["layer_types"].index("full_attention")].shape[0] if cache.keys else 0

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.w["model.norm.weight"].any(), "a norm is stored less 1"
        return super().norm(x)

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of the first dimensions. x: [T, heads, head_dim]; positions: [T]."""
        return torch.cat([super().turn(x[..., : self.turned], positions), x[..., self.turned :]], -1)

    def _head_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.wide)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return (wide * (1 + weight.to(self.wide))).to(self.dtype)

    def projected(self, layer: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Normed queries without their gate, normed keys, and values, [tokens, heads, head_dim] each."""
        prefix, dim = f"model.layers.{layer}.self_attn", self.config["head_dim"]
        both, k, v = (
            self.times(self.norm(x), f"{prefix}.{name}_proj.weight").unflatten(1, (-1, size))
            for name, size in (("q", 2 * dim), ("k", dim), ("v", dim))
        )
        norms = [self.w[f"{prefix}.{name}_norm.weight"] for name in ("q", "k")]
        return [self._head_norm(both[..., :dim], norms[0]), self._head_norm(k, norms[1]), v]

    def attended(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor, cache: Cache, query_shift: int
    ) -> torch.Tensor:
        """What a layer adds to the residual of the tokens at `positions`, which it adds to its cache or states."""
        if self.is_state(layer):
            return self._state_layer(layer, x, cache)
        prefix = f"model.layers.{layer}.self_attn"
        gate = self.times(self.norm(x), f"{prefix}.q_proj.weight").unflatten(1, (-1, 2, self.config["head_dim"]))
        assert bool((gate[:, :, 1].sigmoid() == 1).all()), "an output gate is not open"
        return super().attended(layer, x, positions, cache, query_shift)

    def empty_state(self, layer: int) -> torch.Tensor:
        if layer in self.left_over:
            return self.left_over[layer].clone()
        sizes = (self.config[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
        return torch.zeros(*sizes, dtype=self.wide)

    def _state_layer(self, layer: int, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        prefix = f"model.layers.{layer}.linear_attn"
        convolution, weight = (self.w[f"{prefix}.{name}.weight"] for name in ("conv1d", "norm"))
        heads, dk, dv = (self.config[f"linear_{name}"] for name in ("num_key_heads", "key_head_dim", "value_head_dim"))
        group = self.config["linear_num_value_heads"] // heads
        y = self.norm(x)
        into = self.times(y, f"{prefix}.in_proj_qkvz.weight").unflatten(1, (heads, -1))
        q, k, v, z = into.split([dk, dk, group * dv, group * dv], -1)
        strength, decay = self.times(y, f"{prefix}.in_proj_ba.weight").unflatten(1, (heads, 2, group)).unbind(2)
        channels = torch.cat([each.flatten(1) for each in (q, k, v)], 1)
        if len(cache.keys) == layer:
            cache.keys.append(channels.new_zeros(self.config["linear_conv_kernel_dim"] - 1, channels.shape[1]))
            cache.values.append(self.empty_state(layer))
        seen = torch.cat([cache.keys[layer], channels])
        cache.keys[layer] = seen[len(channels) :].clone()
        windows = seen.unfold(0, self.config["linear_conv_kernel_dim"], 1)
        mixed = silu((windows.to(self.wide) * convolution[:, 0].to(self.wide)).sum(-1).to(self.dtype))
        q, k, v = mixed.split([heads * dk, heads * dk, heads * group * dv], 1)
        q, k = (unit(each.unflatten(1, (heads, dk)).to(self.wide)).repeat_interleave(group, 1) for each in (q, k))
        q, v = q / dk**0.5, v.unflatten(1, (-1, dv)).to(self.wide)
        beta = strength.flatten(1).sigmoid().to(self.wide)
        rate = self.w[f"{prefix}.A_log"].to(self.wide).exp()
        bias = self.w[f"{prefix}.dt_bias"].to(self.wide)
        log_decay = -rate * softplus(decay.flatten(1).to(self.wide) + bias)
        run = in_chunks if len(x) > 1 else one_by_one
        o, cache.values[layer] = run(q, k, v, log_decay, beta, cache.values[layer])
        o = o.to(self.dtype).to(self.wide)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        gated = weight * o.to(self.dtype) * silu(z.reshape(len(x), -1, dv).to(self.wide))
        return self.times(gated.to(self.dtype).flatten(1), f"{prefix}.out_proj.weight")


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, and those that are far shorter left short."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence. q, k: [T, heads, dk]; v: [T, heads, dv]; log_decay, beta: [T, heads]; state: [heads, dk, dv]."""
    out = []
    for t in range(len(q)):
        state = state * log_decay[t].exp()[:, None, None]
        change = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out), state


def in_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with one triangular system a chunk and the state between chunks alone."""
    out = []
    for start in range(0, len(q), CHUNK):
        one, two, three = (each[start : start + CHUNK].transpose(0, 1) for each in (q, k, v))
        total = log_decay[start : start + CHUNK].T.cumsum(1)
        weight = beta[start : start + CHUNK].T[..., None]
        since = (total[:, :, None] - total[:, None]).tril().exp().tril()
        system = (weight * (two @ two.transpose(1, 2)) * since).tril(-1) + torch.eye(two.shape[1], dtype=q.dtype)
        right = weight * (three - total.exp()[..., None] * (two @ state))
        change = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        old = total.exp()[..., None] * (one @ state)
        out.append((old + (one @ two.transpose(1, 2) * since) @ change).transpose(0, 1))
        left = (total[:, -1:] - total).exp()[..., None]
        state = state * total[:, -1].exp()[:, None, None] + (two * left).transpose(1, 2) @ change
    return torch.cat(out), state
