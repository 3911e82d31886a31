"""KnownModel: the written weights of a known-answer model for a shape, its prompts, and its answers.

A token is a mark whose value follows from its author and position, so requests that share a prefix share marks. A
request reads from a position of the shared prefix. Without one, requests of odd numbers read their own last token, and
the others FAR positions back. Layers with a window read its oldest token at the most, and those with a state three
positions back. Answers are computed from tokens alone, without weights or the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np
import torch
from torch.nn.functional import silu, softplus

from kvcheck.core.base import content
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.model import FAMILIES
from kvcheck.core.model.alphabet import HEADER, Alphabet
from kvcheck.core.model.answers import answers
from kvcheck.core.model.family import fit_digits
from kvcheck.core.model.parameters import STATE_DISTANCE, Parameters
from kvcheck.core.stress.workload.jobs import Job, token_authors

L2_EPS = 1e-6
ARCHITECTURES = {
    "mha": "llama",
    "swa": "llama",
    "mla": "deepseek-v3",
    "nsa": "deepseek-v32",
    "mamba": "qwen3-next",
}
LENGTH = 1024
"""Most tokens of a request and its answer."""
NODES = 16
"""The walk is not used, so its alphabet is the smallest."""
LATENT_HEADS = 4
TOP_K = 4
"""Positions that an indexer picks: the header, the one of the question, and one more. All prompts are longer."""
FAR = 5
"""Distance of the reads of even requests in layers without window or state."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Parameters):
    """distances: how many positions back a request reads, by layer."""

    distances: tuple[int, ...]

    def distance_of(self, layer: int) -> int:
        return self.distances[layer]


class KnownModel:
    """The model of one shape. Raises UsageError for a shape that no weights fit."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.parameters = _parameters(shape)
        self.family = self.parameters.family
        family = FAMILIES.load(self.family)
        self._config = family.config(self.parameters)
        self._check_rows()
        self.tensors = {
            name: torch.from_numpy(np.ascontiguousarray(each))
            for name, each in family.tensors(self.parameters)
            if ".mlp." not in name
        }
        self._alphabet = Alphabet(self.parameters)

    def _check_rows(self) -> None:
        shape = self.shape
        latent: dict[str, tuple[str, ...]] = {"latent_dim": ("kv_lora_rank", "qk_rope_head_dim")}
        indexed = latent | {"index_head_dim": ("index_head_dim",)}
        state: dict[str, tuple[str, ...]] = {
            "conv_kernel": ("linear_conv_kernel_dim",),
            "ssm_heads": ("linear_num_value_heads",),
            "ssm_key_dim": ("linear_key_head_dim",),
            "ssm_value_dim": ("linear_value_head_dim",),
        }
        sizes = {"mla": latent, "nsa": indexed, "mamba": state}
        for field, names in sizes.get(shape.family, {}).items():
            wanted, got = int(sum(self.number(name) for name in names)), getattr(shape, field)
            if got != wanted:
                raise UsageError(
                    f"decoder known-answer: {shape.name} cannot hold the rows of {self.family}; expected {field} "
                    f"{wanted}, got {got}"
                )

    def number(self, name: str) -> float:
        return float(str(self._config[name]))

    def tensor(self, layer: int, name: str) -> torch.Tensor:
        return self.tensors[f"model.layers.{layer}.{name}"]

    def weights(self, layer: int, name: str) -> torch.Tensor:
        """[out, in] of a layer's attention; of k_norm.bias and other vectors, [dims]."""
        full = f"self_attn.{name}"
        return self.tensor(layer, full if name.endswith((".weight", ".bias")) else f"{full}.weight")

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the norm before a layer, of a latent or before the head: all their weights are one."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.number("rms_norm_eps"))

    def distances(self, job: Job) -> tuple[int, ...]:
        back = _to_shared(job)
        if back is None:
            far = self.shape.window - 1 if self.shape.window_layers else FAR
            back = 0 if job.request % 2 else far
        farthest = dict.fromkeys(self.shape.window_layers, self.shape.window - 1)
        kinds = enumerate(map(self.parameters.kind, range(self.parameters.layers)))
        return tuple(STATE_DISTANCE if kind.is_state else min(back, farthest.get(at, back)) for at, kind in kinds)

    def prompt(self, job: Job) -> IndexArray:
        """Token ids of a prompt, [prompt_tokens]. Raises UsageError if it is too short for a question."""
        if job.prompt_tokens < least_prompt(self.shape):
            raise UsageError(
                f"request {job.request}: a position test of {self.shape.name} has at least "
                f"{least_prompt(self.shape)} tokens; got a prompt of {job.prompt_tokens}"
            )
        authors = token_authors(job)[: job.prompt_tokens]
        codes = content.codes(authors, np.arange(job.prompt_tokens, dtype=np.int64)).tolist()
        values = 1 << self.parameters.bits
        marks = (self._alphabet.mark(at, code % values) for at, code in enumerate(codes) if at >= len(HEADER))
        return np.array([*HEADER, *marks], dtype=np.int64)

    def answers(self, job: Job) -> tuple[int, ...]:
        reading = Reading(**asdict(self.parameters), distances=self.distances(job))
        return answers(Alphabet(reading), self.prompt(job).tolist(), job.output_tokens)


@cache
def known_model(shape: ModelShape) -> KnownModel:
    return KnownModel(shape)


def least_prompt(shape: ModelShape) -> int:
    return len(HEADER) + (shape.window if shape.window_layers else FAR + 1)


def asked(job: Job, shape: ModelShape) -> Job:
    """The output is shortened by the tokens that the prompt gains, but to no less than one."""
    missing = least_prompt(shape) - job.prompt_tokens
    if missing <= 0:
        return job
    blocks = list(job.blocks)
    if blocks[-1][0] == job.request:
        blocks[-1] = (job.request, blocks[-1][1] + missing)
    else:
        blocks.append((job.request, missing))
    return replace(
        job,
        prompt_tokens=job.prompt_tokens + missing,
        output_tokens=max(1, job.output_tokens - missing),
        blocks=tuple(blocks),
    )


def _to_shared(job: Job) -> int | None:
    marks = np.flatnonzero(token_authors(job)[: job.prompt_tokens] != job.request)
    marks = marks[marks >= len(HEADER)]
    drawn = content.codes_of(job.request) % len(marks) if len(marks) else 0
    return job.prompt_tokens - 1 - int(marks[drawn]) if len(marks) else None


def _parameters(shape: ModelShape) -> Parameters:
    architecture = ARCHITECTURES[shape.family]
    family = FAMILIES.load(architecture)
    heads, head_dim = shape.num_kv_heads or LATENT_HEADS, shape.head_dim or family.head_dim
    digits, base = fit_digits(nodes=NODES, kv_heads=heads, room=family.room(head_dim, LENGTH))
    return Parameters(
        family=architecture,
        layers=shape.num_layers,
        kv_heads=heads,
        group=1,
        head_dim=head_dim,
        length=LENGTH,
        dtype="fp32",
        nodes=NODES,
        digits=digits,
        base=base,
        distance=0,
        top_k=TOP_K if family.top_k else 0,
    )
