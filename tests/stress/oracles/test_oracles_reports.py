"""The reports oracle on literal histories: attempts that are told twice, never, in another order or of nothing done.

Invariants:
- A bad history differs from a good one by one event or one value.
"""

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


def one(**groups: tuple[int, ...]) -> Reported:
    """A round of an engine that does both."""
    return Reported(end="", **groups)


def prefill(**groups: tuple[int, ...]) -> Reported:
    """A round of the prefill end."""
    return Reported(end="prefill", **groups)


def decode(**groups: tuple[int, ...]) -> Reported:
    """A round of the decode end."""
    return Reported(end="decode", **groups)


def saved(request: int = 7) -> Saved:
    return Saved(request, 41, TABLE, TABLE)


def restored(request: int = 7) -> Restored:
    return Restored(request, 41, (3,), TABLE, TABLE)


PAGE = (b"a",)
LEFT = TierChanged("device", "full", PAGE, (3,), False)
LIFE: tuple[Event, ...] = (
    SENT,
    Forward(7, 0, 40),
    one(admitted=(7,)),
    Forward(7, 40, 41),
    one(joined=(7,)),
    saved(),
    one(retracted=(7,)),
    one(),
    restored(),
    Forward(7, 41, 42),
    one(resumed=(7,), joined=(7,), finished=(7,)),
)
PAIR: tuple[Event, ...] = (
    ProcessActs("prefill-0"),
    ProcessActs("decode-0"),
    SENT,
    prefill(),
    decode(admitted=(7,)),
    ProcessActs("prefill-0"),
    Forward(7, 0, 40),
    prefill(admitted=(7,), joined=(7,)),
    ProcessActs("decode-0"),
    Forward(7, 40, 41),
    decode(joined=(7,), finished=(7,)),
)
ABORTED: tuple[Event, ...] = (*PAIR[:5], Aborted(7), prefill(failed=(7,)), decode(failed=(7,)))

GOOD: dict[str, tuple[Event, ...]] = {
    "one engine": LIFE,
    "a request that ends in its first round": (SENT, one(admitted=(7,), joined=(7,), finished=(7,))),
    "resumed and retracted again in a round": (
        *LIFE[:8],
        restored(),
        saved(),
        one(resumed=(7,), joined=(7,), retracted=(7,)),
    ),
    "retracted between two rounds, resumed in the next": (
        *LIFE[:5],
        saved(),
        restored(),
        Forward(7, 41, 42),
        one(retracted=(7,), resumed=(7,), joined=(7,)),
    ),
    "retracted and then aborted between two rounds": (*LIFE[:5], saved(), Aborted(7), one(retracted=(7,))),
    "aborted while it waits": (SENT, one(), Aborted(7), one()),
    "a pair": PAIR,
    "aborted at both ends": ABORTED,
    "sent again, while the prefill end has not told of the failure": (
        *(*PAIR[:8], decode(failed=(7,)), AGAIN),
        *(prefill(failed=(7,)), prefill(admitted=(7,)), decode(admitted=(7,)), prefill(joined=(7,))),
        decode(joined=(7,), finished=(7,)),
    ),
    "handed over and taken, failed at the decode end, sent again": (
        *(*PAIR[:8], decode(failed=(7,)), AGAIN, prefill(admitted=(7,), joined=(7,)), decode(admitted=(7,))),
        decode(joined=(7,), finished=(7,)),
    ),
    "refused before its earlier attempt is told of": (
        *(*PAIR[:8], decode(failed=(7,)), AGAIN, Aborted(7)),
        *(prefill(failed=(7,)), prefill(failed=(7,)), decode(failed=(7,))),
    ),
    "handed over and taken, sent again, and only the second attempt failed": (
        *(*PAIR[:8], decode(joined=(7,), finished=(7,)), AGAIN, prefill(failed=(7,))),
    ),
    "refused while its earlier attempt is computed, which then fails": (
        *(*PAIR[:3], AGAIN, prefill(admitted=(7,), failed=(7,)), ProcessActs("prefill-0"), Forward(7, 0, 40)),
        *(prefill(joined=(7,)), prefill(failed=(7,))),
    ),
    "an error explains what was not reported": (*ABORTED[:-1], Broke("KV902", "TypeError", "no")),
    "ranks that decided differently": (*ABORTED[:-1], Decided("decode", ((1, 7), (0,))), decode(joined=(7,))),
    "counters": (LEFT, Evicted("device", "full", False), EvictionsCounted("device", 1), EvictionsCounted("host", 0)),
    "a window that leaves with its pages": (
        Chosen("device", "full", PAGE),
        TierChanged("device", "window", PAGE, (4,), False),
        LEFT,
        Evicted("device", "full", False),
        EvictionsCounted("device", 1),
    ),
    "a window that leaves by itself": (
        Chosen("device", "window", PAGE),
        TierChanged("device", "window", PAGE, (4,), False),
        Evicted("device", "window", False),
        EvictionsCounted("device", 1),
    ),
    "pages that come back": (TierChanged("device", "full", PAGE, (3,), True), EvictionsCounted("device", 0)),
}

BAD: dict[str, tuple[str, tuple[Event, ...]]] = {
    "admitted twice": ("cannot be admitted", (*LIFE[:3], one(admitted=(7,)))),
    "admitted twice in a round": ("admitted once", (SENT, one(admitted=(7, 7)))),
    "admitted before it was sent": ("it is unsent", (one(admitted=(7,)),)),
    "joins without an admission": ("cannot join", (SENT, one(joined=(7,)))),
    "joins twice": ("cannot join", (*LIFE[:5], one(joined=(7,)))),
    "resumed, and does not join": ("joins by that", (*LIFE[:9], one(resumed=(7,)))),
    "resumed, and was not retracted": ("take turns", (*LIFE[:5], restored(), one(resumed=(7,), joined=(7,)))),
    "retracted twice": ("take turns", (*LIFE[:7], saved(), one(retracted=(7,)))),
    "retracted before it joined": ("take turns", (*LIFE[:3], saved(), one(retracted=(7,)))),
    "finished while it is retracted": ("cannot finish", (*LIFE[:8], one(finished=(7,)))),
    "fails three times, and was sent twice": (
        "cannot fail",
        (*PAIR[:3], AGAIN, *(prefill(failed=(7,)),) * 3),
    ),
    "computed after both attempts failed": (
        "expected an admission",
        (*PAIR[:3], AGAIN, prefill(failed=(7,)), prefill(failed=(7,)), *PAIR[5:7], prefill()),
    ),
    "finished twice": ("cannot finish", (*LIFE, one(finished=(7,)))),
    "finished twice in a round": ("ends once", (*LIFE[:5], one(finished=(7, 7)))),
    "finished and failed": ("ends once", (*PAIR[:-1], decode(joined=(7,), finished=(7,), failed=(7,)))),
    "failed after it finished": ("cannot fail", (*PAIR, decode(failed=(7,)))),
    "everything is told again": ("cannot be admitted", (*LIFE, LIFE[2])),
    "finished after an abort": ("cannot finish", (*LIFE[:5], Aborted(7), one(finished=(7,)))),
    "computed before an admission": ("which is waiting", (SENT, Forward(7, 0, 40), one())),
    "computed while it is retracted": ("expected a resume", (*LIFE[:7], Forward(7, 41, 42), one())),
    "computed after its end": ("which is ended", (*LIFE, Forward(7, 42, 43), one())),
    "computed at the decode end before it joined": ("that it joined", (*PAIR[:-1], decode())),
    "computed at the prefill end after it was handed over": (
        "which is joined",
        (*PAIR, ProcessActs("prefill-0"), Forward(7, 0, 40), prefill()),
    ),
    "a retraction that saved nothing": ("saved 0 times", (*LIFE[:5], one(retracted=(7,)))),
    "a save that was not reported": ("retracted 0 times", (*LIFE[:5], saved(), one())),
    "saved on one rank of two": (
        "decode-1: request 7 was saved 0 times",
        (
            *(*PAIR[:-1], decode(joined=(7,)), ProcessActs("decode-1"), ProcessActs("decode-0")),
            *(saved(), decode(retracted=(7,))),
        ),
    ),
    "a resume that restored nothing": ("restored 0 times", (*LIFE[:8], one(resumed=(7,), joined=(7,)))),
    "an abort that was not reported": ("never reported that it failed", (*ABORTED[:-1], decode())),
    "an abort that finished": ("it was aborted", (*PAIR[:-1], Aborted(7), PAIR[-1])),
    "the prefill end reports nothing": ("never reported request 7", (*PAIR[:5], prefill(), decode(failed=(7,)))),
    "a counter of the other tier": ("1 evictions from the host", (*GOOD["counters"][:2], EvictionsCounted("host", 1))),
    "a counter that stands still": (
        "0 evictions from the device",
        (*GOOD["counters"][:2], EvictionsCounted("device", 0)),
    ),
    "a counter that leaves out what it does not tell": (
        "counts 0 evictions from the device",
        (*GOOD["a window that leaves by itself"][:2], EvictionsCounted("device", 0)),
    ),
    "a counter that is right where nothing was told": ("reports 0 evictions", (LEFT, EvictionsCounted("device", 1))),
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
