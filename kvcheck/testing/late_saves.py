"""Late saves: find copies that save takes before its streams have made them.

Each call of save is for a new request, from SAVED_LATE on, so leftovers of an earlier copy do not pass for a late one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from kvcheck.core.base.nouns import counted
from kvcheck.core.probes.frame.cuda_streams import CopiesToHost
from kvcheck.core.probes.frame.stubs import replaced
from kvcheck.testing.buffers import Buffer, Pool, RowUnits
from kvcheck.testing.failures import NotJudged
from kvcheck.testing.host_memory import Saving, storage_of
from kvcheck.testing.judge import RowJudge, WrongRow
from kvcheck.testing.plan import NEXT, SAVED_LATE, SlotPlan, give, mark, mark_all, rows_named, wait_for_device
from kvcheck.testing.streams import Streams

Saved = TypeVar("Saved")
ORDERS = 9
"""Orders tried with stand-in streams. On a device it is one."""


@dataclass(slots=True)
class _Save:
    """One save under late streams. pending: operations that had not run when it returned."""

    request: int
    copies: Saving
    queued: int
    pending: int
    wrong: list[tuple[Buffer, WrongRow]]


def judge_late_save(
    judge: RowJudge,
    look: Callable[[], Pool],
    units: RowUnits,
    plan: SlotPlan,
    streams: Streams,
    save: Callable[[Any], Saved],
    load: Callable[[Saved, Any], object],
    make: Callable[[list[int]], object],
    seed: int,
    *,
    keys: Collection[object] | None = None,
) -> tuple[str, ...]:
    """Return notes for not_tried. keys: buffers that are restored correctly if streams run at once; None for all."""

    requests = count(SAVED_LATE)

    def saved(order: int, *, all_wait: bool = False) -> _Save:
        found, request = look(), next(requests)
        streams.release()
        mark_all(judge.ownership, found, units, plan, request)
        given = make(list(plan.ids))
        names = {storage_of(held.tensor): held.path for held in found.reached}
        streams.hold(seed * ORDERS + order, is_lazy=not order)
        with CopiesToHost(), streams.saving([held.rows for held in found.buffers], names, all_wait=all_wait) as copies:
            copy = save(given)
        queued, pending = streams.queued, streams.pending
        streams.release()
        if not queued:
            return _Save(request, copies, queued, pending, [])
        mark(judge.ownership, found, units, NEXT, (*plan.free, *plan.ids))
        load(copy, make(list(plan.into)))
        streams.release()
        again = looked_again(found, look)
        give(judge.ownership, again, units, request, plan.into)
        return _Save(request, copies, queued, pending, _wrong(judge, again, units, plan, keys))

    fired = streams.fired
    first = saved(0)
    at, late = 0, first
    while not late.wrong and first.queued and not streams.is_real and at < ORDERS - 1:
        at += 1
        late = saved(at)
    if late.wrong:
        sure = {held.key for held, _ in saved(at, all_wait=True).wrong} if late.copies.unsure else None
        _find(judge, plan, units, late, sure)
    told = []
    if not first.queued:
        told.append("save: it put nothing on a stream of its own, so no copy of it was late")
    if first.pending:
        told.append(
            f"save: {counted(first.pending, 'operation')} had not run when it returned; kvcheck ran them before it "
            "gave the slots away"
        )
    if first.copies.behind:
        copies = counted(first.copies.behind, "copy")
        told.append(f"save: {copies} with non_blocking on the main stream ran at once, and not late on purpose")
    if streams.fired > fired:
        told.append("save with late copies: the watchdog of the device ended a hold")
    return tuple(told)


def _wrong(
    judge: RowJudge, found: Pool, units: RowUnits, plan: SlotPlan, keys: Collection[object] | None
) -> list[tuple[Buffer, WrongRow]]:
    wrong = []
    for held in found.buffers:
        rows = rows_named(plan.into, held.unit, units)
        if keys is None or held.key in keys:
            wrong.append((held, judge.compare(held, rows, held.read(rows), judge.ownership.wanted(held, rows))))
    return [(held, first) for held, first in wrong if first is not None]


def _find(judge: RowJudge, plan: SlotPlan, units: RowUnits, late: _Save, sure: Collection[object] | None) -> None:
    """sure: buffers that stay wrong if every blocking copy waits; None for all."""
    names = ", ".join(late.copies.unsure)
    for held, wrong in late.wrong:
        rows = rows_named(plan.into, held.unit, units)
        is_sure = sure is None or held.key in sure
        unless = "" if is_sure else f", unless {names} is host memory: there a copy_ without non_blocking waits"
        judge.find(
            "KV203",
            "content",
            f"save took a copy before its stream had made it: {held.unit} {rows[wrong.at]} of {held.where}, came "
            f"back with {wrong.story}; expected request {late.request}, position {wrong.at}; {wrong.rows} of "
            f"{len(rows)} rows are wrong, and right where the stream runs at once. Let save wait before the host "
            f"reads{unless}",
            held,
            wrong,
            row=rows[wrong.at],
            request=late.request,
            lane="save",
            condition=None if is_sure else f"{names} is memory of the device, into which no copy_ waits",
        )


def saved_once(found: Pool, save: Callable[[Any], Saved], ids: object) -> tuple[Saved, tuple[str, ...]]:
    """Return the result of save, and a note if it may copy in other threads."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    with CopiesToHost(), replaced(threading.Thread, {"start": noted}):
        copy = save(ids)
    names = (*found.threads, *(["one that save starts"] if started else []))
    told = f"save: a copy of it in another thread ({', '.join(names)}) was not late on purpose"
    return copy, (told,) if names else ()


def looked_again(found: Pool, look: Callable[[], Pool]) -> Pool:
    """Search the buffers again after load. Raises NotJudged if they differ."""
    again = look()
    if [each.key for each in again.buffers] != [each.key for each in found.buffers]:
        raise NotJudged(
            "load replaced tensors of the pool by others of another shape or name, which have no known content"
        )
    wait_for_device(again)
    return again
