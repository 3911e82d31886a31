"""The progress oracle on literal histories. A bad one differs from a good one by one event or one value."""

from __future__ import annotations

import pytest

from kvcheck.core.cache.events import Allocated, Event, Freed
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.stress.oracles.progress import LATE, ProgressOracle
from kvcheck.core.stress.workload.events import Aborted, Forward, ProcessActs, Reported, Sent, Sized

RANK, OTHER = "decode-0", "decode-1"


def sized(process: str = RANK, *, pages: int = 4, rows: int = 2, coming: int = 2) -> Sized:
    """A rank with pages of 16 tokens."""
    units = (("rows", rows), ("full", pages), ("metadata-decode", 2))
    return Sized(process=process, page_size=16, max_prefilling=coming, units=units)


def taken(request: int, pages: tuple[int, ...], *, process: str = RANK) -> tuple[Event, ...]:
    """What an admission takes."""
    return (
        Allocated(f"{process}:metadata-decode", (request,), request),
        Allocated(f"{process}:rows", (request,), request),
        Allocated(f"{process}:full", pages, request),
    )


def decode(**groups: tuple[int, ...]) -> Reported:
    return Reported(end="decode", **groups)


IDLE: tuple[Event, ...] = tuple(decode() for _ in range(LATE + 1))
ONE: tuple[Event, ...] = (sized(), ProcessActs(RANK), Sent(1, 0, 20), *taken(1, (1, 2)), decode(admitted=(1,)))
FITS, TOO_LONG = Sent(2, 0, 31), Sent(2, 0, 32)
RUNNING: tuple[Event, ...] = (*ONE, Forward(1, 20, 21), decode(joined=(1,)))

GOOD: dict[str, tuple[Event, ...]] = {
    "admitted at once": (*ONE, FITS, *taken(2, (3, 4)), decode(admitted=(2,))),
    "admitted in time": (*ONE, FITS, *IDLE[:LATE], *taken(2, (3, 4)), decode(admitted=(2,))),
    "a page too few": (*ONE, TOO_LONG, *IDLE),
    "no row": (sized(rows=1), *ONE[1:], FITS, *IDLE),
    "enough are on their way": (sized(coming=1), *ONE[1:], FITS, *IDLE),
    "no page on another rank": (*ONE, sized(OTHER), Allocated(f"{OTHER}:full", (1, 2, 3), 9), FITS, *IDLE),
    "somebody rests": (*RUNNING, decode(retracted=(1,)), FITS, *IDLE),
    "an earlier attempt may not be over": (*ONE, Sent(2, 1, 31), *IDLE),
    "aborted while it waits": (*ONE, FITS, *IDLE[:LATE], Aborted(2), decode()),
    "a longer one goes first": (*ONE, Sent(3, 0, 40), FITS, *IDLE),
    "the batch is computed": (*RUNNING, Forward(1, 21, 22), decode()),
    "no page for the batch": (*RUNNING, Allocated(f"{RANK}:full", (3, 4), 9), decode()),
    "finished": (*RUNNING, Forward(1, 21, 22), decode(finished=(1,)), decode()),
    "retracted": (*RUNNING, decode(retracted=(1,)), decode()),
    "resumed and retracted again": (
        *(*RUNNING, decode(retracted=(1,)), decode(resumed=(1,), joined=(1,), retracted=(1,)), decode()),
    ),
    "an engine that does both": (
        *(sized(""), Sent(1, 0, 20), Reported(end="", admitted=(1,)), Reported(end="", joined=(1,))),
        *(Forward(1, 20, 21), Reported(end=""), Aborted(1), Reported(end="")),
    ),
}
BAD: dict[str, tuple[int, tuple[Event, ...]]] = {
    "waits beside its room": (2, (*ONE, FITS, *IDLE)),
    "waits beside room that was freed": (2, (*ONE, TOO_LONG, Freed(f"{RANK}:full", (1,)), *IDLE)),
    "waits while the batch runs": (
        2,
        (*RUNNING, FITS, *(each for at in range(LATE + 1) for each in (Forward(1, 21 + at, 22 + at), decode()))),
    ),
    "a batch that is not computed": (1, (*RUNNING, decode())),
    "a batch that is not computed after a resume": (
        1,
        (*RUNNING, decode(retracted=(1,)), Forward(1, 21, 22), decode(resumed=(1,), joined=(1,)), decode()),
    ),
    "a batch of an engine that does both": (1, (*GOOD["an engine that does both"][:4], Reported(end=""))),
}


@pytest.mark.parametrize("case", GOOD)
def test_room_that_is_used_is_right(case: str) -> None:
    assert judge(ProgressOracle(), History.of(*GOOD[case])) == ()


@pytest.mark.parametrize("case", BAD)
def test_room_that_is_not_used_is_found(case: str) -> None:
    request, events = BAD[case]
    oracle = ProgressOracle()
    (found,) = judge(oracle, History.of(*events))
    assert (found.code, found.request) == ("KV607", request)
    assert oracle.judged
