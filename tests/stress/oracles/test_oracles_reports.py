"""The reports oracle on literal histories. A bad one differs from a good one by one event or one value."""

from __future__ import annotations

import pytest

from kvcheck.core.cache.events import Chosen, Event, Evicted, TierChanged
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.oracles.reports import ReportsOracle
from kvcheck.core.stress.workload.events import (
    Aborted,
    Broke,
    Decided,
    EvictionsCounted,
    Forward,
    ProcessActs,
    Reported,
    Restored,
    Saved,
    Sent,
)

TABLE = ("full.k", "full.v")
SENT = Sent(7, 0, 40)
AGAIN = Sent(7, 1, 40)


def one(*groups: str, **others: tuple[int, ...]) -> Reported:
    """A round of an engine that does both: request 7 is in these groups."""
    return Reported(end="", **dict.fromkeys(groups, (7,)), **others)


def prefill(*groups: str) -> Reported:
    return Reported(end="prefill", **dict.fromkeys(groups, (7,)))


def decode(*groups: str) -> Reported:
    return Reported(end="decode", **dict.fromkeys(groups, (7,)))


SAVED, RESTORED = Saved(7, 41, TABLE, TABLE), Restored(7, 41, (3,), TABLE, TABLE)
PREFILL, DECODE = ProcessActs("prefill-0"), ProcessActs("decode-0")
PAGE = (b"a",)
LEFT, EVICTED = TierChanged("device", "full", PAGE, (3,), False), Evicted("device", "full", False)
WINDOW_LEFT = TierChanged("device", "window", PAGE, (4,), False)
COUNTED, NOT_COUNTED = EvictionsCounted("device", 1), EvictionsCounted("device", 0)
LIFE: tuple[Event, ...] = (
    *(SENT, Forward(7, 0, 40), one("admitted"), Forward(7, 40, 41), one("joined"), SAVED, one("retracted"), one()),
    *(RESTORED, Forward(7, 41, 42), one("resumed", "joined", "finished")),
)
PAIR: tuple[Event, ...] = (
    *(PREFILL, DECODE, SENT, prefill(), decode("admitted")),
    *(PREFILL, Forward(7, 0, 40), prefill("admitted", "joined")),
    *(DECODE, Forward(7, 40, 41), decode("joined", "finished")),
)
ABORTED: tuple[Event, ...] = (*PAIR[:5], Aborted(7), prefill("failed"), decode("failed"))

GOOD: dict[str, tuple[Event, ...]] = {
    "one engine": LIFE,
    "a request that ends in its first round": (SENT, one("admitted", "joined", "finished")),
    "resumed and retracted again in a round": (*LIFE[:8], RESTORED, SAVED, one("resumed", "joined", "retracted")),
    "retracted, then resumed": (*LIFE[:5], SAVED, RESTORED, Forward(7, 41, 42), one("retracted", "resumed", "joined")),
    "retracted and then aborted between two rounds": (*LIFE[:5], SAVED, Aborted(7), one("retracted")),
    "aborted while it waits": (SENT, one(), Aborted(7), one()),
    "a pair": PAIR,
    "aborted at both ends": ABORTED,
    "sent again, while the prefill end has not told of the failure": (
        *(*PAIR[:8], decode("failed"), AGAIN),
        *(prefill("failed"), prefill("admitted"), decode("admitted"), prefill("joined")),
        decode("joined", "finished"),
    ),
    "handed over and taken, failed at the decode end, sent again": (
        *(*PAIR[:8], decode("failed"), AGAIN, prefill("admitted", "joined"), decode("admitted")),
        decode("joined", "finished"),
    ),
    "refused before its earlier attempt is told of": (
        *(*PAIR[:8], decode("failed"), AGAIN, Aborted(7)),
        *(prefill("failed"), prefill("failed"), decode("failed")),
    ),
    "taken, and the second attempt failed": (*PAIR[:8], decode("joined", "finished"), AGAIN, prefill("failed")),
    "refused while its earlier attempt is computed, which then fails": (
        *(*PAIR[:3], AGAIN, prefill("admitted", "failed"), PREFILL, Forward(7, 0, 40)),
        *(prefill("joined"), prefill("failed")),
    ),
    "an error explains what was not reported": (*ABORTED[:-1], Broke("KV902", "TypeError", "no")),
    "ranks that decided differently": (*ABORTED[:-1], Decided("decode", ((1, 7), (0,))), decode("joined")),
    "counters": (LEFT, EVICTED, COUNTED, EvictionsCounted("host", 0)),
    "a window that leaves with its pages": (Chosen("device", "full", PAGE), WINDOW_LEFT, LEFT, EVICTED, COUNTED),
    "a window by itself": (Chosen("device", "window", PAGE), WINDOW_LEFT, Evicted("device", "window", False), COUNTED),
    "pages that come back": (TierChanged("device", "full", PAGE, (3,), True), NOT_COUNTED),
}

BAD: dict[str, tuple[str, tuple[Event, ...]]] = {
    "admitted twice": ("cannot be admitted", (*LIFE[:3], one("admitted"))),
    "admitted twice in a round": ("admitted once", (SENT, one(admitted=(7, 7)))),
    "admitted before it was sent": ("it is unsent", (one("admitted"),)),
    "joins without an admission": ("cannot join", (SENT, one("joined"))),
    "joins twice": ("cannot join", (*LIFE[:5], one("joined"))),
    "resumed, and does not join": ("joins by that", (*LIFE[:9], one("resumed"))),
    "resumed, and was not retracted": ("take turns", (*LIFE[:5], RESTORED, one("resumed", "joined"))),
    "retracted twice": ("take turns", (*LIFE[:7], SAVED, one("retracted"))),
    "retracted before it joined": ("take turns", (*LIFE[:3], SAVED, one("retracted"))),
    "finished while it is retracted": ("cannot finish", (*LIFE[:8], one("finished"))),
    "fails three times, and was sent twice": ("cannot fail", (*PAIR[:3], AGAIN, *(prefill("failed"),) * 3)),
    "computed after both attempts failed": (
        "expected an admission",
        (*PAIR[:3], AGAIN, prefill("failed"), prefill("failed"), *PAIR[5:7], prefill()),
    ),
    "finished twice": ("cannot finish", (*LIFE, one("finished"))),
    "finished twice in a round": ("ends once", (*LIFE[:5], one(finished=(7, 7)))),
    "finished and failed": ("ends once", (*PAIR[:-1], decode("joined", "finished", "failed"))),
    "failed after it finished": ("cannot fail", (*PAIR, decode("failed"))),
    "everything is told again": ("cannot be admitted", (*LIFE, LIFE[2])),
    "finished after an abort": ("cannot finish", (*LIFE[:5], Aborted(7), one("finished"))),
    "computed before an admission": ("which is waiting", (SENT, Forward(7, 0, 40), one())),
    "computed while it is retracted": ("expected a resume", (*LIFE[:7], Forward(7, 41, 42), one())),
    "computed after its end": ("which is ended", (*LIFE, Forward(7, 42, 43), one())),
    "computed at the decode end before it joined": ("that it joined", (*PAIR[:-1], decode())),
    "computed at the prefill end after it was handed over": (
        "which is joined",
        (*PAIR, PREFILL, Forward(7, 0, 40), prefill()),
    ),
    "a retraction that saved nothing": ("saved 0 times", (*LIFE[:5], one("retracted"))),
    "a save that was not reported": ("retracted 0 times", (*LIFE[:5], SAVED, one())),
    "saved on one rank of two": (
        "decode-1: request 7 was saved 0 times",
        (*(*PAIR[:-1], decode("joined"), ProcessActs("decode-1"), DECODE), *(SAVED, decode("retracted"))),
    ),
    "a resume that restored nothing": ("restored 0 times", (*LIFE[:8], one("resumed", "joined"))),
    "an abort that was not reported": ("never reported that it failed", (*ABORTED[:-1], decode())),
    "an abort that finished": ("it was aborted", (*PAIR[:-1], Aborted(7), PAIR[-1])),
    "the prefill end reports nothing": ("never reported request 7", (*PAIR[:5], prefill(), decode("failed"))),
    "a counter of the other tier": ("1 evictions from the host", (*GOOD["counters"][:2], EvictionsCounted("host", 1))),
    "a counter that stands still": ("0 evictions from the device", (*GOOD["counters"][:2], NOT_COUNTED)),
    "a counter that leaves out what it does not tell": (
        "counts 0 evictions from the device",
        (*GOOD["a window by itself"][:2], NOT_COUNTED),
    ),
    "a counter that is right where nothing was told": ("reports 0 evictions", (LEFT, COUNTED)),
}


@pytest.mark.parametrize("case", GOOD)
def test_reports_that_fit_are_right(case: str) -> None:
    oracle = ReportsOracle()
    assert judge(oracle, History.of(*GOOD[case])) == ()
    assert oracle.judged


@pytest.mark.parametrize("case", BAD)
def test_reports_that_do_not_fit_are_found(case: str) -> None:
    text, events = BAD[case]
    found = judge(ReportsOracle(), History.of(*events))
    assert found and {each.code for each in found} == {"KV605"}
    assert text in found[0].message, [each.message for each in found]
    assert found[0].request == (None if "counter" in case else 7)


def test_findings_are_limited() -> None:
    events = [one(admitted=(number,)) for number in range(MAX_FINDINGS + 5)]
    assert len(judge(ReportsOracle(), History.of(*events))) == MAX_FINDINGS
