"""The arms of a round: what is sent cold, under the same load, with the same shapes, and as the scenario says.

    cold      one request after the other, each under a salt of its own: the reference
    again     the same once more
    control   as many at a time as the scenario, each under a salt of its own
    treated   the scenario itself
    matched   as many at a time, under a salt of its own and with the hit that the treated request had: the tokens that
              were cached are computed just before, those of an earlier answer by answering it. Of a request that was
              retracted, a part of its answer is computed as part of its prompt

A request that the scenario sends twice has two matched ones. So has one that may have been retracted: with a cut, and
without.

Invariants:
- A salt is used for one request and what is computed for it beforehand, and never again.
- Each answer of an arm is of the very tokens that the scenario sends, whatever was sent before it.
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
from kvcheck.core.live.judge.sent import longest_shared, packed
from kvcheck.core.live.own.deviation import Deviation, deviation
from kvcheck.core.live.own.prompts import BLOCK, Span
from kvcheck.core.live.own.statistic import GIVE_UP, MOST_SUSPECTS, REPEATS, Repeats, is_wide
from kvcheck.core.live.scenarios.scenario import Order, Round, Wave
from kvcheck.core.live.sending import Asked, new_rid

TOP = 5
"""Log-probabilities of each step beside the answered token's: what every engine gives without a further flag."""


class Tallied:
    """The server, with all that it has answered since its counters were read."""

    def __init__(self, client: Client) -> None:
        self._client, self._lock = client, threading.Lock()
        self._totals: AnswerTotals | None = None

    def begin(self) -> None:
        """Count from here on, unless it does already."""
        counters = None if self._totals is not None else read_counters(self._client)[0]
        if counters is not None:
            self._totals = AnswerTotals(before=counters)

    def compare(self, ask_new: Callable[[], Sequence[Exchange]], sleep: Callable[[float], None]) -> CounterCheck:
        """All answers beside the engine's counters, where it has some, as the function does; then none is counted."""
        after, totals, self._totals = read_counters(self._client)[0], self._totals, None
        if after is None or totals is None:
            return CounterCheck()
        return compare(self._client, totals, after, ask_new=ask_new, sleep=sleep)

    def ask(self, sending: Sending) -> Answer:
        """Its answer."""
        answer = self._client.ask(sending)
        with self._lock:
            if self._totals is not None:
                self._totals.add([Exchange(sending, answer)])
        return answer

    def retract(self) -> None:
        """As the client does."""
        self._client.retract()


@dataclass(frozen=True, slots=True)
class Cold:
    """Each request under a salt of its own."""

    client: Asked

    def ask(self, sending: Sending) -> Answer:
        """Its answer, with nothing reused."""
        return self.client.ask(dataclasses.replace(sending, salt=new_salt(), top=TOP))

    def retract(self) -> None:
        """Never asked for: the arms that are no scenario force nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a treated request was computed. cached: tokens that it hit. turns: where it repeats earlier answers, which
    were computed one token at a time. resumed: it was retracted on its way."""

    cached: int
    turns: tuple[Span, ...] = ()
    resumed: bool = False


class Matched:
    """Each request with the shapes of the treated one and pages of its own.

    shapes: by request, one for each time that it is asked. references: cold answers, by request.
    """

    def __init__(self, client: Asked, shapes: Mapping[int, Sequence[Shape]], references: Mapping[int, Answer]) -> None:
        self._client, self._references = client, references
        self._left = {number: deque(each) for number, each in shapes.items()}

    def ask(self, sending: Sending) -> Answer:
        """Its answer after what it hits was computed; of a request that was retracted, with a part of its reference
        answer as part of the prompt."""
        question = sending.question
        shape = self._left[question.number].popleft()
        if shape.resumed and (part := self._part(question)):
            return self._resumed(sending, part)
        return ask_fresh(self._client, sending, cached=shape.cached, turns=shape.turns)

    def retract(self) -> None:
        """Never asked for."""

    def _part(self, question: Question) -> int:
        """Tokens of the answer that are computed as part of the prompt: drawn, as a retraction comes anywhere."""
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
    """The scenario itself. An answer that is far from its reference is asked again at once, while its pages are there.

    noise: deviations of controls so far. turns: of a request, by its number: as in Shape.
    """

    def __init__(
        self,
        client: Asked,
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
        """Its answer, with whatever the server has in its cache."""
        answer = self._client.ask(dataclasses.replace(sending, top=TOP))
        number = sending.question.number
        found = deviation(self._references[number], answer) if number in self._references else None
        if found is not None and is_wide(found.largest, self._noise) and self._claims(number):
            repeats = self._again(sending.question, found)
            with self._lock:
                self.repeats[number] = repeats
        return answer

    def retract(self) -> None:
        """As the scenario asks for it."""
        self._client.retract()

    def _claims(self, number: int) -> bool:
        """Whether this request is asked again: the first so many of a round, each once."""
        with self._lock:
            if number in self.repeats or len(self.repeats) >= MOST_SUSPECTS:
                return False
            self.repeats[number] = Repeats((), ())
            return True

    def _again(self, question: Question, found: Deviation) -> Repeats:
        """Ask it warm and as a fresh copy, in turns, as far as the step where it deviated most."""
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
class Arm:
    """What an arm came to. values: deviation by request, of those that could be compared."""

    name: str
    exchanges: list[Exchange] = field(default_factory=list)
    values: dict[int, Deviation] = field(default_factory=dict)

    def add(self, exchanges: Sequence[Exchange], references: Mapping[int, Answer]) -> None:
        """Answers, compared with their references. Of a request with several answers, the largest deviation counts."""
        self.exchanges += exchanges
        for each in exchanges:
            number = each.sending.question.number
            found = deviation(references[number], each.answer) if number in references else None
            before = self.values.get(number)
            if found is not None and (before is None or found.largest > before.largest):
                self.values[number] = found

    @property
    def largest(self) -> list[float]:
        """The deviations of answers that can be a control: those of requests that were retracted are none."""
        return [*self.by_request.values()]

    @property
    def by_request(self) -> dict[int, float]:
        """The same, by request."""
        retracted = {each.sending.question.number for each in self.exchanges if each.answer.retractions}
        return {number: value.largest for number, value in self.values.items() if number not in retracted}

    def to_json(self) -> dict[str, object]:
        """For a record: how many answers, how many of them differ, and by how much."""
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
    """One request after the other."""
    return together(questions, concurrency=1)


def together(questions: Sequence[Question], *, concurrency: int) -> Round:
    """So many at a time, in their order."""
    orders = tuple(Order(question=question) for question in questions)
    return Round((Wave(orders=orders, concurrency=concurrency),) if orders else ())


def ask_fresh(client: Asked, sending: Sending, *, cached: int, turns: Sequence[Span] = ()) -> Answer:
    """The answer under a new salt, after the first `cached` tokens were computed under it.

    turns: as in Shape. The server answers them again, so that decode writes their pages. Where it keeps no such pages,
    or answers otherwise, they are computed as part of a prompt.
    """
    salt, question = new_salt(), sending.question
    # nothing is computed for the last token of an answer
    before = [(first, min(end, cached + 1) - first) for first, end in turns if first < cached]
    for first, count in (*before, *([(cached, 1)] if cached else [])):
        primed = _prime(client, question, salt, first=first, count=count)
        if primed.end is not End.DONE:
            return primed
    return client.ask(dataclasses.replace(sending, salt=salt, top=TOP))


def _prime(client: Asked, question: Question, salt: str, *, first: int, count: int) -> Answer:
    """Compute the first tokens of a request under a salt, and so many of the answer to them."""
    before = Question(number=question.number, ids=question.ids[:first], expected=question.expected[:1] * count)
    return client.ask(Sending(question=before, rid=new_rid(), salt=salt))


def hits_of(exchanges: Sequence[Exchange], *, page: int) -> list[int]:
    """Of each request, in the order of their answers, the tokens that it hit: as the engine says it, or what a prefix
    cache of whole pages has for it."""
    held: list[bytes] = []
    hits = []
    for each in exchanges:
        ids = each.sending.question.ids
        likely = min(longest_shared(packed(ids), held), len(ids) - 1) // page * page
        hits.append(likely if each.answer.cached is None else each.answer.cached)
        insort(held, packed((*ids, *each.answer.tokens)))
    return hits


def page_groups(exchanges: Sequence[Exchange], hits: Sequence[int], *, page: int) -> dict[int, int]:
    """Which requests read pages that another one read or wrote: of each, by number, the least number of its group.

    hits: tokens that each had in the cache. page: of the engine; where it hits less than a page, that counts. Prompts
    that share nothing may begin with the same token by chance: a hit of less than a block groups nobody.
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
    """A salt that no other request has."""
    return f"kvcheck-{secrets.token_hex(8)}"
