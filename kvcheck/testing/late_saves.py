"""Late saves: find copies that save takes before its streams have made them.

Each call of save is for a new request, from SAVED_LATE on, so leftovers of an earlier copy do not pass for a late one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from kvcheck.core.base.nouns import counted
from kvcheck.core.probes.frame.cuda_streams import CopiesToHost
from kvcheck.testing.buffers import Buffer, Pool
from kvcheck.testing.held_threads import HeldThreads
from kvcheck.testing.host_memory import Saving, storage_of
from kvcheck.testing.judge import WrongRow
from kvcheck.testing.plan import NEXT, SAVED_LATE, SlotScene
from kvcheck.testing.streams import Streams

__tracebackhide__ = True

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
    scene: SlotScene,
    streams: Streams,
    save: Callable[[Any], Saved],
    load: Callable[[Saved, Any], object],
    seed: int,
    *,
    keys: Collection[object] | None = None,
) -> tuple[str, ...]:
    """Return notes for not_tried. keys: buffers that are restored correctly if streams run at once; None for all."""

    requests = count(SAVED_LATE)

    def saved(order: int, *, all_wait: bool = False) -> _Save:
        request = next(requests)
        found = scene.found = scene.look()
        streams.release()
        scene.mark_all(request)
        given = scene.ids()
        names = {storage_of(held.tensor): held.path for held in found.reached}
        streams.hold(seed * ORDERS + order, is_lazy=not order)
        kv = [held.rows for held in found.buffers]
        with CopiesToHost(), streams.saving(kv, names, all_wait=all_wait) as copies, HeldThreads() as threads:
            copy = threads.call(save, given)
        queued, pending = streams.queued, streams.pending
        streams.release()
        if not queued:
            return _Save(request, copies, queued, pending, [])
        scene.mark(NEXT, (*scene.plan.free, *scene.plan.ids))
        load(copy, scene.into())
        streams.release()
        scene.look_again()
        scene.give(request, scene.plan.into)
        compared = [(held, scene.compare(held, scene.plan.into)) for held in scene.found.buffers if _is_in(held, keys)]
        wrong = [(held, first) for held, first in compared if first is not None]
        return _Save(request, copies, queued, pending, wrong)

    fired = streams.fired
    first = saved(0)
    at, late = 0, first
    while not late.wrong and first.queued and not streams.is_real and at < ORDERS - 1:
        at += 1
        late = saved(at)
    if late.wrong:
        sure = {held.key for held, _ in saved(at, all_wait=True).wrong} if late.copies.unsure else None
        _find(scene, late, sure)
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


def _is_in(held: Buffer, keys: Collection[object] | None) -> bool:
    return keys is None or held.key in keys


def _find(scene: SlotScene, late: _Save, sure: Collection[object] | None) -> None:
    """sure: buffers that stay wrong if every blocking copy waits; None for all."""
    names = ", ".join(late.copies.unsure)
    for held, wrong in late.wrong:
        rows = scene.rows(held, scene.plan.into)
        is_sure = _is_in(held, sure)
        unless = "" if is_sure else f", unless {names} is host memory: there a copy_ without non_blocking waits"
        scene.judge.find(
            "KV203",
            "content",
            f"save took a copy before its stream had made it: {held.unit} {rows[wrong.at]} of {held.where}, came "
            f"back with {wrong.story}; expected request {late.request}, position {wrong.at}; {wrong.rows} of "
            f"{len(rows)} {held.units} are wrong, and right where the stream runs at once. Let save wait before the "
            f"host reads{unless}",
            held,
            wrong,
            row=rows[wrong.at],
            request=late.request,
            lane="save",
            condition=None if is_sure else f"{names} is memory of the device, into which no copy_ waits",
        )


def saved_once(found: Pool, save: Callable[[Any], Saved], ids: object) -> tuple[Saved, tuple[str, ...]]:
    """Return the result of save, and notes on its copies in other threads."""
    with CopiesToHost(), HeldThreads() as held:
        copy = held.call(save, ids)
    told = []
    if held.unrun:
        told.append("save: work in another thread had not run when it returned; it ran before the slots were reused")
    if found.threads:
        names = ", ".join(found.threads)
        told.append(f"save, load: a copy in a thread that was there before ({names}) was not late on purpose")
    return copy, (*told, *held.notes)
