"""The transfers oracle on literal histories. A bad one differs from a good one by one event, its place or one value."""

from __future__ import annotations

import numpy as np
import pytest

from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
from kvcheck.core.cache.events import Event
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.oracles.transfers import ANSWERED_IN, TransfersOracle
from kvcheck.core.stress.workload.events import Broke, MessageEmitted, ProcessActs, Reported, Sent

SOURCE, RANK = "prefill-0", "decode-0"
TO, FROM = f"{SOURCE}>{RANK}", f"{RANK}>{SOURCE}"


def told(kind: str, *, to: str = SOURCE, by: str = RANK, generation: int = 1, copies: int = 1) -> MessageEmitted:
    """A message about request 7."""
    return MessageEmitted(sender=by, peer=to, kind=kind, request=7, generation=generation, copies=copies)


def seals(row: int = 3) -> tuple[Footprint, ...]:
    return (Footprint(f"{RANK}:seals", ("seal",), (0, 1), np.array([row])),)


def sealed(ordinal: int = 1, *, row: int = 3, request: int = 7, path: str = "ordered") -> Submitted:
    """The seal of a request is written."""
    return Submitted(ordinal, "wire.seal", f"{TO}:{path}", (), seals(row), ordinal, request)


def cleared(row: int = 3) -> Submitted:
    """The row of a seal is cleared."""
    return Submitted(9, "seal.clear", f"{RANK}:verify", (), seals(row), 9)


def prefill(*groups: str) -> Reported:
    return Reported(end="prefill", **dict.fromkeys(groups, (7,)))


def decode(*groups: str) -> Reported:
    return Reported(end="decode", **dict.fromkeys(groups, (7,)))


STATUS, ELSEWHERE = told("Status", by=SOURCE, to=RANK), told("Status", by=SOURCE, to="decode-1")
# The message that was told of last is on its way.
ABORT_SENT = Submitted(5, "wire.message.abort", f"{FROM}:message", (), (), 5)
WANT_SENT = Submitted(4, "wire.message.want", f"{FROM}:message", (), (), 4)
DRAINED = told("Drained", by=SOURCE, to=RANK)
WANTED: tuple[Event, ...] = (ProcessActs(RANK), Sent(7, 0, 40), told("Want"), decode("admitted"))
WRITTEN: tuple[Event, ...] = (sealed(), STATUS, prefill())
ROOM: tuple[Event, ...] = (*WANTED, *WRITTEN, told("Done"), decode("joined"))
STOPPED: tuple[Event, ...] = (*WANTED, told("Abort"), ABORT_SENT, decode("failed"), prefill(), Completed(5))
LATE_WANT: tuple[Event, ...] = (*WANTED[:3], WANT_SENT, prefill("failed"), Completed(4))

GOOD: dict[str, tuple[Event, ...]] = {
    "a late Want is refused": (*LATE_WANT, *[prefill()] * ANSWERED_IN, STATUS, DRAINED, prefill()),
    "a late Want is on its way": (*LATE_WANT[:-1], *[prefill()] * 9),
    "a Want that is lost": (*WANTED[:2], told("Want", copies=0), prefill("failed"), *[prefill()] * 9),
    "a Want whose prompt is computed": (*WANTED[:3], WANT_SENT, Completed(4), *[prefill()] * 9),
    "refused before it failed": (
        *(*WANTED[:3], WANT_SENT, Completed(4), STATUS, DRAINED, prefill(), prefill("failed"), *[prefill()] * 9),
    ),
    "the failure may be of another attempt": (
        *(ProcessActs(RANK), Sent(7, 0, 40), prefill("failed"), Sent(7, 1, 40), *LATE_WANT[2:4], Completed(4)),
        *[prefill()] * 9,
    ),
    "a failure is told behind Drained": (*STOPPED, DRAINED, STATUS, DRAINED, prefill()),
    "another attempt is reported": (*STOPPED, DRAINED, prefill(), told("Status", by=SOURCE, to=RANK, generation=2)),
    "another rank's attempt is reported": (*STOPPED, DRAINED, prefill(), ELSEWHERE),
    "a room": ROOM,
    "a message that is lost was sent": (*WANTED[:2], told("Want", copies=0), decode("admitted")),
    "sent over the asynchronous path": (*WANTED, sealed(path="async.seal"), STATUS, prefill()),
    "reported again": (*WANTED, *WRITTEN, STATUS, prefill(), told("Done"), decode("joined")),
    "a source was asked to stop": (*STOPPED, *[prefill()] * ANSWERED_IN, DRAINED, prefill()),
    "an answer that is lost was sent": (*STOPPED, told("Drained", by=SOURCE, to=RANK, copies=0), *[prefill()] * 9),
    "an abort that is on its way": (*STOPPED[:-1], *[prefill()] * 9),
    "an abort that is lost": (*WANTED, told("Abort", copies=0), decode("failed"), *[prefill()] * 9),
    "a source that stopped by itself": (*WANTED, DRAINED, decode("failed")),
    "asked to stop after it had": (*WANTED, DRAINED, told("Abort"), ABORT_SENT, decode("failed"), Completed(5)),
    "failed before it was asked for": (ProcessActs(RANK), Sent(7, 0, 40), decode("failed")),
    "failed after it arrived": (*ROOM, decode("failed")),
    "sent again, and failed before it was asked for": (
        *(*WANTED, told("Abort"), decode("failed"), Sent(7, 1, 40), decode("failed")),
    ),
    "a row of seals that is cleared": (*ROOM, cleared(), sealed(2, request=8), STATUS),
    "another row of seals": (*ROOM, sealed(2, row=4, request=8)),
    "an error explains a missing answer": (*STOPPED, Broke("KV902", "TypeError", "no")),
}

BAD: dict[str, tuple[str, tuple[Event, ...]]] = {
    "a late Want is not refused": ("was not told so", (*LATE_WANT, *[prefill()] * (ANSWERED_IN + 1))),
    "another rank's late Want is refused": (
        "was not told so",
        (*LATE_WANT, ELSEWHERE, *[prefill()] * (ANSWERED_IN + 1)),
    ),
    "reported behind Drained": ("reports it later", (*STOPPED, DRAINED, prefill(), STATUS)),
    "admitted, and not asked for": ("asked nobody", (*WANTED[:2], decode("admitted"))),
    "asked for by one rank of two": ("decode-1 has admitted", (ProcessActs("decode-1"), *WANTED)),
    "a seal that is not reported": ("does not report it", (*WANTED, sealed(), prefill())),
    "a seal that is reported a round later": ("does not report it", (*WANTED, sealed(), prefill(), STATUS, prefill())),
    "a seal that is reported to another rank": ("does not report it", (*WANTED, sealed(), ELSEWHERE, prefill())),
    "joined, and the source is not told": ("expected Done", (*WANTED, *WRITTEN, decode("joined"))),
    "failed, and the source is not told": ("expected Abort", (*WANTED, decode("failed"))),
    "failed, and an earlier attempt's source was told": (
        "expected Abort",
        (*WANTED, told("Abort", generation=0), decode("failed")),
    ),
    "failed, and one source of two is told": (
        "prefill-1",
        (*WANTED[:3], told("Want", to="prefill-1"), WANTED[3], told("Abort"), decode("failed")),
    ),
    "asked to stop, and does not answer": ("has not answered", (*STOPPED, *[prefill()] * (ANSWERED_IN + 1))),
    "asked to stop at the end": ("has not answered", STOPPED),
    "answers for another attempt": ("has not answered", (*STOPPED, told("Drained", by=SOURCE, to=RANK, generation=0))),
    "a row of seals that is not cleared": ("holds that of request 7", (*ROOM, sealed(2, request=8))),
    "another row was cleared": ("holds that of request 7", (*ROOM, cleared(4), sealed(2, request=8))),
}


@pytest.mark.parametrize("case", GOOD)
def test_messages_that_are_sent_in_time_are_right(case: str) -> None:
    oracle = TransfersOracle()
    assert judge(oracle, History.of(*GOOD[case])) == ()


def test_a_room_is_judged() -> None:
    oracle = TransfersOracle()
    judge(oracle, History.of(*ROOM))
    assert oracle.judged == 4, "that it was asked for, the row of its seal, its report, and the answer"


@pytest.mark.parametrize("case", BAD)
def test_messages_that_were_not_sent_are_found(case: str) -> None:
    text, events = BAD[case]
    (found,) = judge(TransfersOracle(), History.of(*events))
    assert found.code == "KV606" and text in found.message
    assert found.request == (8 if "row" in case else 7)


def test_findings_are_limited() -> None:
    rounds = [Reported(end="decode", admitted=(number,)) for number in range(MAX_FINDINGS + 5)]
    assert len(judge(TransfersOracle(), History.of(ProcessActs(RANK), *rounds))) == MAX_FINDINGS
