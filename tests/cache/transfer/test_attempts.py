"""Attempts: a room that failed is asked for again, and neither end nor oracle takes one attempt for the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cache.transfer.test_sender import ROOM, ask, hand_over, want
from rigs.pair import PATIENCE, SENDER_PATIENCE, Rig

from kvcheck.core.base.errors import ForeignAccess
from kvcheck.core.cache.events import Event
from kvcheck.core.cache.transfer import sender
from kvcheck.core.cache.transfer.messages import Abort, Done, Drained, Message, Status
from kvcheck.core.cache.transfer.receiver import SUCCESS
from kvcheck.core.cache.transfer.sender import DONE, PENDING, REFUSED, UNWANTED, WANTED
from kvcheck.core.cache.transfer.sender import FAILED as SENDER_FAILED
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.contract import ContractOracle
from kvcheck.core.stress.oracles.liveness import LivenessOracle
from kvcheck.core.stress.workload.events import Expected, Failed, Finished, Forward, Retried


def test_a_room_that_has_arrived_here_and_failed_elsewhere_is_ended_with_the_reason() -> None:
    rig = Rig()
    rig.expect(ROOM, 9)
    rig.prefill_room(ROOM, 9)
    rig.poll()
    assert rig.rooms[ROOM].status == SUCCESS
    rig.receiver.fail(rig.rooms[ROOM], "another rank failed")
    assert rig.rooms[ROOM].status == SUCCESS, "what this rank has seen stays true"
    rig.poll(2)
    assert rig.sender.state(ROOM) == SENDER_FAILED and rig.sender.reason(ROOM) == "another rank failed"
    assert rig.receiver.is_drained(rig.rooms[ROOM])


def test_an_attempt_begins_when_the_one_before_has_given_its_memory_back() -> None:
    rig = Rig()
    first = rig.expect(ROOM, 9)
    with pytest.raises(ForeignAccess, match="an earlier attempt is not over, got attempt 1"):
        rig.receiver.expect(ROOM, first.holding, 9, first.slot, attempt=1)
    rig.receiver.fail(rig.rooms[ROOM], "once")
    rig.poll()
    rig.receiver.forget(rig.rooms[ROOM])
    rig.sender.open(ROOM, 1, 9)
    assert rig.sender.reason(ROOM) == "once"
    rig.sender.close(ROOM)
    while rig.decode.metadata.lease(1) != first.slot:
        assert rig.decode.metadata.slots.available, "the slot was given back"
    rig.rooms[ROOM] = rig.receiver.expect(ROOM, first.holding, 9, first.slot, attempt=1)
    rig.sender.open(ROOM, 1, 9, attempt=1)
    sent = rig.begin_opened(ROOM, 9)
    rig.sender.send_pages(ROOM, 9, rig.done())
    rig.finish(sent)
    rig.poll()
    assert rig.rooms[ROOM].status == SUCCESS and rig.differs(sent, first) == []


def test_attempts_of_one_room_know_nothing_of_each_other() -> None:
    rig = Rig()
    rig.sender.open(ROOM, 1, 7)
    assert ask(rig, want(), want(attempt=1, generation=5)) == [], "the second is kept until it is opened"
    with pytest.raises(ForeignAccess, match="attempt 0 is not over, got attempt 1"):
        rig.sender.open(ROOM, 1, 7, attempt=1)
    ask(rig, Abort(room=ROOM, attempt=0, generation=4, reason="first"))
    assert rig.sender.reason(ROOM) == "first" and rig.sender.is_open(ROOM)
    rig.sender.close(ROOM)
    rig.sender.open(ROOM, 1, 7, attempt=1)
    assert rig.sender.readiness(ROOM) == WANTED and rig.sender.reason(ROOM) == ""
    assert ask(rig, Abort(room=ROOM, attempt=0, generation=4, reason="again")) == [Drained(room=ROOM, generation=4)]
    ask(rig, Done(room=ROOM, generation=4, is_ok=True))
    assert (rig.sender.readiness(ROOM), rig.sender.state(ROOM)) == (WANTED, PENDING)
    late = want(generation=6, slot=3)
    assert [type(each) for each in ask(rig, late)] == [Status, Drained], "the first attempt is over for good"
    assert rig.sender._wants.of(ROOM, 1)["decode-0"] == want(attempt=1, generation=5)


def test_an_attempt_that_ends_before_the_one_ahead_of_it_stays_over() -> None:
    """Its peer has asked, given up and been answered: it says nothing more, and nothing else would end it."""
    rig = Rig()
    rig.sender.open(ROOM, 1, 7)
    ask(rig, want(), Abort(room=ROOM, attempt=0, generation=4, reason="first"))
    ask(rig, want(attempt=1, generation=5), Abort(room=ROOM, attempt=1, generation=5, reason="second"))
    rig.sender.close(ROOM)
    rig.sender.open(ROOM, 1, 7, attempt=1)
    assert (rig.sender.readiness(ROOM), rig.sender.reason(ROOM)) == (REFUSED, "second")


def test_a_copy_of_an_old_want_makes_nobody_write() -> None:
    """It names pages that are somebody else's by now."""
    rig = Rig()
    hand_over(rig)
    ask(rig, Done(room=ROOM, generation=4, is_ok=True))
    rig.sender.close(ROOM)
    rig.sender.open(ROOM, 1, 7)
    assert (rig.sender.readiness(ROOM), rig.sender.reason(ROOM)) == (REFUSED, "it was served before")
    rig.sender.close(ROOM)
    rig.sender.open(ROOM, 1, 7, attempt=1)
    assert ask(rig, want(), want(attempt=1)) == []
    assert rig.sender.readiness(ROOM) == UNWANTED, "a number that was heard before is a copy, whatever it says"


def test_what_failed_first_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "ENDED_MAX", 2)
    rig = Rig()
    for room in (1, 2, 3):
        rig.sender.open(room, room, 7)
        rig.sender.fail(room, "broken")
        rig.sender.close(room)
    assert list(rig.sender._wants._ended) == [2, 3]
    assert ask(rig, want(room=1)) == [] and len(ask(rig, want(room=2, generation=5))) == 2


def codes(oracle: type, events: Sequence[Event]) -> list[str]:
    judge, history = oracle(), History()
    history.listen(judge.handlers())
    for event in events:
        history.emit(event)
    judge.finish()
    return [found.code for found in judge.findings]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ((Expected(1, ()), Failed(1, "x"), Retried(1), Finished(1, (4,))), []),
        ((Expected(1, ()), Failed(1, "x")), []),
        ((Expected(1, ()), Failed(1, "x"), Retried(1)), ["KV901"]),
    ],
)
def test_a_request_that_is_sent_again_has_to_end_again(events: tuple[Event, ...], found: list[str]) -> None:
    assert codes(LivenessOracle, events) == found


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (((0, 4), (4, 8), "again", (0, 4), (4, 8)), []),
        (((0, 4), "again", (4, 8), (0, 4)), []),  # the first attempt goes on until it hears of its end
        (((0, 4), (4, 8), (0, 4)), ["KV301"]),
        (((0, 4), (4, 8), "again", (0, 4), (0, 4)), ["KV301"]),
        (((0, 4), (4, 8), "again", (2, 4)), ["KV301"]),
        (((7, 8), (8, 9), "again", (7, 8), (8, 9)), []),
        (((7, 8), (8, 9), "again", (0, 8)), ["KV301"]),
    ],
)
def test_an_attempt_starts_where_the_first_one_did(steps: Sequence[tuple[int, int] | str], found: list[str]) -> None:
    events = [Retried(1) if isinstance(each, str) else Forward(1, *each) for each in steps]
    assert codes(ContractOracle, events) == found


@pytest.mark.parametrize("lost", [Done, Drained, Abort])
def test_an_answer_that_is_lost_is_given_again(lost: type[Message]) -> None:
    rig, dropped = Rig(), list[Message]()

    def copies(sender: str, peer: str, message: Message) -> int:
        if isinstance(message, lost) and len(dropped) < (2 if lost is Drained else 1):  # it is said twice
            dropped.append(message)
            return 0
        return 1

    rig.fabric.copies = copies
    rig.expect(ROOM, 9)
    rig.prefill_room(ROOM, 9)
    rig.poll()
    assert rig.rooms[ROOM].status == SUCCESS
    if lost is Done:
        rig.receiver.take(rig.rooms[ROOM])
        rig.poll()
        assert rig.sender.state(ROOM) == PENDING and dropped
        rig.poll(SENDER_PATIENCE // 3 + 1)
        assert rig.sender.state(ROOM) == DONE
        return
    rig.receiver.fail(rig.rooms[ROOM], "elsewhere")
    rig.poll(2)
    assert not rig.receiver.is_drained(rig.rooms[ROOM]) and dropped, "a room that has arrived is held like any other"
    rig.poll(PATIENCE + 2)
    assert rig.receiver.is_drained(rig.rooms[ROOM]) and rig.sender.state(ROOM) == SENDER_FAILED
