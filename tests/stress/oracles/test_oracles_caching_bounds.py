"""The caching oracle on literal histories: evictions that go on for nothing, copies that are late, engines left idle.

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
    hash_id,
    hosts,
    rules,
)

from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
from kvcheck.core.cache.events import Locked, Refused, RoomWanted, Stored, StoreQueried
from kvcheck.core.stress.oracles.caching_rounds import LOOKS, TURNS
from kvcheck.core.stress.oracles.caching_store import VAIN
from kvcheck.core.stress.workload.events import (
    Aborted,
    Counted,
    Damaged,
    Declared,
    Deleted,
    Modelled,
    Moving,
    Reported,
    Sent,
    StoreKeeps,
    Transferred,
)

ENGINES = (("load.0", "load.0.side"), ("load.1", "load.1.side"))
PERIOD = 3
LATE = LOOKS * PERIOD + 2
"""Rounds after which what is due at a look is late."""


def looking(*, host: int = 9, uses: int | None = 1) -> Declared:
    """A cache that looks at its copies every PERIOD rounds, and has two engines for loads."""
    return replace(rules(host=host, uses=uses), ack_rounds=PERIOD, load_lanes=ENGINES)


PAGES = Modelled(page_size=2, window=0, has_state=False)
BACKED_UP: Events = (rules(host=9), StoreKeeps(), *computes("a"), *backs_up("a"))
ENDED = Counted("full", 9, 0, 9)
VAIN_FETCH: Events = (StoreQueried(7, chain("abc"), True), Transferred("prefetch", 7, 0, True))


def rounds(count: int) -> Events:
    return (Reported(end=""),) * count


def touched(space: str, *units: int) -> tuple[Footprint, ...]:
    return (Footprint(space, ("k",), (0, 1), np.array(units, dtype=np.int64)),)


PUT = Submitted(5, "storage.put", "store", touched("host.full", hash_id(b"a")), ())


def backup(number: int, *, at: int = 0) -> Events:
    """Transfer `number` of host page `number`, as one operation."""
    units = (("full", (number,)),)
    copied = Submitted(at or number, "copy", "d2h", touched("full", 50), touched("host.full", number))
    return (Moving(number, "backup", units), copied)


def load(number: int, *, lane: str = "load.0") -> Events:
    moved = Submitted(number, "copy", lane, touched("host.full", number), touched("full", 50))
    return (Moving(number, "load", (("full", (number,)),)), moved, Completed(number), acknowledged("load", number))


def acknowledged(kind: str, number: int) -> Transferred:
    return Transferred(kind, 7, 1, True, (), number)


FETCH: Events = (
    looking(),
    StoreQueried(7, chain("a"), False),
    Submitted(1, "get", "s", (), touched("host.full", 1), request=7),
)
STATES = Modelled(page_size=2, window=0, has_state=True)
WINDOW = Modelled(page_size=2, window=4, has_state=False)
KEPT: Events = (StoreKeeps(), rules(host=9), Stored("full", chain("ab"), True, ("1", "2")))
UNSERVED = Stored("full", (b"ab",), False, ("2",))
WITH_STATE: Events = (
    STATES,
    rules(host=9),
    Stored("full", chain("ab"), True),
    Stored("state", (b"ab",), True),
    StoreQueried(7, chain("abc"), True),
)
WITH_WINDOW: Events = (
    WINDOW,
    rules(host=9),
    Stored("full", chain("abc"), True),
    Stored("window", chain("abc")[1:], True),
    StoreQueried(7, chain("abcd"), True),
)
BEHIND: Events = (
    rules(host=9),
    *computes("a"),
    *backs_up("a"),
    Stored("full", chain("ab"), True),
    Locked("host", b"a", True),
    StoreQueried(7, chain("abc"), True),
)
A_THEN_B = (*computes("a"), *computes("b"))

GOOD: dict[str, Events] = {
    "a cache that keeps host pages by other means than locks": (*BEHIND[:-2], BEHIND[-1]),
    "as many go as were asked for": (
        rules(),
        *A_THEN_B,
        RoomWanted("device", "full", 2),
        *evicts("device", "a"),
        *evicts("device", "b"),
    ),
    "a victim may be larger than what was asked for": (
        rules(),
        *computes("ab"),
        *computes("c"),
        RoomWanted("device", "full", 1),
        *evicts("device", "ab"),
        RoomWanted("device", "full", 1),
        *evicts("device", "c"),
    ),
    "what a tier frees is no room on the other": (
        rules(host=9),
        *computes("a"),
        *backs_up("a"),
        RoomWanted("host", "full", 1),
        *evicts("device", "a"),
        *evicts("host", "a"),
    ),
    "a copy is acknowledged at the second look": (
        looking(),
        *backup(1),
        Completed(1),
        *rounds(LATE - 1),
        acknowledged("backup", 1),
        *rounds(LATE),
    ),
    "a copy runs for long": (looking(), *backup(1), *rounds(9 * LATE), Completed(1), acknowledged("backup", 1)),
    "a copy waits for an older one": (looking(), *backup(1), *backup(2), Completed(2), *rounds(9 * LATE)),
    "a load that waits for its turn": (looking(), Moving(1, "load", (("full", (1,)),)), *rounds(9 * LATE)),
    "half of a copy has run": (
        looking(),
        *backup(1),
        Submitted(2, "copy", "side", touched("full", 50), touched("host.full", 1)),
        Completed(2),
        *rounds(9 * LATE),
    ),
    "a prefetch that is acknowledged": (
        *FETCH,
        Completed(1),
        *rounds(2),
        Transferred("prefetch", 7, 0, True),
        *rounds(LATE),
    ),
    "the cache does not say when it looks": (rules(host=9), *backup(1), Completed(1), *rounds(9 * LATE)),
    "after the counts nobody looks": (looking(), *backup(1), Completed(1), Counted("full", 9, 0, 9), *rounds(LATE)),
    "loads take turns": (looking(), *load(1), *load(2, lane="load.1.side"), *load(3), *load(4)),
    "too few loads for turns": (looking(), *(each for number in range(1, 2 * TURNS) for each in load(number))),
    "one load of many operations": (looking(), load(1)[0], *[load(1)[1]] * 9, *load(1)[2:]),
    "a backup that starts at the second look": (
        looking(),
        *computes("a"),
        *rounds(LATE - 1),
        *backs_up("a"),
        *rounds(LATE),
    ),
    "what lies behind a refused page is due at its next use, though that page is backed up before": (
        looking(host=1),
        *hosts("x"),
        Locked("host", b"x", True),
        *computes("abc"),
        Refused("backup", 7, "full", chain("a")),
        Locked("host", b"x", False),
        *evicts("host", "x"),
        finds("a", 1),
        *backs_up("a"),
        *rounds(LATE),
    ),
    "a lookup that could not load is no use of what it did not serve": (
        STATES,
        replace(looking(uses=2), units=rules(host=9, state=2, rows=2).units),
        *computes("a"),
        *gains("host", "a", space="state"),
        finds("a", 1),
        finds("a", 0, device_only=True),
        *rounds(LATE),
    ),
    "a damaged object is not served": (*KEPT, Damaged("2"), UNSERVED),
    "an object is damaged before it is told that it was stored": (KEPT[0], Damaged("2"), *KEPT[1:], UNSERVED),
    "a deleted object is not served": (*KEPT, Deleted("full", (b"ab",)), UNSERVED),
    "a store that may lose what it has": (*KEPT[1:], UNSERVED),
    "what was never stored is not served": (*KEPT[:2], UNSERVED),
    "a prefix with its state comes": (*WITH_STATE, Transferred("prefetch", 7, 2, True, chain("ab"))),
    "the state does not come": (*WITH_STATE, Stored("state", (b"ab",), False), Transferred("prefetch", 7, 0, True)),
    "a prefix with its window comes": (*WITH_WINDOW, Transferred("prefetch", 7, 3, True, chain("abc"))),
    "a page of the window does not come": (
        *WITH_WINDOW,
        Stored("window", (b"ab",), False),
        Transferred("prefetch", 7, 0, True),
    ),
    "what is fetched hangs on a page that is kept": BEHIND,
    "what is backed up is queued for the store": (*BACKED_UP, PUT, ENDED),
    "what is backed up came from the store": (
        *BACKED_UP[:2],
        StoreQueried(7, chain("ab"), True),
        *gains("host", "a"),
        Transferred("prefetch", 7, 1, True, chain("a")),
        Transferred("backup", 7, 1, True, chain("a")),
        ENDED,
    ),
    "what is backed up was deleted from the store": (*BACKED_UP, Deleted("full", (b"a",)), ENDED),
    "there is no store": (BACKED_UP[0], *BACKED_UP[2:], ENDED),
    "the run was cut short before it was queued": BACKED_UP,
    "the whole pages before the last token are looked up": (PAGES, rules(), Sent(7, 0, 4), finds("a", 0)),
    "a page that ends before the last token is looked up": (PAGES, rules(), Sent(7, 0, 5), finds("ab", 0)),
    "nobody says how long a prompt is": (PAGES, rules(), finds("a", 0)),
    "a fetch that brought nothing begins again a few times": (rules(host=9), *VAIN_FETCH * VAIN, finds("abc", 0)),
    "fetches of which one brought something": (
        rules(host=9),
        *VAIN_FETCH * (VAIN - 1),
        StoreQueried(7, chain("abc"), True),
        *gains("host", "a"),
        Transferred("prefetch", 7, 1, True, chain("a")),
        *VAIN_FETCH * VAIN,
    ),
    "fetches of a request that was sent again": (rules(host=9), *VAIN_FETCH * VAIN, Aborted(7), *VAIN_FETCH * VAIN),
    "nobody says how much is wanted": (rules(), *A_THEN_B, *evicts("device", "a"), *evicts("device", "b")),
}

BAD: dict[str, tuple[Events, str, tuple[str, ...]]] = {
    "a whole object is not served": ((*KEPT, UNSERVED), "KV703", ("was stored whole", "did not serve it")),
    "another object is damaged": ((*KEPT, Damaged("1"), UNSERVED), "KV703", ("was stored whole",)),
    "a state that came is thrown away": (
        (*WITH_STATE, Transferred("prefetch", 7, 0, True)),
        "KV703",
        ("2 pages that the tiers lacked came whole", "0 were kept"),
    ),
    "a prefix with its window is a page short": (
        (*WITH_WINDOW, Transferred("prefetch", 7, 2, True, chain("ab"))),
        "KV703",
        ("3 pages that the tiers lacked came whole", "2 were kept"),
    ),
    "what is fetched hangs on a page that may go": (
        (*BEHIND[:-1], Locked("host", b"a", False), BEHIND[-1]),
        "KV703",
        ("pages from 1 on", "nothing keeps the page before them"),
    ),
    "a copy is acknowledged a round later": (
        (looking(), *backup(1), Completed(1), *rounds(LATE), acknowledged("backup", 1)),
        "KV706",
        ("backup 1 has run", f"{LATE} rounds later", f"every {PERIOD}"),
    ),
    "a load is never acknowledged": (
        (looking(), *load(1)[:3], *rounds(9 * LATE)),
        "KV706",
        ("load 1 has run",),
    ),
    "a copy is passed over though the older one has run": (
        (looking(), *backup(1), *backup(2), Completed(1), Completed(2), acknowledged("backup", 1), *rounds(LATE)),
        "KV706",
        ("backup 2 has run",),
    ),
    "a prefetch is never acknowledged": (
        (*FETCH, Completed(1), *rounds(LATE)),
        "KV706",
        ("a prefetch for request 7",),
    ),
    "all loads go over one engine": (
        (looking(), *(each for number in range(1, 2 * TURNS + 1) for each in load(number))),
        "KV706",
        ("4 loads take turns on 2 engines", "load.1 or load.1.side"),
    ),
    "a backup does not start within two looks": (
        (looking(), *computes("a"), *rounds(LATE)),
        "KV704",
        ("is not backed up", f"{LATE} rounds and 0 uses"),
    ),
    "a failed fetch begins again and again": (
        (rules(host=9), *VAIN_FETCH * (VAIN + 1)),
        "KV706",
        ("request 7 waits", f"after {VAIN} fetches"),
    ),
    "what is backed up is not queued for the store": (
        (*BACKED_UP, ENDED),
        "KV704",
        ("1 pages were backed up", "never queued for the store"),
    ),
    "another page is queued for the store": (
        (*BACKED_UP, replace(PUT, reads=touched("host.full", 1)), ENDED),
        "KV704",
        ("never queued for the store",),
    ),
    "the last whole page is not looked up": (
        (PAGES, rules(), Sent(7, 0, 5), finds("a", 0)),
        "KV703",
        ("1 pages of the prompt of request 7 were looked up", "its 5 tokens", "2 whole pages"),
    ),
    "nothing is looked up": (
        (PAGES, rules(), Sent(7, 0, 3), replace(finds("a", 0), chain=())),
        "KV703",
        ("0 pages of the prompt",),
    ),
    "one more goes than was asked for": (
        (rules(), *A_THEN_B, RoomWanted("device", "full", 1), *evicts("device", "a"), *evicts("device", "b")),
        "KV705",
        ("device full", "room for 1 was asked for, and 1 were freed before"),
    ),
    "the host gives up more than was asked for": (
        (
            rules(host=9),
            *hosts("a"),
            *hosts("b"),
            RoomWanted("host", "full", 1),
            *evicts("host", "a"),
            *evicts("host", "b"),
        ),
        "KV705",
        ("host full",),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_has_no_findings(name: str) -> None:
    check_good(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_has_this_one_finding(name: str) -> None:
    check_bad(*BAD[name])
