"""Rounds are sent in waves: aborts with their retries, retractions on demand, a time that is up, and an interrupt."""

from __future__ import annotations

import threading
import time

import pytest
from rigs.live_client import ALPHABET, ScriptedClient, right

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import AbortRequest, Answer, End, Sending
from kvcheck.core.live.questions import Questions
from kvcheck.core.live.scenarios.scenario import Order, Round, Wave
from kvcheck.core.live.sending import RequestSender


def orders(count: int, **fields: object) -> tuple[Order, ...]:
    asked, rng = Questions(ALPHABET, longest=512, names=1), Rng(1)
    return tuple(Order(question=asked.put(rng, asked.walk(rng, 30), 8), **fields) for _ in range(count))  # type: ignore[arg-type]


def round_of(*sizes: int, concurrency: int = 4, retractions: int = 0) -> Round:
    waves = [Wave(orders=orders(size), concurrency=concurrency, retractions=retractions) for size in sizes]
    return Round(tuple(waves))


def sender(client: ScriptedClient, *, may_force: bool = True, until: float | None = None) -> RequestSender:
    return RequestSender(client, gap_s=0.0, may_force=may_force, until=until)


def slow(sending: Sending) -> Answer:
    time.sleep(0.05)
    return right(sending)


def test_every_order_is_answered_and_told() -> None:
    client, told = ScriptedClient(), list[int]()
    sent = sender(client).send(round_of(5, 3), told.append)
    assert sent.is_whole and told == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [each.answer.end for each in sent.exchanges] == [End.DONE] * 8
    assert len({each.sending.rid for each in sent.exchanges}) == 8


def test_a_wave_begins_when_the_one_before_is_answered() -> None:
    running, seen, lock = set[str](), list[int](), threading.Lock()

    def answer(sending: Sending) -> Answer:
        with lock:
            running.add(sending.rid)
            seen.append(len(running))
        time.sleep(0.02)
        with lock:
            running.discard(sending.rid)
        return right(sending)

    sender(ScriptedClient(answer)).send(round_of(1, 6, 1, concurrency=3))
    assert seen[0] == seen[-1] == 1 < max(seen) <= 3


def test_an_aborted_request_is_sent_again_under_another_name() -> None:
    client = ScriptedClient()
    wave = Wave(orders=orders(1, abort=AbortRequest(after=2), retries=True), concurrency=1)
    first, second = sender(client).send(Round((wave,))).exchanges
    assert (first.answer.end, second.answer.end) == (End.ABORTED, End.DONE)
    assert first.sending.rid != second.sending.rid and second.sending.abort is None
    assert second.answer.tokens == first.sending.question.expected


def test_a_request_that_was_done_before_its_abort_is_not_sent_again() -> None:
    client = ScriptedClient(lambda sending: right(sending, end=End.DONE, tokens=sending.question.expected))
    wave = Wave(orders=orders(1, abort=AbortRequest(after=2), retries=True), concurrency=1)
    assert len(sender(client).send(Round((wave,))).exchanges) == 1


def test_retractions_are_asked_for_while_something_runs() -> None:
    client = ScriptedClient(slow)
    sent = sender(client).send(round_of(12, retractions=2))
    assert client.retractions == sent.forced == 2


def test_no_retraction_is_asked_for_without_leave_or_where_nothing_runs() -> None:
    client = ScriptedClient(slow)
    sender(client, may_force=False).send(round_of(8, retractions=2))
    sender(client).send(round_of(1, retractions=2))
    assert client.retractions == 0


def test_a_retraction_that_fails_is_told_and_ends_nothing() -> None:
    client = ScriptedClient(slow, may_retract=False)
    sent = sender(client).send(round_of(12, retractions=2))
    assert sent.is_whole and sent.troubles == ["POST /retract: 404 not found"] * 2


def test_no_request_begins_when_the_time_is_up() -> None:
    sent = sender(ScriptedClient(), until=time.monotonic() - 1).send(round_of(4))
    assert not sent.is_whole and sent.exchanges == []


def test_an_interrupt_keeps_what_was_answered_and_waits_for_nobody() -> None:
    held = threading.Event()

    def answer(sending: Sending) -> Answer:
        if sending.question.number == 3:
            held.wait(30)
        return right(sending)

    def told(answered: int) -> None:
        if answered == 3:
            raise KeyboardInterrupt

    asking = sender(ScriptedClient(answer))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asking.send(round_of(4, concurrency=4), told)
    assert time.monotonic() - began < 20
    assert len(asking.interrupted.exchanges) == 3
    held.set()


def test_an_error_of_this_machine_ends_the_run() -> None:
    def answer(sending: Sending) -> Answer:
        raise OSError(24, "Too many open files")

    with pytest.raises(OSError, match="Too many open files"):
        sender(ScriptedClient(answer)).send(round_of(2))
