"""Probe pool-copy: a pool's own CPU copy and restore, into other pages, which had other owners in between.

The target pages hold a third request's content before the restore. Rows of a bystander are judged as well.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcheck.core.probes.frame.cuda_streams import CopiesToHost
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.pools import PAGES, STATES, SmallPool, optional, pool_names, small_pool, take

SAVED, BYSTANDER, RECYCLER = 1, 2, 3
BYSTANDER_PAGES = 2
LEAST_PAGES, MOST_PAGES = 2, 3


class PoolCopy:
    def needs(self, subject: str) -> tuple[str, ...]:
        return pool_names(subject)

    def control(self, rig: Rig) -> None:
        made, tokens = small_pool(rig, rig.subject), None
        tokens = take(made, LEAST_PAGES)
        state = 1 if rig.subject == "mamba" else None
        made.write(SAVED, tokens, state)
        copy = rig.measured(lambda: save(made, tokens, state), "get_cpu_copy")
        rig.measured(lambda: restore(made, copy, tokens, state), "load_cpu_copy")
        made.check(rig.judge, SAVED, tokens, state, when="saved and restored at once")

    def measure(self, rig: Rig) -> None:
        made = small_pool(rig, rig.subject)
        size = made.page_size
        pages = shuffled(rig, take(made, PAGES - 3).view(-1, size))
        count = LEAST_PAGES + rig.mix.below(MOST_PAGES - LEAST_PAGES + 1)
        tail = rig.mix.below(size) if rig.mix.chance(1, 2) else 0
        old, new = pages[:count], pages[count : 2 * count]
        if rig.mix.chance(1, 2):
            new = torch.cat((old[-1:], new[1:]))  # one page is among those it had
        length = count * size - tail
        held = pages[2 * count : 2 * count + BYSTANDER_PAGES].reshape(-1)
        states = (1, 2, STATES) if rig.subject == "mamba" else (None, None, None)
        tokens = old.reshape(-1)[:length]
        made.write(SAVED, tokens, states[0])
        made.write(BYSTANDER, held, states[1])
        copy = rig.measured(lambda: save(made, tokens, states[0]), "get_cpu_copy")
        recycle(made, pages.reshape(-1), held, states)
        target = new.reshape(-1)[:length]
        rig.measured(lambda: restore(made, copy, target, states[2]), "load_cpu_copy")
        rig.judge.count("retractions")
        rig.judge.count("resumes")
        rig.judge.count("foreign_reuses")
        rig.judge.count("requests", 3)
        made.check(rig.judge, SAVED, target, states[2], when="restored into pages that another request had used")
        made.check(rig.judge, BYSTANDER, held, states[1], when="beside a request that was saved and restored")


def shuffled(rig: Rig, pages: torch.Tensor) -> torch.Tensor:
    order: list[int] = []
    for at in range(len(pages)):
        order.insert(rig.mix.below(at + 1), at)
    return pages[order]


def save(made: SmallPool, tokens: torch.Tensor, state: int | None) -> Any:
    call = made.pool.get_cpu_copy
    with CopiesToHost():
        return call(tokens, **optional(call, mamba_indices=_one(state, tokens)))


def _one(state: int | None, tokens: torch.Tensor) -> torch.Tensor | None:
    return None if state is None else torch.tensor([state], device=tokens.device)


def restore(made: SmallPool, copy: Any, tokens: torch.Tensor, state: int | None) -> None:
    call = made.pool.load_cpu_copy
    call(copy, tokens, **optional(call, mamba_indices=_one(state, tokens)))


def recycle(
    made: SmallPool, everything: torch.Tensor, held: torch.Tensor, states: tuple[int | None, int | None, int | None]
) -> None:
    kept = set(held.tolist())
    tokens = torch.tensor([token for token in everything.tolist() if token not in kept])
    made.write(RECYCLER, tokens)
    if states[0] is not None:
        for state in range(1, STATES + 1):
            if state != states[1]:
                made.writer.write(RECYCLER, "state", (state,))
