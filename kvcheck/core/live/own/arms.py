"""The arms of a round.

    cold      one request after the other, each under a salt of its own: the reference
    again     the same once more
    control   the scenario's concurrency, each under a salt of its own
    treated   the scenario itself
    matched   the scenario's concurrency, under a salt of its own and with the treated request's hit: its cached tokens
              are computed just before, those of an earlier answer by decoding. Of a retracted request, a part of its
              answer is computed as part of its prompt

A request sent twice has two matched ones. So has one that may have been retracted: cut and uncut.

Invariants:
- A salt is used for one request and its preparation, and never again.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.clients.client import Client
from kvcheck.core.live.counting import read_counters
from kvcheck.core.live.doubts import AnswerTotals, CounterCheck, compare
from kvcheck.core.live.exchange import Answer, End, Exchange, Question, Sending
from kvcheck.core.live.judge.steps import longest_shared, packed
from kvcheck.core.live.own.prompts import BLOCK, Span
from kvcheck.core.live.own.statistic import (
    GIVE_UP,
    MOST_SUSPECTS,
    REPEATS,
    LogprobDeviation,
    Repeats,
    deviation,
    is_wide,
)
from kvcheck.core.live.scenarios.scenario import Order, Round, Wave
from kvcheck.core.live.sending import Recipient, new_rid

TOP = 5
"""Log-probabilities of each step beside the answered token's: as many as every engine gives without a flag."""


class Tallied:
    """The server, with totals of its answers since its counters were read."""

    def __init__(self, client: Client) -> None:
        self._client, self._lock = client, threading.Lock()
        self._totals: AnswerTotals | None = None

    def begin(self) -> None:
        counters = None if self._totals is not None else read_counters(self._client)[0]
        if counters is not None:
            self._totals = AnswerTotals(before=counters)

    def compare(self, ask_new: Callable[[], Sequence[Exchange]], sleep: Callable[[float], None]) -> CounterCheck:
        after, totals, self._totals = read_counters(self._client)[0], self._totals, None
        if after is None or totals is None:
            return CounterCheck()
        return compare(self._client, totals, after, ask_new=ask_new, sleep=sleep)

    def ask(self, sending: Sending) -> Answer:
        answer = self._client.ask(sending)
        with self._lock:
            if self._totals is not None:
                self._totals.add([Exchange(sending, answer)])
        return answer

    def retract(self) -> None:
        self._client.retract()


@dataclass(frozen=True, slots=True)
class Cold:
    client: Recipient

    def ask(self, sending: Sending) -> Answer:
        return self.client.ask(dataclasses.replace(sending, salt=new_salt(), top=TOP))

    def retract(self) -> None:
        """Unused: only the scenario forces retractions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """cached: tokens that it hit. turns: spans of earlier answers, which were decoded. resumed: it was retracted."""

    cached: int
    turns: tuple[Span, ...] = ()
    resumed: bool = False


class Matched:
    """shapes: one for each sending of a request. references: cold answers."""

    def __init__(
        self, client: Recipient, shapes: Mapping[int, Sequence[Shape]], references: Mapping[int, Answer]
    ) -> None:
        self._client, self._references = client, references
        self._left = {number: deque(each) for number, each in shapes.items()}

    def ask(self, sending: Sending) -> Answer:
        question = sending.question
        shape = self._left[question.number].popleft()
        if shape.resumed and (part := self._part(question)):
            return self._resumed(sending, part)
        return ask_fresh(self._client, sending, cached=shape.cached, turns=shape.turns)

    def retract(self) -> None:
        """Unused."""

    def _part(self, question: Question) -> int:
        """Tokens of the answer that move to the prompt: drawn, since a retraction comes anywhere."""
        made = len(self._references[question.number].tokens)
        return 1 + Rng(question.number).below(made - 1) if made > 1 else 0

    def _resumed(self, sending: Sending, part: int) -> Answer:
        question, reference = sending.question, self._references[sending.question.number]
        longer = dataclasses.replace(
            question, ids=(*question.ids, *reference.tokens[:part]), expected=question.expected[part:]
        )
        answer = ask_fresh(self._client, dataclasses.replace(sending, question=longer), cached=0)
        if answer.logprobs is None or reference.logprobs is None:
            return answer
        has_top = answer.top is not None and reference.top is not None
        return dataclasses.replace(
            answer,
            tokens=(*reference.tokens[:part], *answer.tokens),
            logprobs=(*reference.logprobs[:part], *answer.logprobs),
            top=(*(reference.top or ())[:part], *(answer.top or ())) if has_top else None,
        )


class Treated:
    """An answer far from its reference is repeated at once, while its pages are there. noise: of controls so far."""

    def __init__(
        self,
        client: Recipient,
        references: Mapping[int, Answer],
        noise: Sequence[float],
        *,
        turns: Callable[[int], tuple[Span, ...]],
        is_over: Callable[[], bool],
    ) -> None:
        self._client, self._references, self._noise, self._is_over = client, references, noise, is_over
        self._turns = turns
        self._lock = threading.Lock()
        self.repeats: dict[int, Repeats] = {}

    def ask(self, sending: Sending) -> Answer:
        answer = self._client.ask(dataclasses.replace(sending, top=TOP))
        number = sending.question.number
        found = deviation(self._references[number], answer) if number in self._references else None
        if found is not None and is_wide(found.largest, self._noise) and self._claims(number):
            repeats = self._again(sending.question, found)
            with self._lock:
                self.repeats[number] = repeats
        return answer

    def retract(self) -> None:
        self._client.retract()

    def _claims(self, number: int) -> bool:
        with self._lock:
            if number in self.repeats or len(self.repeats) >= MOST_SUSPECTS:
                return False
            self.repeats[number] = Repeats((), ())
            return True

    def _again(self, question: Question, found: LogprobDeviation) -> Repeats:
        reference, steps = self._references[question.number], found.step + 1
        short = dataclasses.replace(question, expected=question.expected[:steps])
        warm: list[float] = []
        fresh: list[float] = []
        for turn in range(REPEATS):
            if self._is_over() or (turn == GIVE_UP and not any(value > found.largest / 2 for value in warm)):
                break
            answers = [self._client.ask(Sending(question=short, rid=new_rid(), top=TOP))]
            hit = answers[0].cached if answers[0].cached is not None else len(question.ids) - 1
            copy = Sending(question=short, rid=new_rid(), top=TOP)
            answers.append(ask_fresh(self._client, copy, cached=hit, turns=self._turns(question.number)))
            values = [deviation(reference, answer, most=steps) for answer in answers]
            if values[0] is None or values[1] is None:
                break
            warm.append(values[0].largest)
            fresh.append(values[1].largest)
        return Repeats(tuple(warm), tuple(fresh))


@dataclass(slots=True, kw_only=True)
class ArmResult:
    name: str
    exchanges: list[Exchange] = field(default_factory=list)
    values: dict[int, LogprobDeviation] = field(default_factory=dict)

    def add(self, exchanges: Sequence[Exchange], references: Mapping[int, Answer]) -> None:
        """Of several answers to a request, the largest deviation counts."""
        self.exchanges += exchanges
        for each in exchanges:
            number = each.sending.question.number
            found = deviation(references[number], each.answer) if number in references else None
            before = self.values.get(number)
            if found is not None and (before is None or found.largest > before.largest):
                self.values[number] = found

    @property
    def largest(self) -> list[float]:
        return [*self.by_request.values()]

    @property
    def by_request(self) -> dict[int, float]:
        retracted = {each.sending.question.number for each in self.exchanges if each.answer.retractions}
        return {number: value.largest for number, value in self.values.items() if number not in retracted}

    def to_json(self) -> dict[str, object]:
        found = [*self.values.values()]
        cached = [each.answer.cached for each in self.exchanges if each.answer.cached is not None]
        return {
            "arm": self.name,
            "requests": len(self.exchanges),
            "tokens": sum(len(each.answer.tokens) for each in self.exchanges),
            "cached": sum(cached) if cached else None,
            "compared": len(found),
            "other": sum(not each.is_none for each in found),
            "flips": sum(each.flip is not None for each in found),
            "largest": max((each.largest for each in found), default=None),
        }


def alone(questions: Sequence[Question]) -> Round:
    return together(questions, concurrency=1)


def together(questions: Sequence[Question], *, concurrency: int) -> Round:
    orders = tuple(Order(question=question) for question in questions)
    return Round((Wave(orders=orders, concurrency=concurrency),) if orders else ())


def ask_fresh(client: Recipient, sending: Sending, *, cached: int, turns: Sequence[Span] = ()) -> Answer:
    """Send a request under a new salt, after its first `cached` tokens were computed under it.

    turns: as in Shape: decoded again, so that decode writes their pages. If the server keeps no such pages, or answers
    otherwise, they are computed as part of a prompt.
    """
    salt, question = new_salt(), sending.question
    # nothing is computed for the last token of an answer
    before = [(first, min(end, cached + 1) - first) for first, end in turns if first < cached]
    for first, count in (*before, *([(cached, 1)] if cached else [])):
        primed = _prime(client, question, salt, first=first, count=count)
        if primed.end is not End.DONE:
            return primed
    return client.ask(dataclasses.replace(sending, salt=salt, top=TOP))


def _prime(client: Recipient, question: Question, salt: str, *, first: int, count: int) -> Answer:
    before = Question(number=question.number, ids=question.ids[:first], expected=question.expected[:1] * count)
    return client.ask(Sending(question=before, rid=new_rid(), salt=salt))


def hits_of(exchanges: Sequence[Exchange], *, page: int) -> list[int]:
    """Tokens that each request hit: as reported, or as a prefix cache of whole pages would."""
    held: list[bytes] = []
    hits = []
    for each in exchanges:
        ids = each.sending.question.ids
        likely = min(longest_shared(packed(ids), held), len(ids) - 1) // page * page
        hits.append(likely if each.answer.cached is None else each.answer.cached)
        insort(held, packed((*ids, *each.answer.tokens)))
    return hits


def page_groups(exchanges: Sequence[Exchange], hits: Sequence[int], *, page: int) -> dict[int, int]:
    """Group requests that read pages which another one read or wrote: number -> least number of its group.

    A hit of less than a block groups no requests: unrelated prompts may begin with the same token by chance.
    """
    least = min([max(page, BLOCK), *(hit for hit in hits if hit >= BLOCK)])
    begins: dict[bytes, set[int]] = {}
    read: set[bytes] = set()
    for each, hit in zip(exchanges, hits, strict=True):
        key = packed((*each.sending.question.ids, *each.answer.tokens)[:least])
        begins.setdefault(key, set()).add(each.sending.question.number)
        if hit >= least:
            read.add(key)
    return {number: min(begins[key]) for key in read for number in begins[key]}


def new_salt() -> str:
    return f"kvcheck-{secrets.token_hex(8)}"
