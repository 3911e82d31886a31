"""Parses a server's JSON, field by field, and collects it in a reply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.live.exchange import Tier
from kvcheck.core.live.http import one_line

MOST = 1 << 53  # of a count: exact in every JSON parser


class Unreadable(Exception):
    """The answer is not in the engine's format. The text names the field, expected, and got."""


def table(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    return value


def table_or_none(value: object, name: str) -> Mapping[str, object] | None:
    return None if value is None else table(value, name)


def rows(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise _wrong(name, "a list", value)
    return value


def count(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise _wrong(name, "an integer from 0 on", value)
    return value


def count_or_none(value: object, name: str) -> int | None:
    return None if value is None else count(value, name)


def counts(value: object, name: str) -> list[int]:
    return [count(each, f"{name}[{i}]") for i, each in enumerate(rows(value, name))]


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return one_line(value)


def text_or_none(value: object, name: str) -> str | None:
    return None if value is None else text(value, name)


def logprob(value: object, name: str) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float):
        raise _wrong(name, "a number", value)
    assert isinstance(value, int | float)
    try:
        number = float(value)
    except OverflowError as error:
        raise _wrong(name, "a number", value) from error
    return number if math.isfinite(number) else None


def facts(info: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in names:
        value = info.get(name)
        if isinstance(value, str):
            found[name] = one_line(value)
        elif isinstance(value, bool | int | float) and abs(value) <= MOST:
            found[name] = value
    return found


def _wrong(name: str, expected: str, value: object) -> Unreadable:
    if value is None:
        got = "null"
    elif isinstance(value, str):
        got = f"a text ({one_line(value, 40)!r})"
    elif isinstance(value, list | dict):
        got = "a list" if isinstance(value, list) else "an object"
    elif isinstance(value, int) and abs(value) > MOST:
        got = f"an integer of {value.bit_length()} bits"
    else:
        got = repr(value)
    return Unreadable(f"{name}: expected {expected}, got {got}")


@dataclass(slots=True, kw_only=True)
class PartialAnswer:
    """The parts of one answer that have arrived; fields as in Answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[Mapping[int, float] | None] = field(default_factory=list)
    cached: int | None = None
    cached_by: dict[Tier, int] | None = None
    retractions: int | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    rid: str | None = None
    is_aborted: bool = False
    error: str | None = None
    first_s: float | None = None
    last_s: float | None = None
    first_tokens: int | None = None

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None] | None,
        top: Sequence[Mapping[int, float]] | None = None,
    ) -> None:
        for name, each in (("logprobs", logprobs), ("top logprobs", top)):
            if each is not None and len(each) != len(tokens):
                raise Unreadable(f"{name}: expected one for each of {len(tokens)} tokens, got {len(each)}")
        self.tokens += tokens
        self.logprobs += [None] * len(tokens) if logprobs is None else logprobs
        self.top += [None] * len(tokens) if top is None else top

    def note_time(self, before: int, now_s: float) -> None:
        if len(self.tokens) == before:
            return
        if self.first_s is None:
            self.first_s = now_s
        if self.first_s == now_s:
            self.first_tokens = len(self.tokens)
        self.last_s = now_s

    def known_logprobs(self) -> tuple[float, ...] | None:
        known = [each for each in self.logprobs if each is not None]
        return tuple(known) if known and len(known) == len(self.tokens) else None

    def known_top(self) -> tuple[Mapping[int, float], ...] | None:
        known = [each for each in self.top if each is not None]
        return tuple(known) if known and len(known) == len(self.tokens) else None
