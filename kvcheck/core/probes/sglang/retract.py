"""Probe retract: a request is retracted and resumed by the scheduler's calls. Another request uses its pages between.

On a device it is repeated while batches of the model are held on a stream of their own, as with overlapped scheduling:
one writes the request's pages and state when it is saved, and one of another request those that it gets when it is
restored. A CPU does not show it: there the platform of newer releases waits for nothing.

Invariants:
- Rows, pages and states come from the engine's own tables and allocators, and go back to them.
- The control makes the same calls on the MHA pool. A failure there is no bug of another family.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvcheck.core.probes.frame.content import ProbeJudge
from kvcheck.core.probes.frame.cuda_streams import CopiesToHost
from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.streams import LAZY, Machine
from kvcheck.core.probes.sglang.pool_copy import shuffled
from kvcheck.core.probes.sglang.rig.pools import PAGES, Arrival, SmallPool, arrive, pool_names, small_pool, take
from kvcheck.core.probes.sglang.rig.scheduler_loop import REQUEST_NEEDS, make_committed_request, record_of

SAVED, BYSTANDER, RECYCLER, BEFORE = 1, 2, 3, 4
PLAINEST = "mha"
BYSTANDER_PAGES = 2
ROOM = PAGES - 3
"""Pages of each family, also of the window pool."""
ORDERS_EACH = 2
"""Saved behind a batch, and restored behind one."""
TRIES = 2
"""Tries of them on a device, if its watchdog ended a hold in the first."""
OVERLAPPED = (
    "a scheduler that retracts and resumes while a batch is at work on another stream (overlapped scheduling), and "
    "does not itself wait for that stream before"
)
"""Condition of these findings: the calls of a request do not show whether its scheduler waits."""


class Retract:
    """Req.offload_kv_cache and Req.load_kv_cache."""

    def needs(self, subject: str) -> tuple[str, ...]:
        chain = (*REQUEST_NEEDS, "request.save", "request.load")
        return (*chain, *dict.fromkeys((*pool_names(PLAINEST), *pool_names(subject))))

    def control(self, rig: Rig) -> None:
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
        if not (rig.judge.findings or isinstance(rig.machine, Machine)):
            overlapped(rig)


def overlapped(rig: Rig) -> None:
    """Orders count only if no watchdog ended a hold."""
    for _ in range(TRIES):
        found = ProbeJudge()
        _overlap(rig, found)
        for each in found.findings:
            text = f"{each.message}; batches were still at work, and the call did not wait for them"
            rig.judge.keep(replace(each, code="KV201", message=text, lane="overlap", condition=OVERLAPPED))
        found.findings.clear()
        rig.judge.absorb(found)
        if not rig.machine.fired:
            rig.judge.count("orderings_checked", ORDERS_EACH)
            return
        rig.judge.note("not exercised: the orders of a try, as the watchdog ended a hold of it")


def _overlap(rig: Rig, judge: ProbeJudge) -> None:
    machine, made = rig.machine, small_pool(rig, rig.subject)
    machine.reset(LAZY, 0)
    forward = machine.side()
    length = (2 + rig.schedule % 2) * made.page_size
    held = take(made, BYSTANDER_PAGES)
    made.write(BYSTANDER, held)
    request = make_committed_request(rig, length)
    row = admit(made, request)
    taken = take(made, length // made.page_size)
    hold(made, row, taken)
    made.write(BEFORE, taken, state_of(made, row))
    _at_work(rig, forward, made.arrivals(SAVED, taken, state_of(made, row)))
    with machine.waiting():
        rig.measured(lambda: offload(made, request), "offload_kv_cache")
    release(made, request, taken)
    recycler = make_committed_request(rig, made.page_size)
    other_row = admit(made, recycler)
    others = take(made, made_pages(made))
    _at_work(rig, forward, made.arrivals(RECYCLER, others, state_of(made, other_row)))
    made.allocator.free(others)
    release(made, recycler, None)
    row = admit(made, request)
    again = take(made, length // made.page_size)
    hold(made, row, again)
    with machine.waiting():
        rig.measured(lambda: request.load_kv_cache(made.request_pool, made.allocator), "load_kv_cache")
    machine.settle()
    made.check(judge, SAVED, again, state_of(made, row), when="saved and restored while batches were at work")
    made.check(judge, BYSTANDER, held, when="beside a request that was saved and restored while batches were at work")


def _at_work(rig: Rig, forward: Any, arrivals: list[Arrival]) -> None:
    with rig.machine.on(forward):
        forward.wait_stream(rig.machine.main)
        rig.machine.queue(partial(arrive, arrivals))


def mixed(rig: Rig, made: SmallPool) -> None:
    give_back(rig, made, take(made, made_pages(made)))


def give_back(rig: Rig, made: SmallPool, tokens: torch.Tensor) -> None:
    """Free pages one by one: an allocator may sort pages that are freed at once."""
    for page in shuffled(rig, tokens.view(-1, made.page_size)):
        made.allocator.free(page)


def offload(made: SmallPool, request: Any) -> None:
    with CopiesToHost():
        request.offload_kv_cache(made.request_pool, made.allocator)


def made_pages(made: SmallPool) -> int:
    free: int = made.allocator.available_size() // made.page_size
    return free


def admit(made: SmallPool, request: Any) -> int:
    rows = fitted(made.request_pool.alloc, {"reqs": [request], "need_size": 1})  # some tables take no requests
    if not rows:
        raise CannotDrive("the request table has no row left")
    record_of(request).req_pool_idx = int(rows[0])
    return int(rows[0])


def hold(made: SmallPool, row: int, tokens: torch.Tensor) -> None:
    made.request_pool.write((row, slice(0, len(tokens))), tokens.to(torch.int32))


def release(made: SmallPool, request: Any, tokens: torch.Tensor | None) -> None:
    if tokens is not None:
        made.allocator.free(tokens)
    if made.family == "mamba":
        made.request_pool.free_mamba_cache(request)
    fitted(made.request_pool.free, {"req": request, "free_index": record_of(request).req_pool_idx})


def state_of(made: SmallPool, row: int) -> int | None:
    if made.family != "mamba":
        return None
    return int(made.request_pool.req_index_to_mamba_index_mapping[row])
