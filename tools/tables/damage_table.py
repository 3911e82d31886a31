"""Which damage of a cache a known-answer model finds, at which step, and what its answer names: a table.

    PYTHONPATH=tests python -m tools.tables.damage_table OUT.csv --trials 20
    PYTHONPATH=tests python -m tools.tables.damage_table OUT.csv --trials 20 --arch deepseek-v3|deepseek-v32
    PYTHONPATH=tests python -m tools.tables.damage_table OUT.csv --trials 20 --kv-scale 4

Each trial damages one page (8 tokens) of one layer, in all heads or in one, after the prompt was read, and decodes one
token more than the walk has nodes: what the first one read, the last one reads again. Pages, nodes and starts are
drawn from the seed. An undamaged run of every request is right first. With MLA the rotary part stands for the keys and
the latent for the values, and both are of all heads. With an indexer, its keys are damaged too, by themselves. With
--kv-scale the cache is in FP8 E4M3, with scales that differ by layer, and the wrong scale is damage too. Layers with a
recurrent state have rows of state_damage.py; beside them pages of attention are damaged in all heads alone.

Invariants:
- Damage that leaves the cache as it was is drawn again, and not counted where every draw does.
- named: the answer's own layer (and head, where it names one) is the damaged one; wrong values are also named by the
  next layer, which looks for what they say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rigs.gpt_oss_forward import GptOssForward
from rigs.indexed_forward import IndexedForward
from rigs.known_answers import forward, small
from rigs.llama_forward import Cache, LlamaForward, Rounding, as_fp8
from rigs.qwen3_next_forward import Qwen3NextForward
from torch import Tensor

from kvcheck.core.base.rng import Rng
from kvcheck.core.model import FAMILIES
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers, draw_nodes, mark_prompt, walk_prompt
from kvcheck.core.model.parameters import INDEXED, KV_SCALES, Parameters
from tools.tables.damage_naming import found_row, page_is_named
from tools.tables.measured import measured
from tools.tables.state_damage import StateQuestion, state_rows

PAGE = 8
DRAWS = 20  # of a damage that changes something
PLACES = 61  # shares no factor with the hops of 4 layers
FIRST = 3  # behind the header and the first place, whose copy at the end is what hops find
REQUESTS = 4
SIZES: dict[str, Any] = {"length": 2048, "nodes": 4096, "digits": 7, "distance": PLACES}
SIZES_OF: dict[str, dict[str, int]] = {
    "gpt-oss": {"window": PLACES + 1},  # so that a windowed layer reads as far back as another one
    "qwen3-next": {"nodes": 1024, "digits": 6},  # a third of the heads of a state
}
COLUMNS = ("damage", "heads", "layer", "test", "trials", "found", "median_step", "named")
WITH_A_LATENT = {"deepseek-v3", "deepseek-v32"}
"""Architectures whose cache has no heads: a key's rotary part and a latent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Keys, values or index keys of one page, of some heads, in the cache and in another request's.

    rows, others: of the page, and of another page of the same request. token: one of the page. turned: by one position.
    scale, other: of this layer, and of another one. rounded: as the cache stores values.
    """

    here: Tensor
    foreign: Tensor
    rows: slice
    others: slice
    token: int
    turned: Rounding
    rounded: Rounding
    scale: Tensor | float = 1.0
    other: Tensor | float = 1.0

    def zero(self) -> None:
        self.here[self.rows] = 0

    def of_another_request(self) -> None:
        self.here[self.rows] = self.foreign[self.rows]

    def one_token_stale(self) -> None:
        self.here[self.token] = self.foreign[self.token]

    def off_by_one(self) -> None:
        self.here[self.rows] = self.turned(self.here[self.rows])

    def twice(self) -> None:
        self.here[self.rows] *= 2

    def half(self) -> None:
        self.here[self.rows] *= 0.5

    def swapped(self) -> None:
        self.here[self.rows], self.here[self.others] = self.here[self.others].clone(), self.here[self.rows].clone()

    def stored_without_its_scale(self) -> None:
        self.here[self.rows] = self.rounded(self.here[self.rows] * self.scale)

    def read_without_its_scale(self) -> None:
        self.here[self.rows] /= self.scale

    def scale_of_another_layer(self) -> None:
        self.here[self.rows] *= self.other / self.scale


def parts_of(model: LlamaForward, cache: Cache, foreign: Cache, layer: int, heads: slice, rng: Rng) -> list[Part]:
    """Keys, values and index keys of a page that is drawn, in this order; index keys where there is an indexer."""
    number = rng.below(PLACES // PAGE)
    another = (number + 1 + rng.below(PLACES // PAGE - 1)) % (PLACES // PAGE)
    rows, others = (slice(FIRST + n * PAGE, FIRST + (n + 1) * PAGE) for n in (number, another))
    token, one = FIRST + number * PAGE + rng.below(PAGE), torch.ones(PAGE)

    part = partial(Part, rows=rows, others=others, token=token, rounded=model.rounded)
    own, neighbour = model.scales(layer), model.scales(layer + 1 if layer == 0 else layer - 1)
    made = [
        part(
            here=held[layer][:, heads],
            foreign=theirs[layer][:, heads],
            turned=lambda x: model.turn(x, one),
            scale=own[at],
            other=neighbour[at],
        )
        for at, (held, theirs) in enumerate(((cache.keys, foreign.keys), (cache.values, foreign.values)))
    ]
    if isinstance(model, IndexedForward):
        turn = model.turn_index
        own_index, others_index = cache.index[layer], foreign.index[layer]
        made.append(part(here=own_index, foreign=others_index, turned=lambda x: turn(x[:, None], one)[:, 0]))
    return made


@dataclass(frozen=True, slots=True)
class Damage:
    """Is done to each of these parts, so far as the cache has them: KEYS, VALUES, INDEX."""

    name: str
    done: Callable[[Part], None]
    parts: tuple[int, ...]


KEYS, VALUES, INDEX = range(3)
BOTH, ALL = (KEYS, VALUES), (KEYS, VALUES, INDEX)
DAMAGE = (
    Damage("zero", Part.zero, BOTH),
    Damage("foreign", Part.of_another_request, BOTH),
    Damage("foreign_keys", Part.of_another_request, (KEYS,)),
    Damage("foreign_values", Part.of_another_request, (VALUES,)),
    Damage("one_token_stale", Part.one_token_stale, BOTH),
    Damage("position_off_by_one", Part.off_by_one, (KEYS,)),
    Damage("keys_twice", Part.twice, (KEYS,)),
    Damage("keys_half", Part.half, (KEYS,)),
    Damage("values_twice", Part.twice, (VALUES,)),
    Damage("values_half", Part.half, (VALUES,)),
    Damage("keys_swapped_values_not", Part.swapped, (KEYS,)),
    Damage("pages_swapped", Part.swapped, ALL),
)
OF_INDEX = (
    Damage("foreign_with_index_rows", Part.of_another_request, ALL),
    Damage("index_rows_zero", Part.zero, (INDEX,)),
    Damage("index_rows_of_another_request", Part.of_another_request, (INDEX,)),
    Damage("index_row_of_one_token_stale", Part.one_token_stale, (INDEX,)),
    Damage("index_rows_off_by_one", Part.off_by_one, (INDEX,)),
    Damage("index_rows_twice", Part.twice, (INDEX,)),
    Damage("index_rows_half", Part.half, (INDEX,)),
    Damage("index_rows_swapped_latents_not", Part.swapped, (INDEX,)),
)
OF_SCALES = (
    Damage("keys_stored_without_their_scale", Part.stored_without_its_scale, (KEYS,)),
    Damage("keys_read_without_their_scale", Part.read_without_its_scale, (KEYS,)),
    Damage("values_stored_without_their_scale", Part.stored_without_its_scale, (VALUES,)),
    Damage("values_read_without_their_scale", Part.read_without_its_scale, (VALUES,)),
    Damage("scales_of_another_layer", Part.scale_of_another_layer, BOTH),
)

NAMES_WITH_A_LATENT = {
    "foreign_keys": "foreign_rotary_part",
    "foreign_values": "foreign_latent",
    "keys_twice": "rotary_part_twice",
    "keys_half": "rotary_part_half",
    "values_twice": "latent_twice",
    "values_half": "latent_half",
    "keys_swapped_values_not": "rotary_parts_swapped_latents_not",
}

FAULTS: dict[str, tuple[str, float]] = {
    "window_one_larger": ("window_off", 1),
    "window_one_smaller": ("window_off", -1),
    "next_position_visible": ("ahead", 1),
    "sink_lost": ("sink_times", torch.inf),
    "sink_twice": ("sink_times", 2.0),
}
"""What is wrong in one layer of a model with windows and sinks while the cache is right: an attribute by layer."""


class Question:
    """A request, its known answers, and the cache and logits after its prompt."""

    def __init__(self, parameters: Parameters, model: LlamaForward, request: tuple[int, ...]) -> None:
        self.parameters, self.model, self.request = parameters, model, request
        self.expected = answers(Alphabet(parameters), request, PLACES + 1)
        self.cache = Cache()
        self.first = model.step(request, self.cache)
        if (wrong := self.first_wrong(self.cache)) is not None:
            raise SystemExit(f"an undamaged run is wrong at step {wrong[0]}: the model or its answers are broken")

    def first_wrong(self, cache: Cache) -> tuple[int, int] | None:
        """(step, token) of the first wrong answer on a cache, each right answer fed back."""
        said = [int(self.first.argmax())]
        said += self.model.step(self.expected[:-1], cache.copy(), every=True).argmax(-1).tolist()
        return next(((i, a) for i, (a, b) in enumerate(zip(said, self.expected, strict=True)) if a != b), None)


def rows(arch: str, kv_scale: int, trials: int, seed: int) -> Iterator[dict[str, object]]:
    has_scales = kv_scale > 1
    of_cache = {"kv_scale": kv_scale, "dtype": "fp8-kv"} if has_scales else {}
    p, rng = small(family=arch, **(SIZES | SIZES_OF.get(arch, {}) | of_cache)), Rng(seed)
    model = forward(p, torch.bfloat16, as_fp8) if has_scales else forward(p)
    questions = _questions(p, model, rng, REQUESTS)
    if isinstance(model, Qwen3NextForward):
        kept = {
            test: [StateQuestion(p, model, each.request, PLACES) for each in asked] for test, asked in questions.items()
        }
        yield from state_rows(kept, trials, rng)
    names = NAMES_WITH_A_LATENT if arch in WITH_A_LATENT else {}
    layers = [layer for layer in range(p.layers) if not p.kind(layer).is_state]
    for damage in (*DAMAGE, *(OF_INDEX if arch in INDEXED else ()), *(OF_SCALES if has_scales else ())):
        for head in (None, *(() if arch in WITH_A_LATENT or p.has_state else range(p.kv_heads))):
            for layer in layers:
                for test, asked in questions.items():
                    name = names.get(damage.name, damage.name)
                    yield row(model, asked, damage, layer, head, trials, rng) | {"damage": name, "test": test}
    if isinstance(model, GptOssForward):
        questions = _questions(p, model, rng, trials)
        for fault in FAULTS:
            for layer in range(p.layers):
                for test, asked in questions.items():
                    yield fault_row(model, asked, fault, layer) | {"damage": fault, "test": test}


def _questions(p: Parameters, model: LlamaForward, rng: Rng, count: int) -> dict[str, list[Question]]:
    questions: dict[str, list[Question]] = {"walk": [], "position": []}
    alphabet = Alphabet(p)
    for _ in range(count):
        nodes = draw_nodes(alphabet, rng, PLACES)
        questions["walk"].append(Question(p, model, walk_prompt(alphabet, nodes, rng.below(PLACES))))
        values = [rng.below(1 << p.bits) for _ in range(PLACES + 1)]
        questions["position"].append(Question(p, model, mark_prompt(alphabet, values, rng.below(p.phases))))
    return questions


def fault_row(model: GptOssForward, asked: list[Question], fault: str, layer: int) -> dict[str, object]:
    """A fault of one layer, tried with each request. A layer without a window has no fault of one."""
    name, value = FAULTS[fault]
    asked = asked if model.has_window(layer) or name != "window_off" else []
    getattr(model, name)[layer] = value
    wrong = [(question, question.first_wrong(question.cache)) for question in asked]
    getattr(model, name).clear()
    found = [
        (said[0], page_is_named(question.parameters, said[1], question.expected[said[0]], layer, None))
        for question, said in wrong
        if said is not None
    ]
    return found_row("all", layer, len(asked), found)


def row(
    model: LlamaForward,
    asked: list[Question],
    damage: Damage,
    layer: int,
    head: int | None,
    trials: int,
    rng: Rng,
) -> dict[str, object]:
    found: list[tuple[int, bool]] = []
    tried = 0
    heads = slice(None) if head is None else slice(head, head + 1)
    for trial in range(trials):
        question, other = asked[trial % len(asked)], asked[(trial + 1) % len(asked)]
        for _ in range(DRAWS):
            cache = question.cache.copy()
            parts = parts_of(model, cache, other.cache, layer, heads, rng)
            for part in (parts[at] for at in damage.parts if at < len(parts)):
                damage.done(part)
            if cache.differs(question.cache):
                break
        else:
            continue  # keys of marks, for one, are the same in every request
        tried += 1
        if (wrong := question.first_wrong(cache)) is not None:
            step, said = wrong
            found.append((step, page_is_named(question.parameters, said, question.expected[step], layer, head)))
    return found_row("all" if head is None else str(head), layer, tried, found)


def markdown(table: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for damage in dict.fromkeys(row["damage"] for row in table):
        cells = [damage.replace("_", " ")]
        for test in ("walk", "position"):
            of_test = [row for row in table if (row["damage"], row["test"]) == (damage, test)]
            trials, found, named = (sum(row[name] for row in of_test) for name in ("trials", "found", "named"))
            step = f"{median(row['median_step'] for row in of_test if row['found']):.0f}" if found else "–"
            cells += [f"{found} of {trials}", f"{named} of {found}", step]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arch", choices=FAMILIES.names(), default="llama")
    parser.add_argument("--kv-scale", type=int, choices=KV_SCALES, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        table = [*measured(given.out, COLUMNS, rows(given.arch, given.kv_scale, given.trials, given.seed))]
    sys.stdout.write("\n".join(markdown(table)) + "\n")


if __name__ == "__main__":
    main()
