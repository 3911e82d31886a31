"""The protocol oracle on literal histories: what ranks say of a room, when its bytes landed, and how requests end.

Invariants:
- A bad history differs from a good one by one event, its place or one value.
"""

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


def room(
    old: int,
    new: int,
    *,
    rank: str = "decode-0",
    number: int = 0,
    request: int = 7,
    generation: int = 1,
    reason: str = "",
) -> RoomChanged:
    """A rank's view of a room changes; room 0 unless said."""
    return RoomChanged(rank, number, request, generation, old, new, reason)


def landing(ordinal: int, leg: str, *, rank: str = "decode-0", request: int | None = 7) -> Submitted:
    """A leg of a room is written into a rank's memory."""
    there = Footprint(f"{rank}:{LEGS[leg]}", BUFFERS[leg], (0, 1), np.array([3]))
    return Submitted(ordinal, f"wire.{leg}", "prefill-0>decode-0:ordered", (), (there,), ordinal, request)


def decision(
    *, admitted: tuple[int, ...] = (), finished: tuple[int, ...] = (), failed: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """What a rank decided in a round: six groups, each with its length."""
    groups = (admitted, (), (), (), finished, failed)
    return tuple(value for group in groups for value in (len(group), *group))


SHORTER = Faulted(7, "its page list kv.full has the length 2, where the prompt has 3 pages", ("2 pages", "3 pages"))
REFUSED = Faulted(7, "a write of its kv was refused", ("refused", "kv"))
OVERDUE = Overdue("decode", 150, (6, 7), ("nothing complete from", "not asked for and taken by"))
TOO_LATE = "room 4: nothing complete from prefill-1 in 200 rounds or seconds"
SIZES = HandoversKnown({7: 4_096, 8: 2_048})
OTHER = "another prefill rank failed"
LIMITS = LimitsNamed(OVERDUE.names)
TOLD = "source has 3 pages from logical page 0, target has 2 pages from logical page 0"

GOOD: dict[str, tuple[Event, ...]] = {
    "seals as long as the prompts": (SIZES, SealsFitted("decode-0", 7, 4_096), SealsFitted("decode-1", 8, 2_048)),
    "a request whose size is not known": (SIZES, SealsFitted("decode-0", 9, 1), SealsFitted("decode-0", 7, 4_096)),
    "success": (room(TRANSFERRING, SUCCESS), Finished(7, (1, 2))),
    "room 0 and the largest one": (
        room(TRANSFERRING, SUCCESS, number=0, request=1),
        room(TRANSFERRING, SUCCESS, number=LAST_ROOM, request=2),
    ),
    "every leg landed first": (
        *(landing(n, leg) for n, leg in enumerate(LEGS, 1)),
        *(Completed(n) for n in (3, 1, 4, 2)),
        room(TRANSFERRING, SUCCESS),
    ),
    "another request is still landing": (landing(1, "kv", request=8), room(TRANSFERRING, SUCCESS)),
    "another rank is still landing": (landing(1, "kv", rank="decode-1"), room(TRANSFERRING, SUCCESS)),
    "a failure does not wait": (Aborted(7), landing(1, "kv"), room(TRANSFERRING, FAILED, reason="aborted")),
    "landing begins behind success of an earlier one": (room(TRANSFERRING, SUCCESS), landing(1, "kv")),
    "the lane's other operations": (
        Submitted(1, "wire.kv.sent", "lane", (), (), 1, 7),
        Submitted(2, "wire.flush", "lane", (), (), 2),
        room(TRANSFERRING, SUCCESS),
    ),
    "another generation of the room": (
        room(TRANSFERRING, FAILED),
        room(TRANSFERRING, SUCCESS, generation=2),
    ),
    "another rank's view": (room(TRANSFERRING, FAILED), room(TRANSFERRING, SUCCESS, rank="decode-1")),
    "ranks agree": (
        Decided("decode", (decision(admitted=(1, 2), failed=(3,)),) * 3),
        Decided("decode", (decision(),) * 2),
        Decided("prefill", (decision(admitted=(4,)),)),
    ),
    "a fault fails with both lengths": (SHORTER, Failed(7, TOLD)),
    "a refusal is named": (REFUSED, Failed(7, "the engine refused to write kv")),
    "aborted": (Aborted(7), Failed(7, "aborted")),
    "aborted before its fault could tell": (SHORTER, Aborted(7), Failed(7, "aborted")),
    "a clock ran ahead, and the room was given up": (OVERDUE, Failed(7, TOO_LATE)),
    "the other end gave it up": (OVERDUE, Failed(7, "room 4: not asked for and taken by decode-0 in 300 rounds")),
    "a refusal is named by the rank that met it": (
        REFUSED,
        GaveUp("prefill-1", 7, "refused to write kv"),
        Failed(7, OTHER),
    ),
    "the rank that gave it up says why": (
        OVERDUE,
        GaveUp("prefill-1", 7, "not asked for and taken by it"),
        Failed(7, OTHER),
    ),
    "a clock ran ahead, and the room arrived": (OVERDUE, room(TRANSFERRING, SUCCESS), Finished(7, (1,))),
    "a clock ran ahead before its fault could tell": (SHORTER, OVERDUE, Failed(7, TOO_LATE)),
    "its writes are delayed until it is given up": (
        *(LIMITS, landing(1, "kv"), room(TRANSFERRING, FAILED, reason=TOO_LATE), Completed(1), Failed(7, TOO_LATE)),
    ),
    "its writes are delayed, and so is its fault": (
        *(LIMITS, SHORTER, landing(1, "kv"), room(TRANSFERRING, FAILED, reason=TOO_LATE), Failed(7, TOO_LATE)),
    ),
    "another rank names the fault": (
        *(SHORTER, room(TRANSFERRING, FAILED, rank="decode-1", reason=TOLD), Failed(7, "another rank failed")),
    ),
    "a clock ran ahead, and its fault told": (OVERDUE, SHORTER, Failed(7, TOLD)),
}

# name: (code, request, buffer, parts of the message), and the history
BAD: dict[str, tuple[tuple[str, int | None, str | None, tuple[str, ...]], tuple[Event, ...]]] = {
    "seals that leave a part out": (
        ("KV304", 7, None, ("decode-1", "cover 4,032 bytes", "take 4,096")),
        (SIZES, SealsFitted("decode-0", 7, 4_096), SealsFitted("decode-1", 7, 4_032)),
    ),
    "no seal was compared": (
        ("KV203", 7, None, ("decode-0", "no byte of it was compared")),
        (SIZES, SealsFitted("decode-0", 7, 0)),
    ),
    "seals that cover more": (("KV304", 8, None, ("2,056",)), (SIZES, SealsFitted("decode-0", 8, 2_056))),
    "failed, then success": (
        ("KV602", 7, None, ("decode-0", "room 0", "from Failed to Success", "Failed is final")),
        (room(TRANSFERRING, FAILED), room(FAILED, SUCCESS)),
    ),
    "success, then failed": (
        ("KV602", 7, None, ("from Success to Failed", "Success is final")),
        (room(TRANSFERRING, SUCCESS), room(SUCCESS, FAILED)),
    ),
    "failed, then transferring": (
        ("KV602", 7, None, ("from Failed to Transferring",)),
        (room(TRANSFERRING, FAILED), room(FAILED, TRANSFERRING)),
    ),
    "success twice": (
        ("KV602", 7, None, ("became Success a second time",)),
        (room(TRANSFERRING, SUCCESS), room(SUCCESS, SUCCESS)),
    ),
    "the largest room": (
        ("KV602", 7, None, (f"room {LAST_ROOM}",)),
        (room(TRANSFERRING, FAILED, number=LAST_ROOM), room(FAILED, SUCCESS, number=LAST_ROOM)),
    ),
    **{
        f"{leg} has not landed": (
            ("KV203", 7, sorted(BUFFERS[leg])[0], ("decode-0", f"its {leg} ({', '.join(sorted(BUFFERS[leg]))})")),
            (
                *(landing(n, each) for n, each in enumerate(LEGS, 1)),
                *(Completed(n) for n, each in enumerate(LEGS, 1) if each != leg),
                room(TRANSFERRING, SUCCESS),
                Completed(list(LEGS).index(leg) + 1),
            ),
        )
        for leg in LEGS
    },
    "the other rank's leg": (
        ("KV203", 7, "index", ("decode-1", "its state")),
        (
            *(landing(1, "state"), landing(2, "state", rank="decode-1"), Completed(1)),
            *(room(TRANSFERRING, SUCCESS), room(TRANSFERRING, SUCCESS, rank="decode-1")),
        ),
    ),
    "ranks disagree about who failed": (
        ("KV601", None, None, ("decode ranks 0 and 1", "failed [3]", "and nothing")),
        (Decided("decode", (decision(failed=(3,)), decision())),),
    ),
    "the last of four disagrees": (
        ("KV601", None, None, ("prefill ranks 0 and 3", "admitted [1, 2] and admitted [2, 1]")),
        (Decided("prefill", (*(decision(admitted=(1, 2)),) * 3, decision(admitted=(2, 1)))),),
    ),
    "tokens of one request differ": (
        ("KV601", None, None, ("finished [7, 1, 2] and finished [7, 1, 3]",)),
        (Decided("decode", (decision(finished=(7, 1, 2)), decision(finished=(7, 1, 3)))),),
    ),
    "a healthy request failed": (
        ("KV604", 7, None, ("it had no fault", "too late")),
        (Faulted(8, "x", ()), Failed(7, "too late")),
    ),
    "a fault that was not noticed": (
        ("KV301", 7, None, ("finished though", "length 2", "has to fail")),
        (SHORTER, Finished(7, (1,))),
    ),
    "a refusal that was not noticed": (
        ("KV203", 7, None, ("finished though", "refused")),
        (REFUSED, Finished(7, (1,))),
    ),
    "only one length": (
        ("KV603", 7, None, ("does not say '2 pages'", "target is too short")),
        (SHORTER, Failed(7, "source has 3 pages, the target is too short")),
    ),
    "neither length": (
        ("KV603", 7, None, ("does not say '2 pages' and '3 pages'", "too late")),
        (SHORTER, Failed(7, "too late")),
    ),
    "the refused leg is not named": (("KV603", 7, None, ("does not say 'kv'",)), (REFUSED, Failed(7, "refused"))),
    "given up with nothing under way": (
        ("KV604", 7, None, ("it had no fault",)),
        (LIMITS, landing(1, "kv"), Completed(1), room(TRANSFERRING, FAILED, reason=TOO_LATE), Failed(7, TOO_LATE)),
    ),
    "given up with writes of another request under way": (
        ("KV604", 7, None, ("it had no fault",)),
        (LIMITS, landing(1, "kv", request=8), room(TRANSFERRING, FAILED, reason=TOO_LATE), Failed(7, TOO_LATE)),
    ),
    "writes are under way, and the reason is another": (
        ("KV604", 7, None, ("too late",)),
        (LIMITS, landing(1, "kv"), room(TRANSFERRING, FAILED, reason="too late"), Failed(7, "too late")),
    ),
    "another rank named the fault of the attempt before": (
        ("KV603", 7, None, ("does not say",)),
        (SHORTER, room(TRANSFERRING, FAILED, reason=TOLD), Retried(7), SHORTER, Failed(7, "too late")),
    ),
    "no rank names the refusal": (
        ("KV603", 7, None, ("does not say 'refused' and 'kv'",)),
        (REFUSED, GaveUp("prefill-1", 7, OTHER), Failed(7, OTHER)),
    ),
    "what a rank said of another request": (
        ("KV604", 7, None, ("it had no fault",)),
        (OVERDUE, GaveUp("prefill-1", 6, "not asked for and taken by it"), Failed(7, OTHER)),
    ),
    "what a rank said of an earlier attempt": (
        ("KV603", 7, None, ("does not say",)),
        (REFUSED, GaveUp("prefill-1", 7, "refused to write kv"), Retried(7), REFUSED, Failed(7, OTHER)),
    ),
    "the clock ran ahead for others": (("KV604", 8, None, ("it had no fault",)), (OVERDUE, Failed(8, TOO_LATE))),
    "the clock ran ahead later": (("KV604", 7, None, ("it had no fault",)), (Failed(7, TOO_LATE), OVERDUE)),
    "it ran ahead in the attempt before": (
        ("KV604", 7, None, ("it had no fault",)),
        (OVERDUE, Failed(7, TOO_LATE), Retried(7), Failed(7, TOO_LATE)),
    ),
    "a clock ran ahead, and the reason does not say for whom it waited": (
        ("KV604", 7, None, ("it had no fault", "too late")),
        (OVERDUE, Failed(7, "too late")),
    ),
    "a clock ran ahead, and its fault was not noticed": (
        ("KV301", 7, None, ("finished though",)),
        (OVERDUE, SHORTER, Finished(7, (1,))),
    ),
    "an abort of somebody else": (("KV604", 7, None, ("aborted",)), (Aborted(8), Failed(7, "aborted"))),
    "the abort came later": (("KV604", 7, None, ("late",)), (Failed(7, "late"), Aborted(7))),
    "aborted, and yet it finished with its fault": (
        ("KV301", 7, None, ("finished though",)),
        (SHORTER, Aborted(7), Finished(7, (1,))),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_gives_no_finding(name: str) -> None:
    oracle = ProtocolOracle()
    assert judge(oracle, History.of(*GOOD[name])) == ()
    assert oracle.judged or name.startswith("aborted")


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(name: str) -> None:
    (code, request, buffer, parts), events = BAD[name]
    (found,) = judge(ProtocolOracle(), History.of(*events))
    assert (found.code, found.request, found.buffer, found.oracle) == (code, request, buffer, "protocol")
    for part in parts:
        assert part in found.message
    assert "\n" not in found.message


def test_every_leg_that_has_not_landed_is_named() -> None:
    landings = tuple(landing(n, leg) for n, leg in enumerate(LEGS, 1))
    found = judge(ProtocolOracle(), History.of(*landings, room(TRANSFERRING, SUCCESS)))
    assert [each.code for each in found] == ["KV203"] * 4
    assert all(f"its {leg} (" in each.message for each, leg in zip(found, LEGS, strict=True))


def test_each_rank_that_differs_from_the_first_is_named() -> None:
    (event,) = (Decided("decode", (decision(), decision(failed=(1,)), decision(), decision(failed=(2,)))),)
    found = judge(ProtocolOracle(), History.of(event))
    assert [each.message.split(" decided")[0] for each in found] == ["decode ranks 0 and 1", "decode ranks 0 and 3"]


def test_no_more_than_so_many_findings_are_kept_while_counting_goes_on() -> None:
    changes = [room(TRANSFERRING, FAILED)] + [room(FAILED, SUCCESS)] * (3 * MAX_FINDINGS)
    oracle = ProtocolOracle()
    assert len(judge(oracle, History.of(*changes))) == MAX_FINDINGS
    assert oracle.judged == len(changes)


def test_rooms_decisions_and_ends_are_counted() -> None:
    oracle = ProtocolOracle()
    events = (
        *(landing(1, "kv"), Completed(1), room(TRANSFERRING, SUCCESS), room(TRANSFERRING, FAILED, request=8, number=1)),
        *(Decided("decode", (decision(),) * 4), Faulted(8, "x", ()), Failed(8, "x"), Finished(7, ()), Aborted(9)),
    )
    assert judge(oracle, History.of(*events)) == ()
    assert oracle.judged == 2 + 4 + 2


def test_nothing_is_judged_in_a_history_without_transfers() -> None:
    oracle = ProtocolOracle()
    assert judge(oracle, History.of(landing(1, "kv"), Completed(1), Aborted(1))) == ()
    assert oracle.judged == 0, "an oracle that saw nothing must not look as if it had"


# A seal that never fitted

LATE = Failed(7, "room 0: nothing complete from prefill-0 in 200 rounds or seconds")
SITES = SitesKnown((RowSites(space="full", buffer="k", piece="", layers=(0, 1), words=4, heads=2),))
MARK = 0x1234


def unsealed(*words: int, rank: str = "decode-0", more: int = 0) -> Unsealed:
    """Rank decode-0 compared request 7's room: the first row of k, layer 1, page 7, differs."""
    found = Mismatch(
        request=7,
        space="full",
        buffer="k",
        piece="",
        layer=1,
        page=7,
        row=0,
        position=4,
        author=7,
        words=words,
        half=False,
        count=2,
    )
    return Unsealed(rank, 7, ("prefill-0",), 640, tuple(("prefill-0", found) for _ in range(1 + more)))


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
