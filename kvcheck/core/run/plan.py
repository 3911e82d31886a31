"""Plan: everything that decides one schedule, and its text as a line.

    retract-resume:shape=glm-5.1-tiny,seed=1,schedule=3,strategy=random,requests=12

In the line of an engine's probe, "shape" is the probe and its subject: shape=retract.nsa,target=sglang.

Invariants:
- Nothing outside the plan and its trace file influences a schedule.
- The line holds no character that a shell changes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import quote, unquote

from kvcheck.core.base.cells import PROCESS_TRANSPORTS, STREAMED, is_engine, tried_with
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng

BUILTIN = "builtin"
ANSWERS = "answers"
"""The strategy whose choices are answers to the process's polls; see stress/answers.py."""
FLOOR = 3
"""Least schedules of a cell: with an eager, a lazy and a random order, and other settings in each."""
MOST_SCHEDULES = 1_000_000
"""Highest number of a schedule: the orders before it are worked out first."""
MOST_RANKS = 8
PROCESS_RANKS = "1x1"
NO_EXTRAS = "no"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """probe: "NAME.SUBJECT", with an empty shape. seed, schedule: together they seed workload and strategy. requests:
    None: the scenario's number, or the whole trace. pages: most pages of a request; the pool shrinks with it. faults:
    kinds left in, such as "aborts.store", or "none"; None: all of FAULTS. choices: recorded, for strategy "replay"; the
    pair of operations, for "flip"; delays of a device, for "delay". extras: "no" leaves out the audit of footprints.
    expect: the finding code of a printed line."""

    scenario: str
    shape: str = ""
    probe: str | None = None
    target: str = BUILTIN
    decoder: str = "words"
    mutant: str | None = None
    backend: str = "simulated"
    device: str = "cpu"
    transport: str = "loopback"
    ranks: str | None = None
    strategy: str = "portfolio"
    seed: int = 1
    schedule: int = 0
    requests: int | None = None
    pages: int | None = None
    faults: str | None = None
    trace: str | None = None
    choices: str | None = None
    extras: str | None = None
    engine_env: str | None = None
    expect: str | None = None

    @property
    def has_rank_processes(self) -> bool:
        """Whether each rank is a process: the machine decides the order, and no choices are recorded."""
        return self.probe is None and self.transport in PROCESS_TRANSPORTS

    @property
    def is_in_process(self) -> bool:
        return self.probe is None and not self.has_rank_processes

    @property
    def is_delayed(self) -> bool:
        return self.is_in_process and self.on_device and self.strategy == "delay"

    @property
    def on_device(self) -> bool:
        return self.backend in STREAMED

    @property
    def own_target(self) -> str | None:
        return None if self.probe is not None or self.target == BUILTIN else self.target

    @property
    def tried_with(self) -> str:
        if self.probe is not None:
            return self.probe
        return tried_with(self.shape, self.transport if self.has_rank_processes else None)

    @property
    def engine_variables(self) -> dict[str, str]:
        pairs = (line.partition("=") for line in (self.engine_env or "").splitlines())
        return {name: value for name, _, value in pairs}

    @property
    def cell(self) -> str:
        return f"{self.scenario}/{self.tried_with}"

    def line(self) -> str:
        return LINE.encode(self if self.probe is None else dataclasses.replace(self, shape=self.probe))


LINE = LineCodec(
    Plan, noun="schedule line", always=("shape", "seed", "schedule"), needs=("shape",), hidden=("probe",), safe="/:"
)


def parse_line(line: str) -> Plan:
    plan = LINE.decode(line)
    return dataclasses.replace(plan, probe=plan.shape, shape="") if is_engine(plan.target) else plan


def workload_seed(plan: Plan) -> int:
    number = plan.schedule if plan.trace is None else 0
    return Rng(plan.seed * 7_919 + number).next_u64() >> 16


def further_workloads(plan: Plan, count: int) -> Iterator[Plan]:
    for number in range(count if plan.trace is None else 0):
        yield dataclasses.replace(plan, schedule=plan.schedule + number)


def parse_ranks(text: str) -> tuple[int, int]:
    prefill, cross, decode = text.partition("x")
    if not cross or any(not re.fullmatch("[1-9]", each) or int(each) > MOST_RANKS for each in (prefill, decode)):
        raise UsageError(
            f"--ranks: expected PREFILLxDECODE, each from 1 to {MOST_RANKS}, such as 2x2; got {text[:40]!r}"
        )
    return int(prefill), int(decode)
