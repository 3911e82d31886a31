"""LivePlan: everything that decides the requests of one round, and its line.

    prefix-cache:target=http%3A//127.0.0.1%3A8000,known-answers=tiny,seed=1,round=3,names=77,requests=24,concurrency=8

Invariants:
- Encoding and decoding round-trip; the line has no character that a shell changes, and no server key.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from urllib.parse import quote

from kvcheck.core.base.cells import KNOWN_ANSWERS, UNNAMED_SERVER, keys_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.scenarios import LIVE_SCENARIOS

MOST_REQUESTS, MOST_CONCURRENCY = 100_000, 4096
_DIGITS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """One round against one server.

    decode: address of a pair's decode server. known_answers: folder of the model. names: selects the tokens; another
    number gives the same situation in other tokens. longest: tokens of a request and its answer. pool: tokens of the
    device tier. admin: whether retractions on demand are allowed.
    """

    scenario: str
    target: str
    known_answers: str
    decode: str | None = None
    engine: str | None = None
    seed: int = 1
    round: int = 0
    names: int = 0
    requests: int = 24
    concurrency: int = 8
    longest: int = 0
    pool: int | None = None
    admin: int = 0

    @property
    def cell(self) -> str:
        return f"{self.scenario}/{self.engine or UNNAMED_SERVER}"

    def at(self, round_: int) -> LivePlan:
        return dataclasses.replace(self, round=round_)

    def line(self) -> str:
        pairs = (
            f"{_key(field.name)}={quote(str(value), safe='/._-')}"
            for field in dataclasses.fields(self)
            if field.name != "scenario"
            and ((value := getattr(self, field.name)) != field.default or field.name in ("seed", "round", "names"))
        )
        return f"{self.scenario}:{','.join(pairs)}"


def is_live_line(line: str) -> bool:
    return KNOWN_ANSWERS in keys_of(line) if ":" in line else False


def parse_live_line(line: str) -> LivePlan:
    keys = keys_of(line)
    LIVE_SCENARIOS.require(keys.pop("scenario"))
    fields = {_key(field.name): field for field in dataclasses.fields(LivePlan) if field.name != "scenario"}
    values: dict[str, object] = {}
    for key, text in keys.items():
        if key not in fields:
            raise UsageError(f"line of a running server: unknown key {key[:40]!r}; known: {', '.join(fields)}")
        if "int" in str(fields[key].type):
            if not is_number(key, text):
                raise UsageError(f"line of a running server: {key} is a whole number from 0; got {text[:40]!r}")
            values[fields[key].name] = int(text)
        else:
            values[fields[key].name] = text
    for key in ("target", KNOWN_ANSWERS):
        if not values.get(fields[key].name):
            raise UsageError(f"line of a running server: expected {key}=..., found none")
    plan = LivePlan(scenario=line.partition(":")[0], **values)  # type: ignore[arg-type]
    check_sizes(requests=plan.requests, concurrency=plan.concurrency)
    return plan


def is_number(key: str, text: str) -> bool:
    """Whether a text is a whole number from 0; a seed may be negative."""
    digits = text.removeprefix("-") if key == "seed" else text
    return digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS


def check_sizes(*, requests: int, concurrency: int) -> None:
    for name, size, most in (("requests", requests, MOST_REQUESTS), ("concurrency", concurrency, MOST_CONCURRENCY)):
        if not 1 <= size <= most:
            raise UsageError(f"--{name}: expected 1 to {most:,}, got {size}")


def _key(name: str) -> str:
    return name.replace("_", "-")
