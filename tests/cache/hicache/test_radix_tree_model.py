"""The prefix tree against a table of every prefix that should be cached, under random calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.cache import tokens_of
from rigs.examples import examples

from kvcheck.core.cache.hicache.node import Node, WindowPages, owned
from kvcheck.core.cache.hicache.radix_tree import Offer, PrefixTree

SIZE = 2
WINDOW = 5
"""The position after p pages sees the last two pages."""

Path = tuple[str, ...]


@dataclass(slots=True)
class Row:
    """One cached prefix. device, host: the id of its last page. window, state: the tiers that hold them."""

    device: int | None = None
    host: int | None = None
    window: set[str] = field(default_factory=set)
    state: set[str] = field(default_factory=set)


class Model:
    """Every cached prefix, and the prefixes under lock."""

    def __init__(self, kind: str) -> None:
        self.rows: dict[Path, Row] = {}
        self.locked: list[tuple[Path, Node]] = []
        self.kind = kind

    def longest(self, text: str, *, device_only: bool) -> int:
        tiers = {"device"} if device_only else {"device", "host"}
        best = 0
        for stop in range(1, len(text) + 1):
            row = self.rows.get(tuple(text[:stop]))
            if row is None or (row.device is None and (device_only or row.host is None)):
                break
            seen = [self.rows[tuple(text[:at])] for at in range(max(1, stop - 1), stop + 1)]
            held = {"plain": True, "state": bool(row.state & tiers), "window": all(r.window & tiers for r in seen)}
            best = stop if held[self.kind] else best
        return best


class Tree:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tree = PrefixTree(SIZE, window=WINDOW if kind == "window" else 0, has_state=kind == "state")
        self.given = 0

    def take(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        self.given += count
        return np.arange(self.given - count + 1, self.given + 1)


def spelled(node: Node) -> list[Path]:
    letters = [chr(np.frombuffer(key, dtype=np.int64)[0]) for each in reversed([*node.path()]) for key in each.keys]
    return [tuple(letters[: stop + 1]) for stop in range(len(letters) - len(node.keys), len(letters))]


def insert(rig: Tree, model: Model, text: str, n: int) -> None:
    """Insert in both; the first n window pages are gone."""
    full = rig.take(len(text))
    window = WindowPages.of(np.where(np.arange(len(text)) < n, 0, 9))
    state = 5 if rig.kind == "state" and n % 2 else None
    offer = Offer(full=full, window=window if rig.kind == "window" else None, state=state)
    taken = rig.tree.insert(tokens_of(text, SIZE), offer)
    expected = []
    for at in range(len(text)):
        row = model.rows.setdefault(tuple(text[: at + 1]), Row())
        expected.append(row.device is None)
        if row.device is None:
            row.device = int(full[at])
            row.window |= {"device"} if rig.kind == "window" and at >= n else set()
    assert taken.full.tolist() == expected
    end = model.rows.get(tuple(text))
    assert taken.state == (state is not None and end is not None and "device" not in end.state)
    if taken.state and end is not None:
        end.state.add("device")
    assert [each for node in taken.grown for each in spelled(node)] == [
        tuple(text[: at + 1]) for at, each in enumerate(expected) if each
    ]


def move(rig: Tree, model: Model, verb: str, text: str) -> None:
    """Sink the node at a text's end to the host, make it forget its companions, or take it out."""
    node = (
        rig.tree.device_match(tokens_of(text, SIZE))[0]
        if verb != "remove"
        else rig.tree.match(tokens_of(text, SIZE)).node
    )
    if node is rig.tree.root or node.locks:
        return
    rows = [model.rows[path] for path in spelled(node)]
    if verb == "forget":
        node.device.window, node.device.state = None, None
        for row in rows:
            row.window.discard("device")
            row.state.discard("device")
    elif verb == "sink" and not any(child.device.is_live for child in node.children.values()):
        if node.host.full is None:
            node.host.full = owned(rig.take(len(rows)))
            node.host.window, node.host.state = node.device.window, node.device.state
            for row, each in zip(rows, node.host.full.tolist(), strict=True):
                row.host = each
                row.window |= {"host"} if "device" in row.window else set()
                row.state |= {"host"} if "device" in row.state else set()
        node.device.full, node.device.window, node.device.state = None, None, None
        for row in rows:
            row.device = None
            row.window.discard("device")
            row.state.discard("device")
    elif verb == "remove" and not node.children:
        paths = spelled(node)
        rig.tree.remove(node)
        for path in paths:
            del model.rows[path]


def check(rig: Tree, model: Model) -> None:
    """Every row has its page in some node, with the ids and locks that it should have."""
    seen: dict[Path, tuple[int | None, int | None]] = {}
    locks: dict[Path, int] = {}
    for node in rig.tree.nodes():
        for at, path in enumerate(spelled(node)):
            device, host = node.device.full, node.host.full
            seen[path] = (None if device is None else int(device[at]), None if host is None else int(host[at]))
            locks[path] = node.locks
    assert seen == {path: (row.device, row.host) for path, row in model.rows.items()}
    assert locks == {path: sum(each[: len(path)] == path for each, _ in model.locked) for path in model.rows}
    assert rig.tree.root.locks == len(model.locked)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "match", "match", "lock", "unlock", "sink", "sink", "forget", "remove"]),
        st.text(alphabet="ab", max_size=4),
        st.integers(0, 3),
    ),
    min_size=8,
    max_size=40,
)


@pytest.mark.parametrize("kind", ["plain", "window", "state"])
@examples(200)
@given(calls=CALLS)
def test_the_tree_caches_what_a_table_of_all_prefixes_caches(kind: str, calls: list[tuple[str, str, int]]) -> None:
    rig, model = Tree(kind), Model(kind)
    for verb, text, n in calls:
        if verb == "insert":
            insert(rig, model, text, n)
        elif verb in ("match", "lock"):
            device_only = bool(n % 2)
            match = rig.tree.match(tokens_of(text, SIZE), device_only=device_only)
            pages = model.longest(text, device_only=device_only)
            assert match.pages == pages
            assert [path for node in match.nodes for path in spelled(node)] == [
                tuple(text[:stop]) for stop in range(1, pages + 1)
            ]
            live = [model.rows[tuple(text[:stop])].device is not None for stop in range(1, pages + 1)]
            assert match.device_pages == sum(live)
            if verb == "lock":
                rig.tree.lock(match.node)
                model.locked.append((tuple(text[:pages]), match.node))
        elif verb == "unlock" and model.locked:
            rig.tree.unlock(model.locked.pop(n % len(model.locked))[1])
        elif verb != "unlock":
            move(rig, model, verb, text)
        check(rig, model)
    for _, node in model.locked:
        rig.tree.unlock(node)
    assert all(node.locks == 0 for node in rig.tree.nodes())
