"""Damage of one layer's recurrent state, for the table of damage_table.py: what is done, when, and what is found.

A trial decodes a few tokens, damages what one layer keeps of the request, and decodes as many tokens more as the walk
has nodes. Some damage happens while the prompt is read. A median step counts from the damage.

Invariants:
- Damage that leaves the states as they were is not counted.
- named: the answer's own layer is the damaged one, and the head where it names one and one was damaged. Of a wrong
  mark that is the layer and head of its wrong bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rigs.llama_forward import Cache
from rigs.qwen3_next_forward import Qwen3NextForward

from kvcheck.core.base.rng import Rng
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers
from kvcheck.core.model.parameters import Parameters
from tools.tables.damage_naming import found_row, state_is_named

MOST_FIRST = 5  # answers before the damage, and at least 2
READ_PARTS = 32  # tokens of the prompt's first part


class StateQuestion:
    """A request, its known answers, and what is kept of it after the prompt and after each of its first answers."""

    def __init__(self, parameters: Parameters, model: Qwen3NextForward, request: tuple[int, ...], after: int) -> None:
        self.parameters, self.model, self.request, self.after = parameters, model, request, after
        self.expected = answers(Alphabet(parameters), request, after + MOST_FIRST + 1)
        cache = Cache()
        model.step(request, cache)
        self.kept = [cache.copy()]
        for token in self.expected[:MOST_FIRST]:
            model.step([token], cache)
            self.kept.append(cache.copy())
        if (wrong := self.first_wrong(self.kept[0].copy(), 0)) is not None:
            raise SystemExit(f"an undamaged run is wrong at step {wrong[0]}: the model or its answers are broken")

    def first_wrong(self, cache: Cache, first: int) -> tuple[int, int] | None:
        """(step after `first`, token) of the first wrong answer on a cache that holds so many answers."""
        asked = self.expected[first : first + self.after]
        said = self.model.step(asked, cache, every=True).argmax(-1).tolist()
        right = self.expected[first + 1 : first + 1 + self.after]
        return next(((i, a) for i, (a, b) in enumerate(zip(said, right, strict=True), 1) if a != b), None)


class Trial:
    """One layer of one request after `first` answers; what a damage changes is `cache`."""

    def __init__(self, own: StateQuestion, other: StateQuestion, layer: int, rng: Rng) -> None:
        self.own, self.other, self.layer = own, other, layer
        self.first = 2 + rng.below(MOST_FIRST - 1)
        self.head = rng.below(own.kept[0].values[layer].shape[0])
        self.cache = own.kept[self.first].copy()

    @property
    def kv_head(self) -> int:
        return self.head * self.own.parameters.kv_heads // self.own.kept[0].values[self.layer].shape[0]

    @property
    def old(self) -> Cache:
        return self.own.kept[self.first - 1]

    @property
    def foreign(self) -> Cache:
        return self.other.kept[self.first]

    def state_zero(self) -> None:
        self.cache.values[self.layer].zero_()

    def state_from(self, source: Cache) -> None:
        self.cache.values[self.layer].copy_(source.values[self.layer])

    def head_from(self, source: Cache) -> None:
        self.cache.values[self.layer][self.head] = source.values[self.layer][self.head]

    def head_zero(self) -> None:
        self.cache.values[self.layer][self.head] = 0

    def window_zero(self) -> None:
        self.cache.keys[self.layer].zero_()

    def window_from(self, source: Cache) -> None:
        self.cache.keys[self.layer].copy_(source.keys[self.layer])

    def with_window_from(self, source: Cache) -> None:
        self.state_from(source)
        self.window_from(source)

    def state_times(self, factor: float) -> None:
        self.cache.values[self.layer] *= factor

    def updated_twice(self) -> None:
        again = self.cache.copy()
        again.keys[self.layer] = self.old.keys[self.layer].clone()
        self.own.model.step(self.own.expected[self.first - 1 : self.first], again)
        self.state_from(again)

    def not_cleared(self) -> None:
        """The state begins as that of an earlier request."""
        model = self.own.model
        model.left_over[self.layer] = self.foreign.values[self.layer]
        self._read_again(Cache(), 0)
        del model.left_over[self.layer]

    def last_part_not_applied(self) -> None:
        """The state after the prompt lacks its second part."""
        cache = self._first_part()
        kept = cache.values[self.layer].clone()
        self._read_again(cache, READ_PARTS)
        self.cache.values[self.layer].copy_(kept)

    def window_zero_between_parts(self) -> None:
        cache = self._first_part()
        cache.keys[self.layer].zero_()
        self._read_again(cache, READ_PARTS)

    def _first_part(self) -> Cache:
        cache = Cache()
        self.own.model.step(self.own.request[:READ_PARTS], cache)
        return cache

    def _read_again(self, cache: Cache, start: int) -> None:
        self.own.model.step(self.own.request[start:], cache)
        self.cache, self.first = cache, 0


WHOLE: dict[str, Callable[[Trial], None]] = {
    "zero": Trial.state_zero,
    "foreign": lambda trial: trial.state_from(trial.foreign),
    "foreign_with_window": lambda trial: trial.with_window_from(trial.foreign),
    "one_step_old": lambda trial: trial.state_from(trial.old),
    "one_step_old_with_window": lambda trial: trial.with_window_from(trial.old),
    "updated_twice": Trial.updated_twice,
    "twice_as_strong": lambda trial: trial.state_times(2),
    "half_as_strong": lambda trial: trial.state_times(0.5),
    "window_zero": Trial.window_zero,
    "window_foreign": lambda trial: trial.window_from(trial.foreign),
    "window_one_step_old": lambda trial: trial.window_from(trial.old),
    "not_cleared": Trial.not_cleared,
    "last_part_not_applied": Trial.last_part_not_applied,
    "window_zero_between_parts": Trial.window_zero_between_parts,
}
ONE_HEAD: dict[str, Callable[[Trial], None]] = {
    "one_head_zero": Trial.head_zero,
    "one_head_foreign": lambda trial: trial.head_from(trial.foreign),
    "one_head_one_step_old": lambda trial: trial.head_from(trial.old),
}


def state_rows(asked: Mapping[str, list[StateQuestion]], trials: int, rng: Rng) -> Iterator[dict[str, object]]:
    model = asked["walk"][0].model
    layers = [layer for layer in range(int(str(model.config["num_hidden_layers"]))) if model.is_state(layer)]
    for damage in WHOLE | ONE_HEAD:
        for layer in layers:
            for test, questions in asked.items():
                yield _row(questions, damage, layer, trials, rng) | {"damage": f"state_{damage}", "test": test}


def _row(asked: list[StateQuestion], damage: str, layer: int, trials: int, rng: Rng) -> dict[str, object]:
    found: list[tuple[int, bool]] = []
    tried = 0
    for number in range(trials):
        own, other = asked[number % len(asked)], asked[(number + 1) % len(asked)]
        trial = Trial(own, other, layer, rng)
        (WHOLE | ONE_HEAD)[damage](trial)
        if not trial.cache.differs(own.kept[trial.first]):
            continue
        tried += 1
        if (wrong := own.first_wrong(trial.cache, trial.first)) is not None:
            step, said = wrong
            head = trial.kv_head if damage in ONE_HEAD else None
            expected = own.expected[trial.first + step]
            found.append((step, state_is_named(own.parameters, said, expected, layer, head)))
    return found_row("one" if damage in ONE_HEAD else "all", layer, tried, found)
