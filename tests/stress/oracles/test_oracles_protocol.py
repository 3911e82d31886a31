"""The protocol oracle on literal histories. A bad one differs from a good one by one event, its place or one value."""

from __future__ import annotations

import numpy as np
import pytest

from kvcheck.core.base import content
from kvcheck.core.base.content import RowSites, Site, Tag
from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
from kvcheck.core.cache.events import Event, GaveUp, RoomChanged, RoomMarked, SealsFitted
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.oracles.protocol import ProtocolOracle
from kvcheck.core.stress.workload.events import (
    Aborted,
    Decided,
    Failed,
    Faulted,
    Finished,
    HandoversKnown,
    LimitsNamed,
    Overdue,
    Retried,
    SitesKnown,
    Unsealed,
)
from kvcheck.core.stress.workload.mismatch import Mismatch

FAILED, TRANSFERRING, SUCCESS = 0, 3, 4
LAST_ROOM = (1 << 64) - 1
LEGS = {"kv": "full", "state": "state", "aux": "metadata-decode", "seal": "seals"}
BUFFERS = {"kv": ("v", "k"), "state": ("index",), "aux": ("metadata",), "seal": ("seal",)}


def room(old: int, new: int, *, rank: str = "decode-0", request: int = 7, reason: str = "", **more: int) -> RoomChanged:
    """A rank's view of a room changes; room 0 and its first generation unless said."""
    return RoomChanged(rank, more.get("number", 0), request, more.get("generation", 1), old, new, reason)


def lost(reason: str, **more: str) -> RoomChanged:
    return room(TRANSFERRING, FAILED, reason=reason, **more)  # type: ignore[arg-type]


def landing(ordinal: int, leg: str, *, rank: str = "decode-0", request: int | None = 7) -> Submitted:
    """A leg of a room is written into a rank's memory."""
    there = Footprint(f"{rank}:{LEGS[leg]}", BUFFERS[leg], (0, 1), np.array([3]))
    return Submitted(ordinal, f"wire.{leg}", "prefill-0>decode-0:ordered", (), (there,), ordinal, request)


def decision(
    *, admitted: tuple[int, ...] = (), finished: tuple[int, ...] = (), failed: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The decisions of a rank in a round: six groups, each with its length."""
    groups = (admitted, (), (), (), finished, failed)
    return tuple(value for group in groups for value in (len(group), *group))


def decided(*decisions: tuple[int, ...], end: str = "decode") -> Decided:
    return Decided(end, decisions)


def failed(reason: str) -> Failed:
    return Failed(7, reason)


ARRIVED, LOST, FINISHED = room(TRANSFERRING, SUCCESS), room(TRANSFERRING, FAILED), Finished(7, (1,))
SHORTER = Faulted(7, "its page list kv.full has the length 2, where the prompt has 3 pages", ("2 pages", "3 pages"))
REFUSED = Faulted(7, "a write of its kv was refused", ("refused", "kv"))
OVERDUE = Overdue("decode", 150, (6, 7), ("nothing complete from", "not asked for and taken by"))
TOO_LATE = "room 4: nothing complete from prefill-1 in 200 rounds or seconds"
LATE = failed(TOO_LATE)
UNDER_WAY: tuple[Event, ...] = (LimitsNamed(OVERDUE.names), landing(1, "kv"))
SIZES = HandoversKnown({7: 4_096, 8: 2_048})
TOLD = "source has 3 pages from logical page 0, target has 2 pages from logical page 0"
OTHER = "another prefill rank failed"
GAVE_UP = GaveUp("prefill-1", 7, "refused to write kv")

GOOD: dict[str, tuple[Event, ...]] = {
    "seals as long as the prompts": (SIZES, SealsFitted("decode-0", 7, 4_096), SealsFitted("decode-1", 8, 2_048)),
    "a request whose size is not known": (SIZES, SealsFitted("decode-0", 9, 1), SealsFitted("decode-0", 7, 4_096)),
    "success": (ARRIVED, Finished(7, (1, 2))),
    "room 0 and the largest one": (
        *(room(TRANSFERRING, SUCCESS, request=1), room(TRANSFERRING, SUCCESS, request=2, number=LAST_ROOM)),
    ),
    "every leg landed first": (
        *(*(landing(n, leg) for n, leg in enumerate(LEGS, 1)), *map(Completed, (3, 1, 4, 2)), ARRIVED),
    ),
    "another request is still landing": (landing(1, "kv", request=8), ARRIVED),
    "another rank is still landing": (landing(1, "kv", rank="decode-1"), ARRIVED),
    "a failure does not wait": (Aborted(7), landing(1, "kv"), lost("aborted")),
    "landing begins behind success of an earlier one": (ARRIVED, landing(1, "kv")),
    "the lane's other operations": (
        *(Submitted(1, "wire.kv.sent", "lane", (), (), 1, 7), Submitted(2, "wire.flush", "lane", (), (), 2), ARRIVED),
    ),
    "another generation of the room": (LOST, room(TRANSFERRING, SUCCESS, generation=2)),
    "another rank's view": (LOST, room(TRANSFERRING, SUCCESS, rank="decode-1")),
    "ranks agree": (
        decided(*(decision(admitted=(1, 2), failed=(3,)),) * 3),
        decided(decision(), decision()),
        decided(decision(admitted=(4,)), end="prefill"),
    ),
    "a fault fails with both lengths": (SHORTER, failed(TOLD)),
    "a refusal is named": (REFUSED, failed("the engine refused to write kv")),
    "aborted": (Aborted(7), failed("aborted")),
    "aborted before its fault could tell": (SHORTER, Aborted(7), failed("aborted")),
    "a clock ran ahead, and the room was given up": (OVERDUE, LATE),
    "the other end gave it up": (OVERDUE, failed("room 4: not asked for and taken by decode-0 in 300 rounds")),
    "a refusal is named by the rank that met it": (REFUSED, GAVE_UP, failed(OTHER)),
    "the rank that gave it up says why": (OVERDUE, GaveUp("prefill-1", 7, OVERDUE.names[1]), failed(OTHER)),
    "a clock ran ahead, and the room arrived": (OVERDUE, ARRIVED, FINISHED),
    "a clock ran ahead before its fault could tell": (SHORTER, OVERDUE, LATE),
    "its writes are delayed until it is given up": (*UNDER_WAY, lost(TOO_LATE), Completed(1), LATE),
    "its writes are delayed, and so is its fault": (SHORTER, *UNDER_WAY, lost(TOO_LATE), LATE),
    "another rank names the fault": (SHORTER, lost(TOLD, rank="decode-1"), failed("another rank failed")),
    "a clock ran ahead, and its fault told": (OVERDUE, SHORTER, failed(TOLD)),
}

BAD: dict[str, tuple[str, tuple[Event, ...]]] = {  # code, request if it is not 7, words of the message; the history
    "seals that leave a part out": ("KV304 cover 4,032 ... take 4,096", (SIZES, SealsFitted("decode-1", 7, 4_032))),
    "no seal was compared": ("KV203 no byte of it was compared", (SIZES, SealsFitted("decode-0", 7, 0))),
    "seals that cover more": ("KV304:8 2,056", (SIZES, SealsFitted("decode-0", 8, 2_056))),
    "failed, then success": ("KV602 decode-0 ... room 0 ... from Failed to Success", (LOST, room(FAILED, SUCCESS))),
    "success, then failed": ("KV602 from Success to Failed", (ARRIVED, room(SUCCESS, FAILED))),
    "failed, then transferring": ("KV602 from Failed to Transferring", (LOST, room(FAILED, TRANSFERRING))),
    "success twice": ("KV602 a second time", (ARRIVED, room(SUCCESS, SUCCESS))),
    "the largest room": (
        f"KV602 room {LAST_ROOM}",
        (room(TRANSFERRING, FAILED, number=LAST_ROOM), room(FAILED, SUCCESS, number=LAST_ROOM)),
    ),
    "the other rank's leg": (
        "KV203 decode-1 ... its state",
        (
            *(landing(1, "state"), landing(2, "state", rank="decode-1"), Completed(1)),
            *(ARRIVED, room(TRANSFERRING, SUCCESS, rank="decode-1")),
        ),
    ),
    "ranks disagree about who failed": (
        "KV601:None decode ranks 0 and 1 ... failed [3] ... and nothing",
        (decided(decision(failed=(3,)), decision()),),
    ),
    "the last of four disagrees": (
        "KV601:None prefill ranks 0 and 3 ... admitted [1, 2] and admitted [2, 1]",
        (decided(*(decision(admitted=(1, 2)),) * 3, decision(admitted=(2, 1)), end="prefill"),),
    ),
    "tokens of one request differ": (
        "KV601:None finished [7, 1, 2] and finished [7, 1, 3]",
        (decided(decision(finished=(7, 1, 2)), decision(finished=(7, 1, 3))),),
    ),
    "a healthy request failed": ("KV604 no fault ... too late", (Faulted(8, "x", ()), failed("too late"))),
    "a fault that was not noticed": ("KV301 finished though ... length 2", (SHORTER, FINISHED)),
    "a refusal that was not noticed": ("KV203 finished though ... refused", (REFUSED, FINISHED)),
    "only one length": ("KV603 '2 pages'", (SHORTER, failed("source has 3 pages, the target is too short"))),
    "neither length": ("KV603 '2 pages' and '3 pages'", (SHORTER, failed("too late"))),
    "the refused leg is not named": ("KV603 'kv'", (REFUSED, failed("refused"))),
    "given up with nothing under way": ("KV604 no fault", (*UNDER_WAY, Completed(1), lost(TOO_LATE), LATE)),
    "given up with writes of another request under way": (
        "KV604 no fault",
        (UNDER_WAY[0], landing(1, "kv", request=8), lost(TOO_LATE), LATE),
    ),
    "writes are under way, and the reason is another": (
        "KV604 too late",
        (*UNDER_WAY, lost("too late"), failed("too late")),
    ),
    "another rank named the fault of the attempt before": (
        "KV603 does not say",
        (SHORTER, lost(TOLD), Retried(7), SHORTER, failed("too late")),
    ),
    "no rank names the refusal": ("KV603 'refused' and 'kv'", (REFUSED, GaveUp("prefill-1", 7, OTHER), failed(OTHER))),
    "a rank named another request": ("KV604 no fault", (OVERDUE, GaveUp("p", 6, OVERDUE.names[1]), failed(OTHER))),
    "a rank named an earlier attempt": ("KV603 not say", (REFUSED, GAVE_UP, Retried(7), REFUSED, failed(OTHER))),
    "the clock ran ahead for others": ("KV604:8 no fault", (OVERDUE, Failed(8, TOO_LATE))),
    "the clock ran ahead later": ("KV604 no fault", (LATE, OVERDUE)),
    "it ran ahead in the attempt before": ("KV604 no fault", (OVERDUE, LATE, Retried(7), LATE)),
    "the reason does not say for whom it waited": ("KV604 no fault ... too late", (OVERDUE, failed("too late"))),
    "a clock ran ahead, and its fault was not noticed": ("KV301 finished though", (OVERDUE, SHORTER, FINISHED)),
    "an abort of somebody else": ("KV604 aborted", (Aborted(8), failed("aborted"))),
    "the abort came later": ("KV604 late", (failed("late"), Aborted(7))),
    "aborted, and yet it finished with its fault": ("KV301 finished though", (SHORTER, Aborted(7), FINISHED)),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_gives_no_finding(name: str) -> None:
    oracle = ProtocolOracle()
    assert judge(oracle, History.of(*GOOD[name])) == ()
    assert oracle.judged or name.startswith("aborted")


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(name: str) -> None:
    said, events = BAD[name]
    (found,) = judge(ProtocolOracle(), History.of(*events))
    place, _, words = said.partition(" ")
    code, _, request = place.partition(":")
    assert (found.code, str(found.request), found.oracle) == (code, request or "7", "protocol")
    assert all(each in found.message for each in words.split(" ... ")), found.message
    assert "\n" not in found.message


@pytest.mark.parametrize("leg", LEGS)
def test_a_leg_that_has_not_landed_is_named_with_its_buffers(leg: str) -> None:
    ordinals = {each: n for n, each in enumerate(LEGS, 1)}
    landed = [Completed(n) for each, n in ordinals.items() if each != leg]
    events = (*(landing(n, each) for each, n in ordinals.items()), *landed, ARRIVED, Completed(ordinals[leg]))
    (found,) = judge(ProtocolOracle(), History.of(*events))
    assert (found.code, found.request, found.buffer) == ("KV203", 7, min(BUFFERS[leg]))
    assert f"its {leg} ({', '.join(sorted(BUFFERS[leg]))})" in found.message


def test_every_leg_that_has_not_landed_is_named() -> None:
    found = judge(ProtocolOracle(), History.of(*(landing(n, leg) for n, leg in enumerate(LEGS, 1)), ARRIVED))
    assert [each.code for each in found] == ["KV203"] * 4
    assert all(f"its {leg} (" in each.message for each, leg in zip(found, LEGS, strict=True))


def test_each_rank_that_differs_from_the_first_is_named() -> None:
    event = decided(decision(), decision(failed=(1,)), decision(), decision(failed=(2,)))
    found = judge(ProtocolOracle(), History.of(event))
    assert [each.message.split(" decided")[0] for each in found] == ["decode ranks 0 and 1", "decode ranks 0 and 3"]


def test_no_more_than_so_many_findings_are_kept_while_counting_goes_on() -> None:
    changes = [LOST] + [room(FAILED, SUCCESS)] * (3 * MAX_FINDINGS)
    oracle = ProtocolOracle()
    assert len(judge(oracle, History.of(*changes))) == MAX_FINDINGS
    assert oracle.judged == len(changes)


def test_rooms_decisions_and_ends_are_counted() -> None:
    oracle = ProtocolOracle()
    events = (
        *(landing(1, "kv"), Completed(1), ARRIVED, room(TRANSFERRING, FAILED, request=8, number=1)),
        *(decided(*(decision(),) * 4), Faulted(8, "x", ()), Failed(8, "x"), Finished(7, ()), Aborted(9)),
    )
    assert judge(oracle, History.of(*events)) == ()
    assert oracle.judged == 2 + 4 + 2


def test_nothing_is_judged_in_a_history_without_transfers() -> None:
    oracle = ProtocolOracle()
    assert judge(oracle, History.of(landing(1, "kv"), Completed(1), Aborted(1))) == ()
    assert oracle.judged == 0, "an oracle that saw nothing must not look as if it had"


# A seal that never fitted

SITES = SitesKnown((RowSites(space="full", buffer="k", piece="", layers=(0, 1), words=4, heads=2),))
MARK = 0x1234


def unsealed(*words: int, rank: str = "decode-0", more: int = 0) -> Unsealed:
    """A rank compared request 7's room: the first row of k, layer 1, page 7, differs."""
    place = {"request": 7, "space": "full", "buffer": "k", "piece": "", "layer": 1, "page": 7, "row": 0}
    found = Mismatch(**place, position=4, author=7, words=words, half=False, count=2)  # type: ignore[arg-type]
    return Unsealed(rank, 7, ("prefill-0",), 640, (("prefill-0", found),) * (1 + more))


def written(request: int, position: int, layer: int, *places: int) -> list[int]:
    return [content.word(Tag(request, 0, position), Site("full", "k", "", layer), at) for at in places]


@pytest.mark.parametrize(
    ("event", "story"),
    [
        (unsealed(*written(3, 0, 1, 0, 1, 2, 3)), "holds request 3's bytes (its position 0)"),
        (unsealed(MARK, MARK, MARK, MARK), "holds memory that was never written"),
        (unsealed(*written(7, 4, 0, 0, 1, 2, 3)), "holds the words of layer 0 of request 7, position 4"),
        (unsealed(*written(7, 4, 1, 2, 3)), "holds the words of head 1 of request 7, position 4"),
        (unsealed(MARK, MARK, more=2), "holds memory that was never written, and 2 more places"),
    ],
)
def test_a_room_that_is_too_late_says_what_its_memory_holds(event: Unsealed, story: str) -> None:
    (finding,) = judge(ProtocolOracle(), History.of(SITES, RoomMarked("decode-0", MARK), event, LATE))
    assert (finding.code, finding.buffer, finding.layer, finding.page, finding.row) == ("KV604", "k", 1, 7, 0)
    place = "decode-0 had the reports of all sources, and k, layer 1, page 7, row 0 (and 1 more rows), which prefill-0"
    assert place in finding.message and finding.message.endswith(story)


def test_a_room_whose_words_are_right_says_so() -> None:
    right = Unsealed("decode-0", 7, ("prefill-0", "prefill-1"), 640, ())
    (finding,) = judge(ProtocolOracle(), History.of(right, LATE))
    assert "all 640 words that it can compare are right: what prefill-0, prefill-1 sealed" in finding.message
    assert (finding.code, finding.buffer, finding.page) == ("KV604", None, None)
    (other,) = judge(ProtocolOracle(), History.of(right, unsealed(MARK, rank="decode-1"), LATE))
    assert "decode-1 had the reports of all sources, and k, layer 1" in other.message, "the rank that saw more speaks"


@pytest.mark.parametrize(
    "events",
    [
        (unsealed(MARK),),
        (REFUSED, unsealed(MARK), Failed(7, "refused kv")),
        (Aborted(7), unsealed(MARK), LATE),
        (unsealed(MARK), Finished(7, (1,))),
    ],
)
def test_what_a_room_holds_accuses_nobody(events: tuple[Event, ...]) -> None:
    assert judge(ProtocolOracle(), History.of(SITES, *events)) == ()


def test_what_an_earlier_attempt_held_explains_no_later_one() -> None:
    (finding,) = judge(ProtocolOracle(), History.of(REFUSED, unsealed(MARK), Failed(7, "refused kv"), Retried(7), LATE))
    assert finding.message.endswith("200 rounds or seconds") and finding.buffer is None
