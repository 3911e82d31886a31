"""LineCodec: a plan as one line of text, HEAD:key=value,key=value, and back.

    retract-resume:shape=glm-5.1-tiny,seed=1,schedule=3

Invariants:
- The line holds no character that a shell changes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Generic, TypeVar
from urllib.parse import quote, unquote

from kvcheck.core.base.errors import UsageError

MAX_DIGITS = 20
SIGNED = "seed"
"""The only number that may be negative."""
_BROKEN_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")

P = TypeVar("P")


class LineCodec(Generic[P]):
    """Encodes and decodes the plans of one frozen dataclass of texts and whole numbers.

    plan: its first field is the head of a line, behind `prefix`. always: keys written also with their defaults. joint:
    replaces the "_" of a field in its key. safe: unescaped characters, beside letters, digits and "_.-~".
    """

    def __init__(
        self,
        plan: Callable[..., P],
        *,
        noun: str,
        prefix: str = "",
        always: tuple[str, ...] = (),
        needs: tuple[str, ...] = (),
        hidden: tuple[str, ...] = (),
        joint: str = "_",
        safe: str = "/",
    ) -> None:
        head, *others = dataclasses.fields(plan)  # type: ignore[arg-type]
        self._plan, self._noun, self._prefix, self._head, self._safe = plan, noun, prefix, head.name, safe
        self._fields = {each.name.replace("_", joint): each for each in others if each.name not in hidden}
        self._filled = [key for key, each in self._fields.items() if each.default is dataclasses.MISSING]
        self._numbers = {key for key, each in self._fields.items() if "int" in str(each.type)}
        self._always, self._needs = always, (*needs, *self._filled)

    def encode(self, plan: P) -> str:
        values = ((key, getattr(plan, each.name), each.default) for key, each in self._fields.items())
        pairs = [
            f"{key}={quote(str(value), safe=self._safe, errors='surrogateescape')}"
            for key, value, default in values
            if value != default or key in self._always
        ]
        return f"{self._prefix}{getattr(plan, self._head)}:{','.join(pairs)}"

    def decode(self, line: str) -> P:
        head, colon, rest = line.strip().partition(":")
        if not colon or not head:
            raise self._error(f"expected {self._head.upper()}:key=value,..., got {line[:80]!r}")
        texts: dict[str, str] = {}
        for pair in rest.split(","):
            key, equals, text = pair.partition("=")
            if not equals or key not in self._fields:
                raise self._error(f"expected one of {', '.join(sorted(self._fields))} as key=value, got {pair[:80]!r}")
            if key in texts:
                raise self._error(f"expected each key once, got {key} twice")
            if _BROKEN_ESCAPE.search(text):
                raise self._error(f"expected %XX escapes in {key}, got {text[:80]!r}; copy the whole line")
            texts[key] = unquote(text, errors="surrogateescape")
        for key in self._needs:
            if key not in texts or (key in self._filled and not texts[key]):
                raise self._error(f"expected {key}=..., found none")
        values = {self._fields[key].name: self._value(key, text) for key, text in texts.items()}
        return self._plan(**{self._head: head.removeprefix(self._prefix)}, **values)

    def _value(self, key: str, text: str) -> str | int:
        if key not in self._numbers:
            return text
        digits = text.removeprefix("-") if key == SIGNED else text
        if digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS:
            return int(text)
        sign = "" if key == SIGNED else ", not negative"
        raise self._error(f"{key} must be an integer, got {text[:40]!r} (at most {MAX_DIGITS} digits{sign})")

    def _error(self, text: str) -> UsageError:
        return UsageError(f"{self._noun}: {text}")
