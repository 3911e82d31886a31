"""The caching oracle on literal histories: companions that stay behind, answers that are not so, copies told too early.

Invariants:
- Each bad history differs from a good one in one event.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rigs.cache_histories import (
    Events,
    backs_up,
    chain,
    check_bad,
    check_good,
    computes,
    evicts,
    finds,
    gains,
    loses,
    rules,
)

from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
from kvcheck.core.cache.events import Allocated, Flushed, Locked, Refused
from kvcheck.core.stress.workload.events import Answered, Modelled, Moving, Transferred

WITH_STATES = Modelled(page_size=1, window=0, has_state=True)
WITH_WINDOWS = Modelled(page_size=1, window=3, has_state=False)
ACKED = Transferred("backup", 7, 3, True, chain("abc"))
STATE_KEPT: Events = (WITH_STATES, rules(host=9), *computes("abc"), *gains("device", "abc", start=2, space="state"))
"""Three pages with a state at their end, of which a backup is due."""
WINDOW_KEPT: Events = (WITH_WINDOWS, rules(host=9), *computes("abc"), *gains("device", "abc", space="window"))
"""Three pages with their window pages, of which the next position sees the last two."""
KNOWN: Events = (rules(host=9), *computes("a"), *backs_up("a"), *computes("ab", start=1), *backs_up("ab", start=1))
"""Two pages on both tiers."""
NO_STATE_ROOM: Events = (WITH_STATES, replace(rules(host=9), units=rules(host=9, state=1).units))
BOTH = ("device", "host")


NUMBERED = Transferred("backup", 7, 1, True, (), 1)


def touched(space: str, unit: int) -> tuple[Footprint, ...]:
    return (Footprint(space, ("k",), (0, 1), np.array([unit], dtype=np.int64)),)


def copied(kind: str, number: int, ordinal: int) -> Submitted:
    """One operation of transfer `number`, which has the host page of that number."""
    device, host = touched("full", 50), touched("host.full", number)
    reads, writes = (device, host) if kind == "backup" else (host, device)
    return Submitted(ordinal, "copy", "lane", reads, writes)


def made(kind: str, number: int) -> Moving:
    return Moving(number, kind, (("full", (number,)),))


COPY: Events = (rules(host=9), made("backup", 1), copied("backup", 1, 1))
TWO: Events = (*COPY, made("backup", 2), copied("backup", 2, 2))
LOAD: Events = (rules(host=9), made("load", 1), copied("load", 1, 1), copied("load", 1, 2), Completed(1))

GOOD: dict[str, Events] = {
    "a copy is acknowledged when it has run": (*COPY, Completed(1), NUMBERED),
    "the older of two copies has run and is acknowledged": (*TWO, Completed(1), NUMBERED),
    "a load is acknowledged by both its operations": (*LOAD, Completed(2), replace(NUMBERED, kind="load")),
    "a backup of pages with their state": (
        *STATE_KEPT,
        *gains("host", "abc"),
        *gains("host", "abc", start=2, space="state"),
        ACKED,
    ),
    "a state that comes a little later": (
        *STATE_KEPT,
        *gains("host", "abc"),
        finds("?", 0),
        *gains("host", "abc", start=2, space="state"),
        ACKED,
    ),
    "a state that was refused room": (
        *STATE_KEPT[:-2],
        *gains("device", "abc", start=2, space="state"),
        Allocated("host.state", tuple(range(9)), 1),
        Refused("backup", 7, "state", chain("abc")[2:]),
        *gains("host", "abc"),
        ACKED,
    ),
    "a backup of pages whose state the device has given up": (
        *STATE_KEPT,
        *evicts("device", "abc", start=2, space="state"),
        *gains("host", "abc"),
        ACKED,
    ),
    "a state that comes to the device after its pages were backed up": (
        WITH_STATES,
        rules(host=9),
        *computes("abc"),
        *gains("host", "abc"),
        *gains("device", "abc", start=2, space="state"),
        ACKED,
    ),
    "a backup of the window pages that its end sees": (
        *WINDOW_KEPT,
        *gains("host", "abc"),
        *gains("host", "abc", start=1, space="window"),
        ACKED,
    ),
    "a flush of a prefix and what continues it": (
        *KNOWN,
        Flushed(BOTH, chain("ab")),
        *loses("device", "ab"),
        *loses("host", "ab"),
        Answered(BOTH, chain("ab"), True),
    ),
    "a prefix leaves the device, and the host keeps it": (
        *KNOWN,
        Flushed(("device",), chain("ab")[1:]),
        *loses("device", "ab", start=1),
        Answered(("device",), chain("ab")[1:], True),
    ),
    "a prefix that is locked stays": (*KNOWN, Locked("host", b"ab", True), Answered(BOTH, chain("ab"), False)),
    "a prefix that goes on stays on the device": (*KNOWN, Answered(("device",), chain("a"), False)),
    "a prefix that the device holds stays on the host": (*KNOWN, Answered(("host",), chain("ab")[1:], False)),
    "a state finds no room on the device": (
        *NO_STATE_ROOM,
        *computes("a"),
        *gains("device", "a", space="state"),
        Locked("device", b"a", True),
        Refused("snapshot", 7, "state", chain("b")),
    ),
}

BAD: dict[str, tuple[Events, str, tuple[str, ...]]] = {
    "a copy is acknowledged while it runs": (
        (*COPY, NUMBERED),
        "KV203",
        ("backup 1 is acknowledged before all of it has run",),
    ),
    "the younger of two copies has run, and the older is acknowledged": (
        (*TWO, Completed(2), NUMBERED),
        "KV203",
        ("backup 1 is acknowledged",),
    ),
    "a load is acknowledged by one of its operations": (
        (*LOAD, replace(NUMBERED, kind="load")),
        "KV203",
        ("load 1 is acknowledged",),
    ),
    "a backup leaves the state out": ((*STATE_KEPT, *gains("host", "abc"), ACKED), "KV704", ("without its state",)),
    "another state was refused room": (
        (
            *STATE_KEPT,
            Allocated("host.state", tuple(range(9)), 1),
            Refused("backup", 7, "state", chain("x")),
            *gains("host", "abc"),
            ACKED,
        ),
        "KV704",
        ("without its state", "no room was refused"),
    ),
    "a backup leaves a window page out that its end sees": (
        (*WINDOW_KEPT, *gains("host", "abc"), *gains("host", "abc", start=2, space="window"), ACKED),
        "KV704",
        ("without its window",),
    ),
    "a prefix is said to be gone, and what continues it is there": (
        (
            *KNOWN,
            Flushed(BOTH, chain("ab")),
            *loses("device", "ab"),
            *loses("host", "a"),
            Answered(BOTH, chain("ab"), True),
        ),
        "KV605",
        ("2 pages have left device and host", "host full"),
    ),
    "a prefix is said to have left the device": (
        (*KNOWN, Answered(("device",), chain("ab")[1:], True)),
        "KV605",
        ("1 pages have left device",),
    ),
    "a prefix that nobody uses has to stay": (
        (*KNOWN, Answered(BOTH, chain("ab"), False)),
        "KV605",
        ("have to stay on device and host", "nothing locks them"),
    ),
    "the end of a prefix has to stay on the device": (
        (*KNOWN, Answered(("device",), chain("ab")[1:], False)),
        "KV605",
        ("have to stay on device",),
    ),
    "a state is given up beside one that could go": (
        (
            *NO_STATE_ROOM,
            *computes("a"),
            *gains("device", "a", space="state"),
            Refused("snapshot", 7, "state", chain("b")),
        ),
        "KV702",
        ("a snapshot of 1 state", "the device has room"),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_has_no_findings(name: str) -> None:
    check_good(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_has_this_one_finding(name: str) -> None:
    check_bad(*BAD[name])
