"""KnownModel: the written weights of a known-answer model for a shape, what its requests say, and what it answers.

Every job is a position test. A token of a job is a mark whose value follows from its author and position, so requests
that share a prefix share marks. Requests of even numbers read `far` positions back, which in a window is its oldest
token; those of odd numbers read their own last token.

Invariants:
- Answers are worked out from tokens alone. No weight and nothing that a pool holds is used for them.
- Both kinds of requests have equal keys and values, so a shared prefix serves both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from kvcheck.core.base import content
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.live.model import FAMILIES
from kvcheck.core.live.model.alphabet import HEADER, Alphabet
from kvcheck.core.live.model.answers import answers
from kvcheck.core.live.model.family import fit_digits
from kvcheck.core.live.model.parameters import Parameters
from kvcheck.core.workload.jobs import Job, token_authors

ARCHITECTURES = {"mha": "llama", "swa": "llama", "mla": "deepseek-v3"}
"""Pool families that there is attention for, by the architecture whose weights are used."""
LENGTH = 1024
"""Most tokens of a request and its answer."""
NODES = 16
"""The walk is not asked for, so its alphabet is the smallest."""
LATENT_HEADS = 4
"""Heads that read one latent."""
FAR = 5
"""How far back a request reads where every layer sees all."""


class KnownModel:
    """The model of one shape. Raises UsageError for a shape that no weights fit."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        far = shape.window - 1 if shape.window_layers else FAR
        parameters = _parameters(shape, far)
        self.readers = (parameters, replace(parameters, distance=0))
        family = FAMILIES.load(parameters.family)
        self.family = parameters.family
        self._config = family.config(parameters)
        self.tensors, own = (
            {
                name: torch.from_numpy(np.ascontiguousarray(each))
                for name, each in family.tensors(row)
                if ".mlp." not in name
            }
            for row in self.readers
        )
        self._own_queries = {name: each for name, each in own.items() if ".q_proj." in name}

    def number(self, name: str) -> float:
        """A size or constant of the architecture, by its name in config.json."""
        return float(str(self._config[name]))

    def weights(self, layer: int, name: str, *, reads_itself: bool = False) -> torch.Tensor:
        """[out, in] of a layer's attention. reads_itself: those of requests that do, which differ in their queries."""
        full = f"model.layers.{layer}.self_attn.{name}.weight"
        return (self._own_queries if reads_itself else self.tensors)[full]

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The norm in front of a layer, of a latent and of the head: their weights are one."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.number("rms_norm_eps"))

    def reads_itself(self, request: int) -> bool:
        """The request's tokens read themselves, and no other."""
        return bool(request % 2)

    def prompt(self, job: Job) -> IndexArray:
        """Token ids of a prompt, [prompt_tokens]. Raises UsageError for one that is too short to ask anything."""
        if job.prompt_tokens < least_prompt(self.shape):
            raise UsageError(
                f"request {job.request}: a position test over {self.readers[0].distance} positions has at least "
                f"{least_prompt(self.shape)} tokens; got a prompt of {job.prompt_tokens}"
            )
        alphabet = Alphabet(self.readers[0])
        authors = token_authors(job)[: job.prompt_tokens]
        codes = content.codes(authors, np.arange(job.prompt_tokens, dtype=np.int64)).tolist()
        marks = (
            alphabet.mark(at, code % (1 << self.readers[0].bits)) for at, code in enumerate(codes) if at >= len(HEADER)
        )
        return np.array([*HEADER, *marks], dtype=np.int64)

    def answers(self, job: Job) -> tuple[int, ...]:
        """The tokens that a right model samples."""
        asked = self.readers[self.reads_itself(job.request)]
        return answers(Alphabet(asked), self.prompt(job).tolist(), job.output_tokens)


@cache
def known_model(shape: ModelShape) -> KnownModel:
    """The model of a shape, made once."""
    return KnownModel(shape)


def least_prompt(shape: ModelShape) -> int:
    """Tokens of the shortest prompt that asks something."""
    return len(HEADER) + (shape.window if shape.window_layers else FAR + 1)


def asked(job: Job, shape: ModelShape) -> Job:
    """The job with a prompt that is long enough. Its output is as much shorter, but at least a token."""
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


def _parameters(shape: ModelShape, far: int) -> Parameters:
    if shape.family not in ARCHITECTURES:
        raise UsageError(
            f"decoder known-answer: no attention for {shape.name}, of family {shape.family}; there is for "
            f"{', '.join(ARCHITECTURES)}"
        )
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
        distance=far,
    )
