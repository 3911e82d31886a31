"""Trees of SGLang, and its peers that have to agree."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcheck.core.probes.frame.content import ProbeJudge
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.sglang.agreement import FakeProcessGroup, is_mismatch
from kvcheck.core.probes.sglang.rig.pd_pair import PREFILL, StandInLink, session
from kvcheck.core.probes.sglang.rig.prefix_tree import Tree
from kvcheck.core.probes.sglang.rig.tree_accounts import TreeAccounts

PAGES, STATES = 5, 3
SIZES = ("full_evictable_size", "full_protected_size", "mamba_evictable_size", "mamba_protected_size")
SLOTS, PREFIX = [7, 3, 5], (11, 12, 13, 14)


class Allocator:
    """Pages of one token from the first number on."""

    page_size = 1

    def __init__(self, first: int, size: int) -> None:
        self.size, self.free_pages = size, torch.arange(first, first + size)
        self.release_pages = self.free_pages[:0]

    def available_size(self) -> int:
        return len(self.free_pages)


def accounts(states: list[int], first: int = 1) -> tuple[TreeAccounts, Any, ProbeJudge]:
    """Accounts over a tree without nodes and such free states, what holds them, and the judge."""
    held = SimpleNamespace(size=STATES, free_slots=torch.tensor(states))
    made = SimpleNamespace(
        family="mamba", page_size=1, allocator=Allocator(first, PAGES), request_pool=SimpleNamespace(mamba_pool=held)
    )
    tree = SimpleNamespace(root_node=SimpleNamespace(children={}), **dict.fromkeys(SIZES, lambda: 0))
    judge = ProbeJudge()
    rig: Any = SimpleNamespace(judge=judge)
    return TreeAccounts(rig, made, tree, None), held, judge  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 1, 7])
def test_states_are_those_that_were_free_whatever_their_numbers(first: int) -> None:
    settled, slots, judge = accounts([*range(first, first + STATES)], first)
    slots.free_slots = slots.free_slots[1:]
    settled.check({}, {"a": first}, "while one is held")
    assert not judge.findings
    settled.check({}, {}, "with one lost")
    settled.check({}, {"a": first, "b": first + STATES}, "with one too many")
    settled.check({}, {"a": first + 1}, "with one held and free")
    told = [(each.code, each.page) for each in judge.findings]
    assert told == [("KV401", first), ("KV402", first + STATES)], "the first of each code is kept"


@pytest.mark.parametrize("states", [[1, 2], [1, 2, 2]])
def test_states_that_are_not_all_free_at_first_cannot_be_accounted_for(states: list[int]) -> None:
    with pytest.raises(CannotDrive, match=rf"of {STATES} states these are free before the first request: \[1, 2"):
        accounts(states)


class Made:
    """Made with anything, like a key or the parameters of a match."""

    def __init__(self, key: object) -> None:
        self.key = key


class Parts:
    MAMBA = 1


class Core:
    """A compiled core."""


class ByNode:
    """A cache of releases that list the slots of a match by its node."""

    tree_core = Core()

    def match_prefix(self, params: Made) -> Any:
        return SimpleNamespace(last_device_node=1, device_prefix_len=len(SLOTS))

    def path_device_indices(self, node: int) -> torch.Tensor:
        assert node == 1
        return torch.tensor(SLOTS)


class ByMatch:
    """A cache of earlier releases, whose match lists them."""

    tree_core = Core()

    def match_prefix(self, params: Made) -> Any:
        return SimpleNamespace(last_device_node=1, device_indices=torch.tensor(SLOTS))


@pytest.mark.parametrize("kind", [ByNode, ByMatch])
def test_slots_of_a_match_are_listed_in_each_releases_words(kind: type[ByNode | ByMatch]) -> None:
    table = dict.fromkeys(("tree.match", "tree.key"), (f"{__name__}:Made",))
    table |= {
        "tree.compiled-core": (f"{__name__}:Core",),
        "tree.components": (f"{__name__}:Parts",),
        "tree.path-slots": (f"{__name__}:{kind.__name__}.path_device_indices",),
    }
    rig: Any = SimpleNamespace(names=Names(table), measured=lambda call, _, **how: call())
    tree = Tree(
        rig=rig, device="cpu", cache=kind(), name="a tree", allocator=None, states=None, hosts={}, known=[PREFIX]
    )
    assert [(each.value.tolist(), each.tokens) for each in tree.lists()] == [(SLOTS, PREFIX[: len(SLOTS)])]


def test_late_bytes_land_in_order_when_told_and_what_is_not_registered_is_refused() -> None:
    source, target = np.arange(32, dtype=np.uint8), np.zeros(32, dtype=np.uint8)
    here, there = source.ctypes.data, target.ctypes.data
    link = StandInLink(lambda address: address >= there + 8)
    link.register(PREFILL, [here], [32])
    link.register(session(0), [there], [16])
    assert link.batch_transfer_sync(session(0), [here, here + 8], [there, there + 8], [8, 4]) == 0
    assert link.batch_transfer_sync(session(0), [here + 20], [there + 12], [4]) == 0
    assert target[:16].tolist() == [*range(8), *[0] * 8]
    source[8:12] = 99  # what is sent is what was there when it was sent
    link.land(session(0), 1)
    assert target[8:16].tolist() == [8, 9, 10, 11, 0, 0, 0, 0]
    link.land(session(0))
    assert target[12:16].tolist() == [20, 21, 22, 23]
    assert link.batch_transfer_sync(session(0), [here], [there + 12], [8]) == -1
    assert link.batch_transfer_sync(session(1), [here], [there], [8]) == -1
    assert (link.refused, link.moved_bytes) == (2, 16)


def reduced(values: list[int]) -> Callable[[], list[int]]:
    def call() -> list[int]:
        tensor = torch.tensor(values)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        kept: list[int] = tensor.tolist()
        return kept

    return call


def test_ranks_reduce_together() -> None:
    group = FakeProcessGroup(2)
    assert group.together([reduced([4, 3]), reduced([2, 4])], "") == [[2, 3], [2, 3]]
    assert group.collectives == 1


@pytest.mark.parametrize("other", [reduced([1]), list], ids=["another number", "no call"])
def test_a_rank_whose_peer_does_something_else_is_told(other: Callable[[], list[int]]) -> None:
    first, second = FakeProcessGroup(2).together([reduced([4, 3]), other], "")
    assert is_mismatch(first)
    assert is_mismatch(second) or second == []
