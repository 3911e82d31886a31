"""check_round_trip: buffers that share memory are named, and legal sharing is clean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.own_pools import SEEDS, SLOTS, Pool, judged

from kvcheck.testing import IntegrityError, NotJudged, check_round_trip, watch

Pair = tuple[torch.Tensor, torch.Tensor]


class Two:
    """A state and hidden states of each slot, in the memory that `make` gives."""

    def __init__(self, make: Callable[[], Pair]) -> None:
        self.state, self.hidden = make()

    def save(self, ids: Any) -> Any:
        return self.state[ids].clone(), self.hidden[ids].clone()

    def load(self, copy: Any, ids: Any) -> None:
        self.state[ids], self.hidden[ids] = copy


# The second buffer, made of the first.
SHARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another type": lambda state: state.view(torch.bfloat16),
    "its bytes": lambda state: state.view(torch.uint8),
    "set on its storage": lambda state: torch.empty(0, dtype=torch.int16).set_(
        state.untyped_storage(), 0, (SLOTS, 16), (16, 1)
    ),
    "strided": lambda state: state.as_strided((SLOTS, 4), (8, 2)),
    "by numpy": lambda state: torch.from_numpy(state.numpy().view(np.int16)),
    "by a memoryview": lambda state: torch.frombuffer(memoryview(state.numpy()), dtype=torch.float16).view(SLOTS, -1),
    "one object": lambda state: state,
    "a view of the same": lambda state: state.view(-1).view(SLOTS, 8),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_buffer_in_the_memory_of_another_is_named_and_the_advice_finds_it(name: str, seed: int) -> None:
    def make() -> Pair:
        state = torch.zeros(SLOTS, 8)
        return state, SHARED[name](state)

    pool = Two(make)
    (told,) = judged(pool, seed=seed).not_tried
    assert told.startswith("hidden: shares memory with state") and "watch()" in told
    with pytest.raises(IntegrityError, match="KV303"), watch(pool.state[7], is_view=True):
        pool.hidden[7] = 3


class Layers(Pool):
    """A list of layers that `make` gives, instead of keys, values and scales."""

    def __init__(self, make: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        raw = torch.zeros(3 * SLOTS * 4)
        self.k = [make(raw, layer) for layer in range(3)]
        self.v = self.k_scale = []


@pytest.mark.parametrize("is_multiplied", [False, True])
def test_layers_that_are_one_memory_are_named_once(is_multiplied: bool) -> None:
    pool = Layers(lambda raw, layer: raw[: SLOTS * 4].view(SLOTS, 4))
    pool.k = pool.k[:1] * 3 if is_multiplied else pool.k
    (told,) = judged(pool).not_tried
    assert told.startswith("k[1], k[2]: shares memory with k[0]")


def overlapping() -> Pair:
    raw = torch.zeros(SLOTS * 16)
    return raw[: SLOTS * 8].view(SLOTS, 8), raw[SLOTS * 4 : SLOTS * 12].view(SLOTS, 8)


def overlapping_of_memoryviews() -> Pair:
    memory = memoryview(bytearray(SLOTS * 64))
    first = torch.frombuffer(memory, dtype=torch.float32, count=SLOTS * 8).view(SLOTS, 8)
    return first, torch.frombuffer(memory, dtype=torch.float32, count=SLOTS * 8, offset=SLOTS * 16).view(SLOTS, 8)


def own_rows_overlap() -> Pair:
    return torch.zeros(SLOTS * 4 + 4).as_strided((SLOTS, 8), (4, 1)), torch.zeros(SLOTS, 3)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (overlapping, "hidden shares a part of its memory with state"),
        (overlapping_of_memoryviews, "hidden shares a part of its memory with state"),
        (own_rows_overlap, "state, does not keep what is written to row"),
    ],
)
def test_rows_that_overwrite_each_other_are_not_judged(make: Callable[[], Pair], told: str) -> None:
    with pytest.raises(NotJudged, match=told):
        judged(Two(make))


def test_memory_that_two_addresses_lead_to_is_named(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_bytes(bytes(SLOTS * 32))

    def mapped_twice() -> Pair:
        both = [torch.from_file(str(file), shared=True, size=SLOTS * 8).view(SLOTS, 8) for _ in range(2)]
        return both[0], both[1]

    with pytest.raises(NotJudged, match=r"another buffer \(hidden\) shares its memory"):
        judged(Two(mapped_twice))


class Arena(Two):
    """Legal: one arena, kept beside views of its parts."""

    def __init__(self, kind: torch.dtype, at: int) -> None:
        self.arena = torch.zeros(SLOTS, 64, dtype=kind)
        self.state, self.hidden = self.arena[:, :at], self.arena[:, at:]


class TypedArena(Arena):
    def __init__(self) -> None:
        super().__init__(torch.uint8, 32)
        self.state, self.hidden = self.state.view(torch.float32), self.hidden.view(torch.bfloat16)


class ArenaOfLayers(Pool):
    """Legal: an arena, its layers, and keys, values and typed scales of each."""

    def __init__(self) -> None:
        self.arena = torch.zeros(2, SLOTS, 24, dtype=torch.uint8)
        self.layers = list(self.arena)
        self.k, self.v = [each[:, :8] for each in self.layers], [each[:, 8:16] for each in self.layers]
        self.k_scale = [each[:, 16:].view(torch.float32) for each in self.layers]


def apart_in_one_memory() -> Pair:
    memory = memoryview(bytearray(SLOTS * 64))
    first = torch.frombuffer(memory, dtype=torch.float32, count=SLOTS * 8).view(SLOTS, 8)
    return first, torch.frombuffer(memory, dtype=torch.bfloat16, offset=SLOTS * 32).view(SLOTS, 16)


LEGAL: tuple[Callable[[], Any], ...] = (
    lambda: Arena(torch.float32, 40),
    TypedArena,
    ArenaOfLayers,
    lambda: Two(apart_in_one_memory),
    lambda: Layers(lambda raw, layer: raw.view(3, SLOTS, 4)[layer]),
    lambda: Layers(lambda raw, layer: raw.view(SLOTS, 3, 4)[:, layer]),
)


@pytest.mark.parametrize("make", LEGAL)
def test_parts_that_lie_apart_in_one_memory_are_clean(make: Callable[[], Any]) -> None:
    for seed in SEEDS:
        assert judged(make(), seed=seed).not_tried == ()


def parts_of_bytes() -> tuple[torch.Tensor, ...]:
    whole = torch.zeros(SLOTS, 64, dtype=torch.uint8)
    return whole, whole[:, :32].view(torch.float32), whole[:, 32:48].view(torch.bfloat16)


def part_of_bytes() -> tuple[torch.Tensor, ...]:
    whole = torch.zeros(SLOTS, 64, dtype=torch.int8)
    return whole, whole[:, :32].view(torch.bfloat16)


def parts_of_floats() -> tuple[torch.Tensor, ...]:
    whole = torch.zeros(SLOTS, 16)
    return whole, whole.view(torch.bfloat16)[:, :16], whole.view(torch.bfloat16)[:, 16:]


class Several:
    """Tensors of which some lie in another. moved: those that save and load move."""

    def __init__(self, rows: tuple[torch.Tensor, ...], moved: slice) -> None:
        self.rows, self.moved = rows, moved

    def save(self, ids: Any) -> Any:
        return [each[ids] for each in self.rows[self.moved]]

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.rows[self.moved], copy, strict=True):
            each[ids] = rows


@pytest.mark.parametrize("make", [parts_of_bytes, part_of_bytes, parts_of_floats])
@pytest.mark.parametrize("seed", SEEDS)
def test_parts_that_are_saved_beside_the_whole_are_named_and_an_arena_is_not(make: Any, seed: int) -> None:
    (told,) = judged(Several(make(), slice(None)), seed=seed).not_tried
    assert told.startswith(f"{', '.join(f'rows[{at}]' for at in range(1, len(make())))}: shares memory with rows[0]")
    assert judged(Several(make(), slice(1)), seed=seed).not_tried == ()


@pytest.mark.parametrize("shape", [(128, 32), (4096,)])
def test_memory_without_rows_in_a_part_of_a_buffer_is_named(shape: tuple[int, ...]) -> None:
    rows = torch.zeros(SLOTS, 64)
    work = rows.view(torch.bfloat16).view(-1)[:4096].view(shape)
    told = judged(Several((rows, work), slice(1))).not_tried
    assert any(text.startswith("rows[1]: shares memory with rows[0] as bfloat16") for text in told)


def test_each_layer_is_named_with_the_one_whose_memory_it_has() -> None:
    state = [torch.zeros(SLOTS, 8) for _ in range(2)]
    pool = {"state": state, "hidden": [each.view(torch.bfloat16) for each in state]}
    moved = Several((*state,), slice(None))
    (told,) = check_round_trip(pool, save=moved.save, load=moved.load, slots=SLOTS).not_tried
    assert told.startswith("hidden[0], hidden[1]: shares memory with state[0], state[1] as bfloat16")


class Latent(Pool):
    """Legal: values are a part of the keys, and each row is moved once."""

    def __init__(self) -> None:
        self.k = [torch.zeros(SLOTS, 12) for _ in range(2)]
        self.v = [each[:, :8] for each in self.k]

    def buffers(self) -> list[torch.Tensor]:
        return self.k


class Tied(Pool):
    """Legal: the second layer uses the memory of the first on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.k[1] = self.k[0]


@pytest.mark.parametrize("kind", [Latent, Tied])
def test_sharing_on_purpose_is_no_finding(kind: type) -> None:
    for seed in SEEDS:
        result = judged(kind(), seed=seed)
        assert not result.findings and min(result.words.values()) > 0
