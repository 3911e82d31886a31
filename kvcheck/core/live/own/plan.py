"""OwnPlan: everything that decides the requests of one round to a user's own model, and its line.

    own-model/prefix-cache:target=http%3A//127.0.0.1%3A8000,engine=vllm,seed=1,round=0,names=7,vocabulary=1000

Invariants:
- The line has no server key.
- The next turn of a conversation repeats the server's cold answer, so it is the same only if that answer is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvcheck.core.base.cells import OWN_MODEL, UNNAMED_SERVER, is_own_model
from kvcheck.core.live.line import check_sizes
from kvcheck.core.live.own.prompts import USUAL_IDS
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.run.line import LineCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlan:
    """One round against one server.

    situation: a name of LIVE_SCENARIOS. vocabulary: token ids below it are sent. Other fields are those of LivePlan.
    """

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
        return LINE.encode(self)


LINE = LineCodec(
    OwnPlan, noun="line of an own model", prefix=f"{OWN_MODEL}/", always=("seed", "round", "names", "vocabulary")
)


def is_own_line(line: str) -> bool:
    return ":" in line and is_own_model(line)


def parse_own_line(line: str) -> OwnPlan:
    plan = LINE.decode(line)
    LIVE_SCENARIOS.require(plan.situation)
    check_sizes(requests=plan.requests, concurrency=plan.concurrency)
    return plan
