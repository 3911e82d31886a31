"""Times of a wave by the clocks of its answers, and the three metrics made from them.

    serve-throughput     microseconds of the wave for each answered token, all requests together: 1 / throughput
    serve-first-token    from sending a request to its first token, with the connection; the median over requests
    serve-next-token     a token after the first event: (last - first) / tokens after it; the median over requests

Invariants:
- A wave with an incomplete answer has no times: leaving it out would make the wave look faster.
- A server's first token is known if at least half of the answers of each wave came in several events. Engines join
  tokens while a client is not reading, so a few answers in one event do not mean that it does not stream.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcheck.core.base.server_facts import FIRST_TOKEN, NEXT_TOKEN, THROUGHPUT
from kvcheck.core.live.exchange import Answer, End, Exchange

US = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of one wave. span_s: from the first sending to the last token. first_s, next_s: of each streamed request.
    prompt, cached: tokens."""

    span_s: float
    tokens: int
    first_s: tuple[float, ...]
    next_s: tuple[float, ...]
    prompt: int
    cached: int | None

    def plus(self, other: Times) -> Times:
        is_streamed = self.first_s and other.first_s
        return Times(
            span_s=self.span_s + other.span_s,
            tokens=self.tokens + other.tokens,
            first_s=self.first_s + other.first_s if is_streamed else (),
            next_s=self.next_s + other.next_s if is_streamed else (),
            prompt=self.prompt + other.prompt,
            cached=None if self.cached is None or other.cached is None else self.cached + other.cached,
        )

    @property
    def cached_share(self) -> float | None:
        return None if self.cached is None else self.cached / self.prompt


def times_of(wave: Sequence[Exchange], wanted: int) -> Times | None:
    """The times of a wave of `wanted` requests; None unless each was answered to its end."""
    if len(wave) != wanted or not wave or not all(map(_is_whole, wave)):
        return None
    answers = [each.answer for each in wave]
    cached = [answer.cached for answer in answers]
    streamed = [answer for answer in answers if _is_streamed(answer)]
    is_streamed = 2 * len(streamed) >= len(answers) and all(answer.first_s is not None for answer in answers)
    return Times(
        span_s=max(answer.ended_s if answer.last_s is None else answer.last_s for answer in answers)
        - min(answer.began_s for answer in answers),
        tokens=sum(len(answer.tokens) for answer in answers),
        first_s=tuple(map(_first, answers)) if is_streamed else (),
        next_s=tuple(map(_next, streamed)) if is_streamed else (),
        prompt=sum(len(each.sending.question.ids) for each in wave),
        cached=None if None in cached else sum(each or 0 for each in cached),
    )


def _is_whole(exchange: Exchange) -> bool:
    answer = exchange.answer
    return answer.end is End.DONE and len(answer.tokens) == len(exchange.sending.question.expected)


def _is_streamed(answer: Answer) -> bool:
    return answer.first_tokens is not None and answer.first_tokens < len(answer.tokens)


def _first(answer: Answer) -> float:
    assert answer.first_s is not None, "it was streamed"
    return answer.first_s - answer.began_s


def _next(answer: Answer) -> float:
    assert answer.first_s is not None and answer.last_s is not None and answer.first_tokens is not None
    return (answer.last_s - answer.first_s) / (len(answer.tokens) - answer.first_tokens)


def _median(values: Sequence[float]) -> float | None:
    return US * statistics.median(values) if values else None


METRICS: Mapping[str, Callable[[Times], float | None]] = {
    THROUGHPUT: lambda times: US * times.span_s / times.tokens,
    FIRST_TOKEN: lambda times: _median(times.first_s),
    NEXT_TOKEN: lambda times: _median(times.next_s),
}
"""Case of the record -> its microseconds; None if unknown."""
