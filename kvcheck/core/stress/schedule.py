"""Plan: everything that decides one schedule, and its text as a line.

    retract-resume:shape=glm-5.1-tiny,seed=1,schedule=3,strategy=random,requests=12

In the line of an engine's probe, "shape" is the probe and its subject: shape=retract.nsa,target=sglang.

Invariants:
- Encoding and decoding round-trip, and the line holds no character that a shell changes.
- Nothing outside the plan (and the trace file it names) influences a schedule.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote, unquote
from zlib import crc32

from kvcheck.core.base.cells import is_engine, tried_with
from kvcheck.core.base.devices import STREAMED
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.cache.transfer import PROCESS_TRANSPORTS

MAX_DIGITS = 20
BUILTIN = "builtin"
"""The target that is kvcheck's own."""
ANSWERS = "answers"
"""The strategy whose choices are answers to the process's polls; see answers.py."""
FLOOR = 3
"""Least schedules of a cell: with an eager, a lazy and a random order, and other settings in each."""
STRIDE = 7
"""Step between the variants of a cell's schedules, so that cells share the variants out."""
MOST_RANKS = 8
PROCESS_RANKS = "1x1"
"""Default ranks in processes."""
NO_EXTRAS = "no"
UNWRITTEN = ("scenario", "probe")
"""Fields that are no key of a line: the scenario opens it, and a probe stands under "shape"."""
NUMBERS = ("seed", "schedule", "requests", "pages")
ALWAYS_WRITTEN = ("shape", "seed", "schedule")
BROKEN_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


class Kind(Enum):
    SCHEDULE = "schedule"
    """In this process."""
    DELAYED = "delayed"
    """In this process, on a device whose lanes are held: by the line's delays, or by the groups of the schedule."""
    RANKS = "ranks"
    """Each rank is a process of its own; the order depends on the machine, and no choices are recorded."""
    PROBE = "probe"
    """By a child that holds an installed engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One schedule of one scenario with one shape, or of one probe of an installed engine.

    probe: "NAME.SUBJECT"; the shape is then "". None: `target` is kvcheck's or the user's own. decoder: row of
    DECODERS. seed, schedule: together they seed workload and strategy. ranks: "PREFILLxDECODE"; None: the scenario
    chooses. requests: None: the scenario's own number, or the whole trace. trace: None: a synthetic workload. pages:
    most pages of a request; the pool is then smaller too. faults: kinds left in, such as "aborts.store", or "none";
    None: all of FAULTS. choices: recorded, for strategy "replay"; the pair of operations, for "flip"; delays of a
    device, for "delay". extras: "no" leaves out the audit of footprints. engine_env: one "NAME=VALUE" a line. expect:
    the finding code that the line was printed for.
    """

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
    def place(self) -> int:
        """The start of its cell: different for all tiny shapes, and a function of the shape's name."""
        from kvcheck.core.stress.workload.shapes import TINY_SHAPES  # needs torch, which help does not load

        return TINY_SHAPES.index(self.shape) if self.shape in TINY_SHAPES else crc32(self.shape.encode())

    @property
    def variant(self) -> int:
        """Consecutive over cells and seeds. The first variants bring the most pairs of settings."""
        return (self.schedule + FLOOR * (self.seed - 1)) * STRIDE + self.place

    @property
    def turn(self) -> int:
        """The start of its cell in the orders of a portfolio. It moves with the seed too."""
        return self.place + self.seed + crc32(self.scenario.encode())

    @property
    def kind(self) -> Kind:
        if self.probe is not None:
            return Kind.PROBE
        if self.transport in PROCESS_TRANSPORTS:
            return Kind.RANKS
        return Kind.DELAYED if self.on_device and self.strategy == "delay" else Kind.SCHEDULE

    @property
    def on_device(self) -> bool:
        """Work runs beside the process, in an order that the machine decides."""
        return self.backend in STREAMED

    @property
    def own_target(self) -> str | None:
        """MODULE:NAME of a target of the user's own, or None."""
        return None if self.probe is not None or self.target == BUILTIN else self.target

    @property
    def tried_with(self) -> str:
        if self.probe is not None:
            return self.probe
        return tried_with(self.shape, self.transport if self.kind is Kind.RANKS else None)

    @property
    def engine_variables(self) -> dict[str, str]:
        pairs = (line.partition("=") for line in (self.engine_env or "").splitlines())
        return {name: value for name, _, value in pairs}

    @property
    def cell(self) -> str:
        return f"{self.scenario}/{self.tried_with}"

    def line(self) -> str:
        """The plan as one line; defaults are left out."""
        pairs = []
        shape = self.shape if self.probe is None else self.probe
        for row in dataclasses.fields(self):
            value = shape if row.name == "shape" else getattr(self, row.name)
            if row.name not in UNWRITTEN and (value != row.default or row.name in ALWAYS_WRITTEN):
                pairs.append(f"{row.name}={quote(str(value), safe='/:._-~', errors='surrogateescape')}")
        return f"{self.scenario}:{','.join(pairs)}"


def workload_seed(plan: Plan) -> int:
    """Each schedule has its own workload; a trace is one workload."""
    number = plan.schedule if plan.trace is None else 0
    return Rng(plan.seed * 7_919 + number).next_u64() >> 16


def further_workloads(plan: Plan, count: int) -> Iterator[Plan]:
    """The plan and those behind it; none for a trace."""
    for number in range(count if plan.trace is None else 0):
        yield dataclasses.replace(plan, schedule=plan.schedule + number)


def parse_ranks(text: str) -> tuple[int, int]:
    """Parse "2x2". Raises UsageError."""
    prefill, cross, decode = text.partition("x")
    if not cross or any(not re.fullmatch("[1-9]", each) or int(each) > MOST_RANKS for each in (prefill, decode)):
        raise UsageError(
            f"--ranks: expected PREFILLxDECODE, each from 1 to {MOST_RANKS}, such as 2x2; got {text[:40]!r}"
        )
    return int(prefill), int(decode)


def parse_line(line: str) -> Plan:
    """Parse a line. Raises UsageError."""
    scenario, colon, rest = line.strip().partition(":")
    if not colon or not scenario:
        raise UsageError(f"schedule line: expected SCENARIO:key=value,..., got {line[:80]!r}")
    known = {row.name for row in dataclasses.fields(Plan)}.difference(UNWRITTEN)
    values: dict[str, object] = {"scenario": scenario}
    for pair in rest.split(","):
        key, equals, text = pair.partition("=")
        if not equals or key not in known:
            raise UsageError(
                f"schedule line: expected one of {', '.join(sorted(known))} as key=value, got {pair[:80]!r}"
            )
        if key in values:
            raise UsageError(f"schedule line: expected each key once, got {key} twice")
        if BROKEN_ESCAPE.search(text):
            raise UsageError(f"schedule line: expected %XX escapes in {key}, got {text[:80]!r}; copy the whole line")
        value = unquote(text, errors="surrogateescape")
        if key in NUMBERS:
            digits = value.removeprefix("-") if key == "seed" else value
            if not digits.isascii() or not digits.isdigit() or len(digits) > MAX_DIGITS:
                sign = "" if key == "seed" else " and not negative"
                raise UsageError(
                    f"schedule line: {key} must be an integer, got {value[:40]!r} (at most {MAX_DIGITS} digits{sign})"
                )
            values[key] = int(value)
        else:
            values[key] = value
    if "shape" not in values:
        raise UsageError("schedule line: expected shape=NAME, found none")
    if is_engine(str(values.get("target", ""))):
        values |= {"probe": values["shape"], "shape": ""}
    return Plan(**values)  # type: ignore[arg-type]
