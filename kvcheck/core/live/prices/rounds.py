"""Rounds of two arms and a control: their order, and the rows of the record.

A round runs the baseline, the baseline again as the control, and the arm, in a drawn order and then backwards, so a
server that slows down costs each of them as much. An arm's result in a round combines both passes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.record import BenchRow
from kvcheck.core.base.rng import Rng
from kvcheck.core.base.rounds import NOISY_FLOOR, floor_of, half_width, interval, ratio_interval
from kvcheck.core.base.server_facts import FIRST_TOKEN, NEXT_TOKEN, THROUGHPUT
from kvcheck.core.live.exchange import Answer, End, Exchange

US = 1e6
CONTROL = "control"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison. device: engines. shape: the model. size: the load."""

    arm: str
    baseline: str
    size: str
    shape: str
    device: str


def order_of_passes(arms: Sequence[str], *, seed: int, number: int) -> tuple[str, ...]:
    rng = Rng(seed * 1_000_003 + number)
    left, drawn = list(arms), list[str]()
    while left:
        drawn.append(left.pop(rng.below(len(left))))
    return (*drawn, *reversed(drawn))


@dataclass(slots=True)
class TimedRounds:
    compared: Compared
    times: list[Mapping[str, Times]] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.compared.baseline, CONTROL, self.compared.arm)

    def add(self, passes: Mapping[str, Sequence[Times]]) -> None:
        made: dict[str, Times] = {}
        for name in self.names:
            first, *others = passes[name]
            for each in others:
                first = first.plus(each)
            made[name] = first
        self.times.append(made)

    def is_precise(self, precision: float) -> bool:
        widths = [half_width(row.ratio) for row in self.rows()]
        return bool(widths) and all(width is not None and width <= precision for width in widths)

    def rows(self, why_none: str | None = None) -> list[BenchRow]:
        return [row for case in METRICS if (row := self._row(case, why_none)) is not None]

    def _row(self, case: str, why_none: str | None) -> BenchRow | None:
        arm, baseline = self.compared.arm, self.compared.baseline
        us = {name: [METRICS[case](each[name]) for each in self.times] for name in self.names}
        if not self.times or not all(value is not None and value > 0 for each in us.values() for value in each):
            return None
        known = {name: [value for value in each if value is not None] for name, each in us.items()}
        logs = _logs(known[arm], known[baseline])
        floor = floor_of(_logs(known[CONTROL], known[baseline]))
        status = "noisy" if floor > NOISY_FLOOR else "ok"
        return BenchRow(
            case=case,
            arm=arm,
            baseline=baseline,
            size=self.compared.size,
            shape=self.compared.shape,
            device=self.compared.device,
            bytes=None,
            us=interval(known[arm]),
            baseline_us=interval(known[baseline]),
            ratio=ratio_interval(logs),
            floor=floor,
            ratios=tuple(math.exp(each) for each in logs),
            status=status if why_none is None else "unknown",
            note=self._note(case, known) if why_none is None else why_none,
        )

    def _note(self, case: str, us: Mapping[str, Sequence[float]]) -> str | None:
        pair = (self.compared.arm, self.compared.baseline)
        if case == THROUGHPUT:
            return ", ".join(f"{name} {_number(1e6 / interval(us[name]).est)} tokens/s" for name in pair)
        if case == FIRST_TOKEN:
            shares = [self._cached(name) for name in pair]
            told = [f"{name} {share:.0%}" for name, share in zip(pair, shares, strict=True) if share is not None]
            return f"cached of the prompts: {', '.join(told)}" if told else "the server does not say what was cached"
        return None

    def _cached(self, name: str) -> float | None:
        total = self.times[0][name]
        for each in self.times[1:]:
            total = total.plus(each[name])
        return total.cached_share

    def cached_share(self, name: str) -> float | None:
        return self._cached(name) if self.times else None


def _logs(arm: Sequence[float], baseline: Sequence[float]) -> list[float]:
    return [math.log(one / other) for one, other in zip(arm, baseline, strict=True)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
