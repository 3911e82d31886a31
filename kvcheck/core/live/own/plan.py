"""OwnPlan: everything that decides the requests of one round to a user's own model, and its line.

    own-model/prefix-cache:target=http%3A//127.0.0.1%3A8000,engine=vllm,seed=1,round=0,names=7,vocabulary=1000

Invariants:
- Encoding and decoding round-trip; the line has no character that a shell changes, and no server key.
- The next turn of a conversation repeats the server's cold answer, so it is the same only if that answer is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from urllib.parse import quote

from kvcheck.core.base.cells import OWN_MODEL, UNNAMED_SERVER, is_own_model, keys_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.line import check_sizes, is_number
from kvcheck.core.live.own.prompts import USUAL_IDS
from kvcheck.core.live.scenarios import LIVE_SCENARIOS

_ALWAYS = ("seed", "round", "names", "vocabulary")


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
        return f"{OWN_MODEL}/{self.situation}/{self.engine or UNNAMED_SERVER}"

    def at(self, round_: int) -> OwnPlan:
        return dataclasses.replace(self, round=round_)

    def line(self) -> str:
        pairs = (
            f"{field.name}={quote(str(value), safe='/._-')}"
            for field in dataclasses.fields(self)
            if field.name != "situation"
            and ((value := getattr(self, field.name)) != field.default or field.name in _ALWAYS)
        )
        return f"{OWN_MODEL}/{self.situation}:{','.join(pairs)}"


def is_own_line(line: str) -> bool:
    return ":" in line and is_own_model(line)


def parse_own_line(line: str) -> OwnPlan:
    keys = keys_of(line)
    situation = keys.pop("scenario").removeprefix(f"{OWN_MODEL}/")
    LIVE_SCENARIOS.require(situation)
    fields = {field.name: field for field in dataclasses.fields(OwnPlan) if field.name != "situation"}
    values: dict[str, object] = {}
    for key, text in keys.items():
        if key not in fields:
            raise UsageError(f"line of an own model: unknown key {key[:40]!r}; known: {', '.join(fields)}")
        if "int" not in str(fields[key].type):
            values[key] = text
        elif is_number(key, text):
            values[key] = int(text)
        else:
            raise UsageError(f"line of an own model: {key} is a whole number from 0; got {text[:40]!r}")
    if not values.get("target"):
        raise UsageError("line of an own model: expected target=..., found none")
    plan = OwnPlan(situation=situation, **values)  # type: ignore[arg-type]
    check_sizes(requests=plan.requests, concurrency=plan.concurrency)
    return plan
