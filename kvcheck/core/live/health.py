"""Whether a server died, hung, or was only busy while a round ran.

Invariants:
- A hang needs an idle server: a request that waits while others are answered is no finding.
- A death needs several failed health calls after earlier answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding
from kvcheck.core.live.clients.client import Client
from kvcheck.core.live.exchange import End, Exchange

CODE = "KV806"
ORACLE = "known-answers"
TRIES = 5
PAUSE_S = 1.0


def judge_health(
    client: Client, exchanges: Sequence[Exchange], *, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Findings of a server that no longer answers, and reasons if that is unclear."""
    lost = [each for each in exchanges if each.answer.end in (End.SILENT, End.UNREACHED, End.CUT)]
    if not lost:
        return (), ()
    first = min(lost, key=lambda each: each.answer.ended_s)
    number = first.sending.question.number
    if not _is_alive(client, sleep):
        why = first.answer.reason or first.answer.end.value
        text = (
            "the server takes no connection any more, or answers its health call with an error; request "
            f"{number} was the first without an answer ({why})"
        )
        return (_finding(number, text),), ()
    silent = [each for each in lost if each.answer.end is End.SILENT]
    hung = [each for each in silent if _idle_s(each, exchanges) >= timeout_s / 2]
    if hung:
        number = hung[0].sending.question.number
        others = f" and {len(hung) - 1} more" if len(hung) > 1 else ""
        idle_s = _idle_s(hung[0], exchanges)
        text = (
            f"request {number}{others} got no answer in {timeout_s:g} s, in the last {idle_s:.0f} s of which no other "
            "request was being answered; a server that is only slow needs a larger --timeout"
        )
        return (_finding(number, text),), ()
    reasons = []
    if silent:
        reasons.append(
            f"{counted(len(silent), 'request')} got no answer in {timeout_s:g} s while others were answered: use a "
            "smaller --concurrency or a larger --timeout"
        )
    if unreached := [each for each in lost if each.answer.end is End.UNREACHED]:
        reasons.append(
            f"{counted(len(unreached), 'request')} found no connection, and the server is up: "
            f"{unreached[0].answer.reason}"
        )
    return (), tuple(reasons)


def _is_alive(client: Client, sleep: Callable[[float], None]) -> bool:
    for attempt in range(TRIES):
        if attempt:
            sleep(PAUSE_S)
        if client.is_alive():
            return True
    return False


def _idle_s(waiting: Exchange, exchanges: Sequence[Exchange]) -> float:
    given_up = waiting.answer.ended_s
    answered = [
        each.answer.ended_s
        for each in exchanges
        if each.answer.end in (End.DONE, End.ABORTED, End.REFUSED) and each.answer.ended_s <= given_up
    ]
    later = any(
        each.answer.began_s < given_up < each.answer.ended_s
        for each in exchanges
        if each.answer.end in (End.DONE, End.ABORTED)
    )
    return 0.0 if later else given_up - max([waiting.answer.began_s, *answered])


def _finding(request: int, message: str) -> Finding:
    return Finding(code=CODE, oracle=ORACLE, request=request, message=message)
