"""A prefill rank's side of a room: who asks, who gives up, what is refused, and when its memory comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.pair import SENDER_PATIENCE, Rig

from kvcheck.core.cache.transfer.messages import Abort, Done, Drained, Message, Status, Want
from kvcheck.core.cache.transfer.receiver import FAILED, SUCCESS
from kvcheck.core.cache.transfer.sender import DONE, PENDING, REFUSED, UNWANTED, WANTED
from kvcheck.core.cache.transfer.sender import FAILED as SENDER_FAILED

ROOM = 5


def want(**values: object) -> Want:
    """A want of two pages of llama."""
    made = Want(
        room=ROOM,
        attempt=0,
        generation=4,
        request=1,
        tokens=7,
        slot=0,
        state_slot=0,
        runs=(("kv.full", 0, (5, 6)),),
    )
    return replace(made, **values)  # type: ignore[arg-type]


def ask(rig: Rig, *messages: Message, sender: str = "decode-0") -> list[Message]:
    """Messages that arrive at the prefill end; what the decode end hears then."""
    rig.prefill.wire.inbox += [(sender, message, []) for message in messages]
    rig.sender.poll()
    heard = [message for _, message, _ in rig.decode.wire.inbox]
    rig.decode.wire.inbox.clear()
    return heard


def compute(rig: Rig) -> None:
    """The prompt of an opened room is computed and reported."""
    sent = rig.begin_opened(ROOM, 7)
    rig.sender.send_pages(ROOM, 7, rig.done())
    rig.finish(sent)


def hand_over(rig: Rig) -> None:
    """The room is opened, asked for, computed and reported."""
    rig.sender.open(ROOM, 1, 7)
    ask(rig, want())
    compute(rig)


def refusal(reason: str, generation: int = 4) -> list[Message]:
    """What the decode end hears of a room that has failed."""
    failed = Status(room=ROOM, generation=generation, is_ok=False, reason=reason)
    return [failed, Drained(room=ROOM, generation=generation)]


def delivers_another(rig: Rig, tokens: int) -> bool:
    """Whether the next room over the same ends arrives whole."""
    got = rig.expect(6, tokens, request=2)
    sent = rig.prefill_room(6, tokens, request=2)
    rig.poll()
    return rig.rooms[6].status == SUCCESS and rig.differs(sent, got) == []


def test_a_want_that_comes_after_the_failure_hears_of_it_with_the_reason() -> None:
    rig = Rig()
    rig.sender.open(ROOM, 1, 7)
    assert rig.sender.readiness(ROOM) == UNWANTED
    rig.sender.fail(ROOM, "broken")
    assert (rig.sender.readiness(ROOM), rig.sender.state(ROOM)) == (REFUSED, SENDER_FAILED)
    assert ask(rig, want()) == refusal("broken")
    rig.sender.close(ROOM)
    assert ask(rig, want()) == [], "a copy is not answered"
    assert ask(rig, want(generation=5)) == refusal("broken", 5), "also once it is forgotten"


@pytest.mark.parametrize("asked", [(), (want(),)], ids=["before any want", "between want and request"])
def test_an_abort_before_the_request_ends_its_attempt(asked: tuple[Want, ...]) -> None:
    rig = Rig()
    answer = ask(rig, *asked, Abort(room=ROOM, attempt=0, generation=4, reason="x"))
    assert answer == [Drained(room=ROOM, generation=4), *(refusal("x") if asked else ())]
    rig.sender.open(ROOM, 1, 7)
    assert (rig.sender.readiness(ROOM), rig.sender.reason(ROOM)) == (REFUSED, "x")
    assert rig.sender.state(ROOM) == SENDER_FAILED
    rig.sender.close(ROOM)
    rig.sender.open(ROOM, 1, 7, attempt=1)
    assert rig.sender.readiness(ROOM) == UNWANTED
    ask(rig, want(generation=5, attempt=1))
    assert rig.sender.readiness(ROOM) == WANTED


def test_a_room_that_its_decode_rank_could_not_take_has_failed_for_its_reason() -> None:
    rig = Rig()
    rig.sender.open(ROOM, 1, 7)
    ask(rig, want(), Done(room=ROOM, generation=4, is_ok=False, reason="no room"))
    assert (rig.sender.readiness(ROOM), rig.sender.reason(ROOM)) == (REFUSED, "no room")


def test_a_room_that_is_refused_before_it_is_opened_has_failed_at_both_ends() -> None:
    rig = Rig()
    rig.expect(ROOM, 9)
    rig.poll()
    rig.sender.refuse(ROOM, 0, "unknown")
    rig.poll()
    assert (rig.rooms[ROOM].status, rig.rooms[ROOM].reason) == (FAILED, "unknown")
    assert rig.receiver.is_drained(rig.rooms[ROOM])


def test_an_abort_whose_want_was_lost_ends_the_request() -> None:
    rig = Rig()
    rig.sender.open(ROOM, 1, 7)
    ask(rig, Abort(room=ROOM, attempt=0, generation=4, reason="late"), sender="decode-9")
    assert rig.sender.readiness(ROOM) == UNWANTED, "a stranger ends nothing"
    assert ask(rig, Abort(room=ROOM, attempt=0, generation=4, reason="late")) == [Drained(room=ROOM, generation=4)]
    assert (rig.sender.readiness(ROOM), rig.sender.reason(ROOM)) == (REFUSED, "late")


@pytest.mark.parametrize("is_opened_first", [False, True])
def test_a_room_that_is_asked_for_and_never_taken_is_given_up(is_opened_first: bool) -> None:
    rig = Rig()
    rig.now = 7
    if is_opened_first:
        rig.sender.open(ROOM, 1, 7)
    ask(rig, want())
    if not is_opened_first:
        rig.sender.open(ROOM, 1, 7)
    compute(rig)
    rig.decode.wire.inbox.clear()
    for _ in range(2):
        rig.now += SENDER_PATIENCE // 3
        assert ask(rig) == [Status(room=ROOM, generation=4, is_ok=True)], "the first answer may have been lost"
        assert ask(rig) == []
    rig.now = 7 + SENDER_PATIENCE - 1
    assert [each for each in ask(rig) if not isinstance(each, Status) or not each.is_ok] == []
    assert rig.sender.state(ROOM) == PENDING
    rig.now += 1
    heard, reason = ask(rig), rig.sender.reason(ROOM)
    assert rig.sender.state(ROOM) == SENDER_FAILED and f"in {SENDER_PATIENCE} rounds or seconds" in reason
    assert heard == refusal(reason)


def test_an_older_want_does_not_replace_a_newer_one_and_strangers_are_not_served() -> None:
    rig = Rig()
    rig.sender.open(ROOM, 1, 7)
    ask(rig, want(), sender="decode-9")
    assert rig.sender.readiness(ROOM) == UNWANTED
    ask(rig, want(), want(generation=3, slot=2), want(slot=3))
    assert rig.sender._wants.of(ROOM, 0)["decode-0"] == want()


def test_memory_is_the_rooms_until_done_of_its_own_attempt() -> None:
    rig = Rig()
    hand_over(rig)
    for message in (Done(room=ROOM, generation=3, is_ok=True), Done(room=6, generation=4, is_ok=True)):
        ask(rig, message)
        assert rig.sender.state(ROOM) == PENDING
    ask(rig, Done(room=ROOM, generation=4, is_ok=True), sender="decode-9")
    assert rig.sender.state(ROOM) == PENDING
    ask(rig, Done(room=ROOM, generation=4, is_ok=True))
    rig.now += SENDER_PATIENCE
    assert ask(rig) == [] and rig.sender.state(ROOM) == DONE, "it was taken in time"


WRONG_WANTS = {
    "a page less": (want(runs=(("kv.full", 0, (5,)),)), "target has 1 pages"),
    "a page more": (want(runs=(("kv.full", 0, (5, 6, 7)),)), "target has 3 pages"),
    "a page later": (want(runs=(("kv.full", 1, (6,)),)), "from logical page 1"),
    "no pages": (want(runs=()), "target has 0 pages"),
    "another leg": (want(runs=(("state.full", 0, (5, 6)),)), "target has 0 pages"),
    "a token less": (want(tokens=6), "target has 6 tokens"),
    "a token more": (want(tokens=8), "target has 8 tokens"),
    "padding": (want(runs=(("kv.full", 0, (5, 0)),)), "from 0"),
    "a page that is not there": (want(runs=(("kv.full", 0, (5, 15)),)), "from 15"),
    "a slot that is not there": (want(slot=4), "metadata"),
}


@pytest.mark.parametrize("name", WRONG_WANTS)
@pytest.mark.parametrize("chunk", [4, 7])
def test_a_want_that_does_not_fit_fails_its_room_alone_and_says_why(name: str, chunk: int) -> None:
    rig = Rig()
    wrong, why = WRONG_WANTS[name]
    words = rig.decode.pool.sets["full"].write_view("k")
    before = words.clone()
    ask(rig, wrong)
    rig.prefill_room(ROOM, 7, chunk=chunk)
    assert rig.sender.state(ROOM) == SENDER_FAILED and why in rig.sender.reason(ROOM)
    assert ask(rig) == refusal(rig.sender.reason(ROOM))
    assert "token" not in name or torch.equal(words, before), "nothing is sent of a prompt of another length"
    rig.receiver._attempts = 4  # the number that the hand-written want had
    assert delivers_another(rig, 9)


@pytest.mark.parametrize("leg", ["kv", "state", "aux", "seal"])
def test_a_leg_that_the_engine_refuses_fails_the_room_on_both_sides(leg: str) -> None:
    rig = Rig("glm-5.1-tiny", refuses=lambda writer, peer, each, ticket: each == leg and ticket.room == ROOM)
    rig.expect(ROOM, 70)
    rig.prefill_room(ROOM, 70)
    rig.poll(2)
    assert rig.rooms[ROOM].status == FAILED and rig.receiver.is_drained(rig.rooms[ROOM])
    assert f"refused to write {leg}" in rig.rooms[ROOM].reason
    assert (rig.sender.state(ROOM), rig.sender.reason(ROOM)) == (SENDER_FAILED, rig.rooms[ROOM].reason)
    assert delivers_another(rig, 70)
