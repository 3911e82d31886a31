"""Case: operations of the prefix tree, compared with a dictionary from each page's bytes to its id.

The dictionary is the plainest prefix cache: it cannot split, lock or evict a prefix.

Invariants:
- Both hold the same prompts, which share prefixes of random lengths. A lookup has to find the same pages in both.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import WrongOutput
from kvcheck.core.bench.arms import Arm, Comparison, Point, Setting
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.hicache.radix_tree import Offer, PrefixTree

PROMPTS = 64
PAGES = (4, 64)


def points(setting: Setting) -> tuple[Point, ...]:
    """Prefix lookup and locking in the tree, compared with a dictionary of pages."""
    size = setting.shape.page_size
    return tuple(
        Point(
            case="tree",
            size=f"{pages} pages",
            shape=setting.shape.name,
            bytes=None,
            makers={
                "dictionary": partial(_dictionary, pages=pages, size=size),
                "match": partial(_tree, pages=pages, size=size, locks=False),
                "match-and-lock": partial(_tree, pages=pages, size=size, locks=True),
            },
            comparisons=tuple(Comparison(arm=arm, baseline="dictionary") for arm in ("match", "match-and-lock")),
            note=f"{PROMPTS} prompts that share prefixes",
        )
        for pages in PAGES
    )


Prompts = list[npt.NDArray[np.int64]]


def _prompts(memory: FreshMemory, pages: int, size: int) -> Prompts:
    """Prompts of whole pages; each shares a prefix with one before it."""
    found: Prompts = []
    for number in range(PROMPTS):
        fresh = memory.random.integers(1 << 31, size=pages * size)
        if number:
            other, shared = memory.random.integers(number), size * int(memory.random.integers(pages))
            fresh[:shared] = found[other][:shared]
        found.append(fresh)
    return found


def _keys(tokens: npt.NDArray[np.int64], size: int) -> list[bytes]:
    return [tokens[at : at + size].tobytes() for at in range(0, len(tokens), size)]


def _dictionary(memory: FreshMemory, *, pages: int, size: int) -> Arm:
    prompts = _prompts(memory, pages, size)
    known: dict[tuple[int, bytes], int] = {}
    for tokens in prompts:
        parent = 0
        for key in _keys(tokens, size):
            parent = known.setdefault((parent, key), len(known) + 1)
    wanted = prompts[int(memory.random.integers(PROMPTS))]
    found: list[int] = []

    def call() -> None:
        parent, count = 0, 0
        for key in _keys(wanted, size):
            page = known.get((parent, key))
            if page is None:
                break
            parent, count = page, count + 1
        found[:] = [count]

    return Arm(call=call, check=lambda: _found(found, pages))


def _tree(memory: FreshMemory, *, pages: int, size: int, locks: bool) -> Arm:
    prompts = _prompts(memory, pages, size)
    tree = PrefixTree(size)
    for number, tokens in enumerate(prompts):
        tree.insert(tokens, Offer(full=np.arange(1 + number * pages, 1 + (number + 1) * pages, dtype=np.int64)))
    wanted = prompts[int(memory.random.integers(PROMPTS))]
    found: list[int] = []

    def call() -> None:
        match = tree.match(wanted)
        if locks:
            tree.lock(match.node)
            tree.unlock(match.node)
        found[:] = [match.pages]

    return Arm(call=call, check=lambda: _found(found, pages))


def _found(found: list[int], pages: int) -> None:
    if found != [pages]:
        raise WrongOutput(f"tree: expected all {pages} pages of a cached prompt, got {found}; it has no price")
