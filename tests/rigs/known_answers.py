"""Small known-answer models for tests, and requests to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rigs.deepseek_forward import DeepseekForward
from rigs.gpt_oss_forward import GptOssForward
from rigs.indexed_forward import IndexedForward
from rigs.llama_forward import Cache, LlamaForward, Rounding
from rigs.qwen3_next_forward import Qwen3NextForward

from kvcheck.core.base.rng import Rng
from kvcheck.core.model import FAMILIES
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers, draw_nodes, mark_prompt, walk_prompt
from kvcheck.core.model.parameters import Parameters

SMALL: dict[str, Any] = {
    "family": "llama",
    "layers": 4,
    "kv_heads": 4,
    "group": 2,
    "head_dim": 64,
    "length": 512,
    "dtype": "bf16",
    "nodes": 256,
    "digits": 5,
    "base": 4,
    "distance": 31,
}

OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "deepseek-v3": {"group": 1, "head_dim": 128},
    "deepseek-v32": {"group": 1, "head_dim": 128, "top_k": 8},
    "gpt-oss": {"window": 24},
    "qwen3-next": {"head_dim": 256},
}
"""What a small model of each family has instead."""
FORWARDS = {
    "llama": LlamaForward,
    "deepseek-v3": DeepseekForward,
    "deepseek-v32": IndexedForward,
    "gpt-oss": GptOssForward,
    "qwen3-next": Qwen3NextForward,
}

LEAST_MARGIN = 15.9
"""Nats between the right token and the next one. It is 16, less what float32 sees of the norm's other registers."""
PAGE = slice(16, 32)
Damage = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
DAMAGE: dict[str, Damage] = {
    "zero": lambda k, v, _k, _v: (k[PAGE].zero_(), v[PAGE].zero_()),
    "foreign": lambda k, v, other_k, other_v: (k[PAGE].copy_(other_k[PAGE]), v[PAGE].copy_(other_v[PAGE])),
    "foreign values": lambda _k, v, _ok, other_v: v[PAGE].copy_(other_v[PAGE]),
    "keys of one head": lambda k, _v, other_k, _ov: k[PAGE, 2].copy_(other_k[PAGE, 2]),
    "values of one head": lambda _k, v, _ok, other_v: v[PAGE, 2].copy_(other_v[PAGE, 2]),
    "one token": lambda k, v, other_k, other_v: (k[20].copy_(other_k[20]), v[20].copy_(other_v[20])),
    "twice the keys": lambda k, _v, _ok, _ov: k[PAGE].mul_(2),
    "half the keys": lambda k, _v, _ok, _ov: k[PAGE].mul_(0.5),
    "twice the values": lambda _k, v, _ok, _ov: v[PAGE].mul_(2),
    "half the values": lambda _k, v, _ok, _ov: v[PAGE].mul_(0.5),
}
"""What is done to the keys and values of a layer's page, with those of another request."""


def small(**changes: Any) -> Parameters:
    return Parameters(**(SMALL | OF_FAMILY[changes.get("family", "llama")] | changes))


def walk(parameters: Parameters, *, count: int, seed: int = 1) -> tuple[int, ...]:
    alphabet, rng = Alphabet(parameters), Rng(seed)
    return walk_prompt(alphabet, draw_nodes(alphabet, rng, count), rng.below(count))


def marks(parameters: Parameters, *, count: int, seed: int = 1) -> tuple[int, ...]:
    rng = Rng(seed)
    values = [rng.below(1 << parameters.bits) for _ in range(count)]
    return mark_prompt(Alphabet(parameters), values, rng.below(parameters.phases))


def forward(
    parameters: Parameters, dtype: torch.dtype = torch.float32, rounded: Rounding | None = None
) -> LlamaForward:
    family = FAMILIES.load(parameters.family)
    return FORWARDS[parameters.family](family.config(parameters), family.tensors(parameters), dtype, rounded)


def margins(model: LlamaForward, request: tuple[int, ...], expected: tuple[int, ...]) -> torch.Tensor:
    """Nats between each expected token and the best other one, expected ones fed back; negative where one is wrong."""
    cache = Cache()
    first = model.step(request, cache)
    logits = torch.cat([first[None], model.step(expected[:-1], cache, every=True)])
    right = torch.tensor(expected)[:, None]
    lead = logits.gather(1, right)[:, 0]
    return lead - logits.scatter(1, right, -torch.inf).amax(1)


def least_margin(parameters: Parameters, model: LlamaForward, request: tuple[int, ...], count: int) -> float:
    return float(margins(model, request, answers(Alphabet(parameters), request, count)).min())


def questions(parameters: Parameters) -> list[tuple[int, ...]]:
    """A walk of 37 places, or 13, or one more where that shares a factor with the hops, and a position test."""
    count = 37 if parameters.nodes > 37 else 13
    return [
        walk(parameters, count=count + (count % parameters.hops == 0)),
        marks(parameters, count=parameters.farthest + 3),
    ]


def first_wrong(
    model: LlamaForward, cache: Cache, logits: torch.Tensor, expected: tuple[int, ...]
) -> tuple[int, int] | None:
    """(step, token) of the first answer that is not the expected one, in greedy decoding; None where all are right."""
    for step, token in enumerate(expected):
        said = int(logits.argmax())
        if said != token:
            return step, said
        logits = model.step([token], cache)
    return None


def first_wrong_at_once(
    model: LlamaForward, cache: Cache, logits: torch.Tensor, expected: tuple[int, ...]
) -> tuple[int, int] | None:
    """The same in one step: up to the first wrong answer, greedy decoding reads the expected ones too."""
    said = [int(logits.argmax()), *model.step(expected[:-1], cache, every=True).argmax(-1).tolist()]
    return next(((step, a) for step, (a, b) in enumerate(zip(said, expected, strict=True)) if a != b), None)


def lost(parameters: Parameters, found: tuple[int, int] | None) -> tuple[int, int | None] | None:
    """The layer, and the KV head if it is one, that a wrong answer names; None where it names none."""
    return None if found is None else Alphabet(parameters).lost_at(found[1])


def place_of_bit(parameters: Parameters, right: int, said: int) -> tuple[int, int]:
    """The layer and KV head of the highest bit in which a mark differs from the right one."""
    (phase, bits), (also, wrong) = (Alphabet(parameters).as_mark(token) or (-1, 0) for token in (right, said))
    assert phase == also != -1
    pair = (phase - 1) % parameters.phases * parameters.bits + (bits ^ wrong).bit_length() - 1
    return divmod(pair, parameters.kv_heads)
