"""TreeScene: tracks the content of each slot while pages of a tree are copied, and compares it with the tree's lists.

A slot holds a token of a prefix, or the state at a prefix's end. A copy moves contents between paired slots in this
record only; no bytes are moved. A list that the engine reorders, moves or mixes up shows in the list itself, in its
slots, or in the engine's own error at a free.

Invariants:
- A list of device slots lies on the device, and a list of host slots on the host.
- The slots of a list hold the tokens of its node in order. The slot of a state holds the end of its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcheck.core.probes.frame.device import HOST, on_host, side
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.byte_copies import reads_lists_on
from kvcheck.core.probes.sglang.rig.prefix_tree import PAGES, STATE, STATES, TOKENS, Tree, TreeKind, build

SHARED, TAIL = 4, 16
"""Tokens that two prefixes share, and the most that one has alone, if a tree loads ten tokens or more."""
WORTH = 6
"""Tokens by which the longest end is longer than the fewest that a tree loads; drawn ends are up to three shorter."""


@dataclass(slots=True)
class TreeScene:
    """A tree and the contents of its slots. way: of copying.

    tail: the most tokens that a prefix adds. tokens: slots on the device. Both are set as the release's tree requires.
    """

    rig: Rig
    way: tuple[str, str]
    holds: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    copies: dict[tuple[str, bool], int] = field(default_factory=dict)
    step: str = ""
    tail: int = TAIL
    tokens: int = TOKENS
    tree: Tree = field(init=False)

    def start(self, kind: TreeKind, model: str, arguments: Any) -> None:
        """Make the tree. If it loads no prefix because all are too short, make a larger tree with longer ones.

        Raises the engine's ValueError if it refuses the way of copying.
        """
        self.tree = build(self.rig, kind, model, arguments, self._copy, self.tokens)
        fewest = int(getattr(self.tree.cache, "load_back_threshold", 0))
        if fewest + WORTH > self.tail:
            self.tail = fewest + WORTH
            self.tokens = TOKENS * -(-self.tail // TAIL)
            self.tree = build(self.rig, kind, model, arguments, self._copy, self.tokens)
            self.rig.judge.note(f"{self.tree.name} loads {fewest} tokens or more: prefixes of {self.tail}")

    def fill(self) -> list[tuple[int, ...]]:
        mix, token = self.rig.mix, 1000
        apart = 100 * -(-self.tail // 100)
        prefixes: list[tuple[int, ...]] = []
        shared: tuple[int, ...] = tuple(range(token, token + SHARED))
        for at in range(3):
            token += apart
            own = tuple(range(token, token + self.tail - mix.below(4)))
            prefixes.append(shared + own if at < 2 else own)
        for at, prefix in enumerate(prefixes):
            self._insert(prefix)
            if at == len(prefixes) - 1 or mix.chance(1, 2):
                self.tree.settle()
                self.check(f"after prefix {at} was left to the tree")
        return prefixes

    def run(self) -> None:
        rig, tree = self.rig, self.tree
        prefixes = self.fill()
        self._evict("after the first leaf was evicted from the device", 1, 0)
        self._evict("evicted from the device")
        self._want(PAGES, is_backup=True)
        asked = [prefixes[1 - rig.schedule % 2], prefixes[2]]
        for prefix in asked:
            tree.ask_load(prefix)
            self.check("when a load was asked for", is_loading=True)
        tree.start_loads()
        self.check("while a load runs")
        tree.settle()
        self.check("after a load")
        self._want(PAGES, is_backup=False)
        self._evict("evicted from the device again")
        tree.evict_host_states(1)
        self.check("after a state was evicted from the host")
        tree.evict_host(self.tail)
        self.check("after an eviction from the host")
        self.account("after an eviction from the host")
        again = tuple(range(5000, 5000 + self.tail))
        self._insert(again)
        tree.settle()
        self._evict("evicted once more")
        tree.ask_load(again)
        tree.start_loads()
        tree.settle()
        self.check("after slots of the host were used again")
        tree.evict_host(2 * self.tokens)
        self.check("after all was evicted from the host")
        for kind in tree.hosts:
            self._want(kind, is_backup=True)
            self._want(kind, is_backup=False)
        rig.judge.count("requests", len(prefixes) + 1)
        rig.judge.count("backups", self.copies[PAGES, True])
        rig.judge.count("loads", self.copies[PAGES, False])

    def check(self, step: str, *, is_loading: bool = False) -> None:
        """is_loading: some device slots are allocated and not filled yet."""
        judge, name = self.rig.judge, self.tree.name
        self.step = step
        sides = {"device": self.tree.device, "host": HOST}
        for listed in self.tree.lists():
            lane = f"{name} {listed.tier} {listed.kind}"
            what = f"{name}, {step}: {listed.tier} {listed.kind} of node {listed.tokens[0]}..{listed.tokens[-1]}"
            judge.reads += 1
            if listed.value.device.type != sides[listed.tier]:
                text = f"{what}: the list lies on {side(listed.value)}, expected it on the {listed.tier}"
                made = self.rig.maker(listed.value)
                judge.find("KV302", "contract", text, tier=listed.tier, lane=lane, minimal=made)
                continue
            if is_loading and listed.tier == "device":
                continue
            slots = [int(slot) for slot in on_host(listed.value).tolist()]
            there = self.holds.get((listed.tier, listed.kind), {})
            seen = [there.get(slot, 0) for slot in slots]
            judge.words[f"{listed.tier}_{listed.kind}"] = judge.words.get(f"{listed.tier}_{listed.kind}", 0) + len(seen)
            if seen != list(listed.wanted):
                text = f"{what}: slots {slots} hold {seen}, expected {list(listed.wanted)}"
                judge.find("KV303", "contract", text, tier=listed.tier, lane=lane)

    def account(self, step: str) -> None:
        """Check that no free slot is in a list or free twice. All free slots are allocated to list them."""
        listed = list(self.tree.lists())
        pools = [("device", PAGES, self.tree.allocator), ("device", STATE, self.tree.states)]
        pools += [("host", kind, host) for kind, host in self.tree.hosts.items()]
        for tier, kind, pool in pools:
            if pool is None:
                continue
            given = pool.alloc(pool.available_size())
            free = [int(slot) for slot in on_host(given).tolist()]
            taken = [each for each in listed if (each.tier, each.kind) == (tier, kind)]
            used = [int(slot) for each in taken for slot in on_host(each.value).tolist()]
            for code, slots, what in (
                ("KV402", sorted({slot for slot in free if free.count(slot) > 1}), "is free twice"),
                ("KV402", sorted({*free} & {*used}), "is free, and a list of the tree names it"),
            ):
                if slots:
                    text = (
                        f"{self.tree.name}, {step}: slot {slots[0]} of {tier} {kind} {what}; so are {len(slots)} slots"
                    )
                    self.rig.judge.find(code, "accounting", text, tier=tier, lane=f"{self.tree.name} {tier} {kind}")
            pool.free(given)

    def _insert(self, tokens: Sequence[int]) -> None:
        tree = self.tree
        pages = tree.allocator.alloc(len(tokens))
        state = tree.states.alloc(1) if tree.states is not None else None
        if pages is None or (tree.states is not None and state is None):
            raise CannotDrive(f"{tree.name}: the device has no slots for {len(tokens)} tokens and a state")
        self._put("device", PAGES, pages, tokens)
        if state is not None:
            self._put("device", STATE, state, tokens[-1:])
        tree.insert(tokens, pages, state)

    def _put(self, tier: str, kind: str, slots: torch.Tensor, tokens: Sequence[int]) -> None:
        there = self.holds.setdefault((tier, kind), {})
        there.update(zip((int(slot) for slot in on_host(slots).tolist()), tokens, strict=True))

    def _evict(self, step: str, tokens: int | None = None, states: int = STATES) -> None:
        self.tree.evict(self.tokens if tokens is None else tokens, states)
        self.tree.settle()
        self.check(step)

    def _want(self, kind: str, *, is_backup: bool) -> None:
        if not self.copies.get((kind, is_backup)):
            way = "backup" if is_backup else "load"
            raise CannotDrive(f"{self.tree.name}: no {way} of {kind} was asked for, {self.step}")

    def _copy(self, kind: str, is_backup: bool, host: torch.Tensor, device: torch.Tensor) -> None:
        """All layers have the same lists, so one copy is enough."""
        judge = self.rig.judge
        self.rig.record()
        reads = reads_lists_on(self.way[0], self.tree.device)
        self.copies[kind, is_backup] = self.copies.get((kind, is_backup), 0) + 1
        # Pools with a backup staged page by page have this flag, and read host ids on the host as well.
        is_staged = is_backup and getattr(self.tree.hosts[kind], "can_use_write_back_jit", False)
        for tier, value in (("host", host), ("device", device)):
            if value.device.type != (reads or value.device.type) and not (tier == "host" and is_staged):
                text = (
                    f"{self.tree.name}: the copy is given {tier} {kind} on {side(value)}, and reads them on the device"
                )
                judge.find("KV302", "contract", text, tier=tier, lane="copy")
        there = [int(slot) for slot in on_host(device).tolist()]
        here = [int(slot) for slot in on_host(host).tolist()]
        if len(here) != len(there):
            text = f"{self.tree.name}: the copy is given {len(here)} host {kind} for {len(there)} of the device"
            judge.find("KV301", "contract", text, lane="pairs")
            return
        source, target = (("device", there), ("host", here)) if is_backup else (("host", here), ("device", there))
        held = self.holds.get((source[0], kind), {})
        moved = [held.get(slot, 0) for slot in source[1]]
        self.holds.setdefault((target[0], kind), {}).update(zip(target[1], moved, strict=True))
