"""Probe retract: a request is retracted and resumed by the scheduler's calls. Another request uses its pages between.

Invariants:
- Rows, pages and states come from the engine's own tables and allocators, and go back to them.
- The control makes the same calls on the MHA pool. What fails there is no bug of another family.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcheck.core.probes.frame.copies_to_host import CopiesToHost
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.pool_copy import shuffled
from kvcheck.core.probes.sglang.rig.pools import PAGES, SmallPool, pool_names, small_pool, take
from kvcheck.core.probes.sglang.rig.requests import REQUEST_NEEDS, make_committed_request

SAVED, BYSTANDER, RECYCLER = 1, 2, 3
PLAINEST = "mha"
BYSTANDER_PAGES = 2
ROOM = PAGES - 3
"""Pages that each family has, also the window pool."""


class Retract:
    """Req.offload_kv_cache and Req.load_kv_cache."""

    def needs(self, subject: str) -> tuple[str, ...]:
        chain = (*REQUEST_NEEDS, "request.save", "request.load")
        return (*chain, *dict.fromkeys((*pool_names(PLAINEST), *pool_names(subject))))

    def control(self, rig: Rig) -> None:
        """Save and restore on the MHA pool, into the same row and pages."""
        made = small_pool(rig, PLAINEST)
        request = make_committed_request(rig, 2 * made.page_size)
        row = admit(made, request)
        tokens = take(made, 2)
        hold(made, row, tokens)
        made.write(SAVED, tokens)
        rig.measured(lambda: offload(made, request), "offload_kv_cache")
        rig.measured(lambda: request.load_kv_cache(made.request_pool, made.allocator), "load_kv_cache")
        made.check(rig.judge, SAVED, tokens, when="saved and restored at once")
        own = small_pool(rig, rig.subject)
        plain = take(own, 1)
        own.write(BYSTANDER, plain)
        own.check(rig.judge, BYSTANDER, plain, when="written and read")

    def measure(self, rig: Rig) -> None:
        """Retract, let another request use the pages, and resume on a new row."""
        made = small_pool(rig, rig.subject)
        size = made.page_size
        mixed(rig, made)
        pages = 2 + rig.mix.below(2)
        length = pages * size - (rig.mix.below(size) if rig.mix.chance(1, 2) else 0)
        first = take(made, 1 + rig.mix.below(2))
        held = take(made, BYSTANDER_PAGES)
        made.write(BYSTANDER, held)
        request = make_committed_request(rig, length)
        row = admit(made, request)
        taken = take(made, pages)
        hold(made, row, taken[:length])
        made.write(SAVED, taken[:length], state_of(made, row))
        rig.measured(lambda: offload(made, request), "offload_kv_cache")
        release(made, request, taken)
        made.allocator.free(first)
        recycler = make_committed_request(rig, size)
        other_row = admit(made, recycler)
        others = take(made, made_pages(made))
        made.write(RECYCLER, others, state_of(made, other_row))
        give_back(rig, made, others)
        release(made, recycler, None)
        if rig.mix.chance(1, 2):
            take(made, 1)  # or the same pages in the same order would be likely
        row = admit(made, request)
        again = take(made, pages)
        hold(made, row, again[:length])
        rig.measured(lambda: request.load_kv_cache(made.request_pool, made.allocator), "load_kv_cache")
        for name in ("retractions", "resumes", "foreign_reuses"):
            rig.judge.count(name)
        rig.judge.count("requests", 3)
        when = "resumed into pages that another request had used"
        made.check(rig.judge, SAVED, again[:length], state_of(made, row), when=when)
        made.check(rig.judge, BYSTANDER, held, when="beside a request that was retracted and resumed")


def mixed(rig: Rig, made: SmallPool) -> None:
    """Make the allocator give out pages in a drawn order."""
    give_back(rig, made, take(made, made_pages(made)))


def give_back(rig: Rig, made: SmallPool, tokens: torch.Tensor) -> None:
    """Free the pages one by one in a drawn order. An allocator may sort pages that are freed at once."""
    for page in shuffled(rig, tokens.view(-1, made.page_size)):
        made.allocator.free(page)


def offload(made: SmallPool, request: Any) -> None:
    """Save the request, as from a device."""
    with CopiesToHost():
        request.offload_kv_cache(made.request_pool, made.allocator)


def made_pages(made: SmallPool) -> int:
    """The number of free pages."""
    free: int = made.allocator.available_size() // made.page_size
    return free


def admit(made: SmallPool, request: Any) -> int:
    """Give the request a row. Returns its number."""
    rows = made.request_pool.alloc([request])
    if not rows:
        raise CannotDrive("the request table has no row left")
    return int(rows[0])


def hold(made: SmallPool, row: int, tokens: torch.Tensor) -> None:
    """Write the request's slots to its row."""
    made.request_pool.write((row, slice(0, len(tokens))), tokens.to(torch.int32))


def release(made: SmallPool, request: Any, tokens: torch.Tensor | None) -> None:
    """Free the request's pages, state and row."""
    if tokens is not None:
        made.allocator.free(tokens)
    if made.family == "mamba":
        made.request_pool.free_mamba_cache(request)
    made.request_pool.free(request)


def state_of(made: SmallPool, row: int) -> int | None:
    """The state slot of a row."""
    if made.family != "mamba":
        return None
    return int(made.request_pool.req_index_to_mamba_index_mapping[row])
