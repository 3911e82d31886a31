"""LivePlan and OwnPlan: everything that decides the requests of one round, and its line.

    prefix-cache:target=http%3A//127.0.0.1%3A8000,known-answers=tiny,seed=1,round=3,names=77,requests=24,concurrency=8

Invariants:
- The line has no server key.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvcheck.core.base.cells import KNOWN_ANSWERS, OWN_MODEL, UNNAMED_SERVER, is_own_model, keys_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.run.plan import LineCodec

MOST_REQUESTS, MOST_CONCURRENCY = 100_000, 4096
USUAL_IDS = 1000
"""Token ids that every model in use has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """decode: address of a pair's decode server. known_answers: folder of the model. names: selects the tokens; another
    number gives the same situation in other tokens. longest: tokens of a request and its answer. pool: tokens of the
    device tier. admin: whether retractions on demand are allowed."""

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
        return f"{self.scenario}/{self.tried_with}"

    @property
    def tried_with(self) -> str:
        return self.engine or UNNAMED_SERVER

    def at(self, round_: int) -> LivePlan:
        return dataclasses.replace(self, round=round_)

    def line(self) -> str:
        return LINE.encode(self)


LINE = LineCodec(LivePlan, noun="line of a running server", always=("seed", "round", "names"), joint="-")


def is_live_line(line: str) -> bool:
    return KNOWN_ANSWERS in keys_of(line) if ":" in line else False


def parse_live_line(line: str) -> LivePlan:
    plan = LINE.decode(line)
    LIVE_SCENARIOS.require(plan.scenario)
    check_sizes(requests=plan.requests, concurrency=plan.concurrency)
    return plan


def check_sizes(*, requests: int, concurrency: int) -> None:
    for name, size, most in (("requests", requests, MOST_REQUESTS), ("concurrency", concurrency, MOST_CONCURRENCY)):
        if not 1 <= size <= most:
            raise UsageError(f"--{name}: expected 1 to {most:,}, got {size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlan:
    """situation: a name of LIVE_SCENARIOS. vocabulary: token ids below it are sent. Others are those of LivePlan."""

    situation: str
    target: str
    decode: str | None = None
    engine: str | None = None
    seed: int = 1
    round: int = 0
    names: int = 0
    vocabulary: int = USUAL_IDS
    requests: int = 50
    concurrency: int = 8
    longest: int = 0
    pool: int | None = None
    admin: int = 0

    @property
    def cell(self) -> str:
        return f"{OWN_MODEL}/{self.situation}/{self.tried_with}"

    @property
    def tried_with(self) -> str:
        return self.engine or UNNAMED_SERVER

    def at(self, round_: int) -> OwnPlan:
        return dataclasses.replace(self, round=round_)

    def line(self) -> str:
        return OWN_LINE.encode(self)


OWN_LINE = LineCodec(
    OwnPlan, noun="line of an own model", prefix=f"{OWN_MODEL}/", always=("seed", "round", "names", "vocabulary")
)


def is_own_line(line: str) -> bool:
    return ":" in line and is_own_model(line)


def parse_own_line(line: str) -> OwnPlan:
    plan = OWN_LINE.decode(line)
    LIVE_SCENARIOS.require(plan.situation)
    check_sizes(requests=plan.requests, concurrency=plan.concurrency)
    return plan
