"""Histories for the ordering oracle, written out event by event: right ones, and wrong ones with what must be said.

Invariants:
- An operation's record has its ordinal as its number; records of signals are numbered from 100.
- Every wrong history has a right one that differs by the missing edge alone.
"""

from __future__ import annotations

import numpy as np

from kvcheck.core.cache.backend.backend import (
    Footprint,
    LaneWaited,
    Place,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Submitted,
)
from kvcheck.core.cache.events import Allocated, Event, Freed

Span = tuple[int, int]


def touch(
    *units: int,
    span: Span | None = None,
    owner: int | None = None,
    space: str = "full",
    buffer: str = "latent",
    layers: Span = (0, 2),
    place: Place = Place.DEVICE,
) -> Footprint:
    """Units of a buffer, whole or the same span of each."""
    rows = np.array(units, dtype=np.int64)
    spans = None if span is None else np.tile(np.array(span), (len(rows), 1))
    owners = None if owner is None else np.full(len(rows), owner)
    return Footprint(space, (buffer,), layers, rows, spans, owners, place)


def op(ordinal: int, lane: str, *, reads: tuple[Footprint, ...] = (), writes: tuple[Footprint, ...] = ()) -> Submitted:
    return Submitted(ordinal, f"op{ordinal}", lane, reads, writes, ordinal)


def load(ordinal: int, *units: int, lane: str = "h2d", span: Span | None = None, owner: int | None = None) -> Submitted:
    return op(ordinal, lane, writes=(touch(*units, span=span, owner=owner),))


def write(ordinal: int, *units: int, span: Span | None = None, owner: int | None = None) -> Submitted:
    return op(ordinal, "forward", writes=(touch(*units, span=span, owner=owner),))


def read(
    ordinal: int, *units: int, lane: str = "forward", span: Span | None = None, owner: int | None = None
) -> Submitted:
    return op(ordinal, lane, reads=(touch(*units, span=span, owner=owner),))


FAR = 1 << 40
"""Ordinals and records have no width."""

RIGHT: dict[str, tuple[Event, ...]] = {
    "waited": (load(1, 5), LaneWaited(1, "forward"), read(2, 5)),
    "one lane": (write(1, 5), read(2, 5), write(3, 5)),
    "behind a wait, later": (load(1, 5), LaneWaited(1, "forward"), op(2, "forward"), op(3, "forward"), read(4, 5)),
    "a record covers what is queued": (
        *(load(1, 5), load(2, 6), Recorded(100, "h2d"), LaneWaited(100, "forward")),
        read(3, 5, 6),
    ),
    "a record covers what its lane waited for": (
        *(load(1, 5), LaneWaited(1, "d2h"), Recorded(100, "d2h"), LaneWaited(100, "forward")),
        read(2, 5),
    ),
    "waits compose": (*(load(1, 5), LaneWaited(1, "draft"), op(2, "draft"), LaneWaited(2, "forward")), read(3, 5)),
    "process joined": (load(1, 5), ProcessJoined(1), read(2, 5)),
    "process drained": (load(1, 5), read(2, 6, lane="d2h"), ProcessDrained(), write(3, 5, 6)),
    "process joined what a lane had waited for": (
        *(load(1, 5), LaneWaited(1, "draft"), op(2, "draft"), ProcessJoined(2)),
        read(3, 5),
    ),
    "a wait for what the process has joined": (load(1, 5), ProcessJoined(1), LaneWaited(1, "forward"), read(2, 5)),
    "waited for, then recorded anew": (
        *(load(1, 5), Recorded(100, "h2d"), LaneWaited(100, "forward"), Recorded(101, "idle")),
        read(2, 5),
    ),
    "append beside a backup": (
        *(write(1, 5, span=(0, 3)), LaneWaited(1, "d2h"), read(2, 5, lane="d2h", span=(0, 3))),
        *(write(3, 5, span=(3, 4)), read(4, 5, span=(0, 4))),
    ),
    "reuse in the order of the lane": (
        Allocated("full", (5,), 1),
        write(1, 5, owner=1),
        Freed("full", (5,)),
        Allocated("full", (5,), 2),
        write(2, 5, owner=2),
    ),
    "reuse behind the last reader": (
        *(read(1, 5, lane="d2h", owner=1), Freed("full", (5,)), Allocated("full", (5,), 2)),
        *(LaneWaited(1, "forward"), write(2, 5, owner=2)),
    ),
    "two readers": (read(1, 5, lane="d2h"), read(2, 5), read(3, 5, lane="draft")),
    "chunks of one operation": (op(1, "d2h", reads=(touch(5),), writes=(touch(5), touch(5))),),
    "another space": (load(1, 5), op(2, "forward", reads=(touch(5, space="window"),))),
    "another buffer": (load(1, 5), op(2, "forward", reads=(touch(5, buffer="k"),))),
    "another layer": (
        op(1, "h2d", writes=(touch(5, layers=(1, 2)),)),
        op(2, "forward", reads=(touch(5, layers=(0, 1)),)),
    ),
    "a layer at a time": (
        *(op(1, "h2d", writes=(touch(5, layers=(0, 1)),)), op(2, "h2d", writes=(touch(5, layers=(1, 2)),))),
        *(LaneWaited(1, "forward"), op(3, "forward", reads=(touch(5, layers=(0, 1)),))),
    ),
    "nothing touched": (load(1), read(2)),
    "pageable source": (
        op(1, "d2h", writes=(touch(1, space="host", place=Place.PAGEABLE),)),
        ProcessJoined(1),
        op(2, "h2d", reads=(touch(1, space="host", place=Place.PAGEABLE),)),
        op(3, "d2h", writes=(touch(1, space="host"),)),
    ),
    "numbers without end": (
        *(load(FAR, 5), LaneWaited(FAR, "forward"), read(FAR + 1, 5)),
        *(Recorded(FAR * 4, "forward"), LaneWaited(FAR * 4, "h2d"), load(FAR + 2, 5)),
    ),
    "ids start over": (
        *(event for n in range(1, 40) for event in (load(2 * n, n % 7), LaneWaited(2 * n, "d2h"))),
        read(100, *range(7), lane="d2h"),
    ),
}

# name: (code, request, seen request, page, row, the end of the message), and the history
Said = tuple[str, int | None, int | None, int, int | None, str]
NO_WAIT = "forward does not wait for h2d #1"
RACE: Said = ("KV201", None, None, 5, None, NO_WAIT)
WRONG: dict[str, tuple[Said, tuple[Event, ...]]] = {
    "no wait": (("KV201", 2, 1, 5, None, NO_WAIT), (load(1, 5, owner=1), read(2, 5, owner=2))),
    "the wrong record": (
        ("KV201", None, None, 5, None, "forward does not wait for h2d #2"),
        (load(1, 4), load(2, 5), LaneWaited(1, "forward"), read(3, 4, 5)),
    ),
    "the wrong lane waits": (RACE, (op(9, "forward"), load(1, 5), LaneWaited(1, "draft"), op(2, "draft"), read(3, 5))),
    "a lane's wait does not join the process": (RACE, (load(1, 5), LaneWaited(1, "h2d-2"), read(2, 5))),
    "recorded too early": (
        RACE,
        (Recorded(100, "h2d"), load(1, 5), LaneWaited(100, "forward"), Recorded(101, "h2d"), read(2, 5)),
    ),
    "waited too late": (RACE, (load(1, 5), read(2, 5), LaneWaited(1, "forward"))),
    "never recorded": (RACE, (load(1, 5), LaneWaited(100, "forward"), read(2, 5))),
    "the process joined another lane": (RACE, (load(1, 5), op(2, "d2h"), ProcessJoined(2), read(3, 5))),
    "reuse without an edge": (
        ("KV202", 2, 1, 5, None, "forward does not wait for d2h #1"),
        (read(1, 5, lane="d2h", owner=1), Freed("full", (5,)), Allocated("full", (5,), 2), write(2, 5, owner=2)),
    ),
    "overwritten while written": (
        ("KV202", 2, 1, 5, None, "h2d does not wait for forward #1"),
        (write(1, 5, owner=1), load(2, 5, owner=2)),
    ),
    "one row too many": (
        ("KV202", 2, 1, 5, 3, "forward does not wait for d2h #1"),
        (read(1, 5, lane="d2h", span=(0, 4), owner=1), write(2, 5, span=(3, 5), owner=2)),
    ),
    "the whole page, then a row that nobody had named": (
        ("KV201", None, None, 5, 9, NO_WAIT),
        (load(1, 5), read(2, 5, span=(9, 10))),
    ),
    "a row, then the whole page": (("KV201", None, None, 5, 2, NO_WAIT), (load(1, 5, span=(2, 3)), read(2, 5))),
    "an earlier write of two": (RACE, (load(1, 5), load(2, 6), read(3, 5))),
    "the last layer": (
        ("KV201", None, None, 5, None, "forward does not wait for h2d #2"),
        (
            *(op(1, "h2d", writes=(touch(5, layers=(0, 1)),)), op(2, "h2d", writes=(touch(5, layers=(1, 2)),))),
            *(LaneWaited(1, "forward"), op(3, "forward", reads=(touch(5),))),
        ),
    ),
    "pageable source, still being written": (
        ("KV201", None, None, 1, None, "h2d does not wait for d2h #1"),
        (
            op(1, "d2h", writes=(touch(1, space="host"),)),
            LaneWaited(1, "h2d"),
            op(2, "h2d", reads=(touch(1, space="host", place=Place.PAGEABLE),)),
        ),
    ),
    "numbers without end": (
        ("KV201", None, None, 5, None, f"forward does not wait for h2d #{FAR}"),
        (load(FAR, 5), read(FAR + 1, 5)),
    ),
    "ids start over": (
        ("KV201", None, None, 0, None, "d2h does not wait for h2d #14"),
        (*(load(2 * n, n % 7) for n in range(1, 8)), read(100, *range(7), lane="d2h")),
    ),
}
