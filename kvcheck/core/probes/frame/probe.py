"""Probe: one way to try an engine; what it needs, a control that has to pass first, and cases drawn from a seed.

Invariants:
- No verdict without its control: where that finds anything, judges nothing or raises, the engine cannot be driven.
- A stand-in that was called in a measured section makes the case no evidence, whatever else was found in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from kvcheck.core.base.rng import Rng
from kvcheck.core.probes.frame.content import Judge
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.streams import Machine
from kvcheck.core.probes.frame.stubs import Stubs

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """A probe of an engine. subjects: what it is tried on. entry: "module:Class". shows: what it is about.

    scenario: one of kvcheck's own, or what the engine calls it. wants: fields of Evidence without which a schedule
    says nothing. devices: kinds of device that it can be tried on.
    """

    name: str
    scenario: str
    subjects: tuple[str, ...]
    entry: str
    shows: str
    wants: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine's tables. stubs: packages that may be stood in for. table: capability -> places.

    prepare: "module:function", called once in the child with the names, before the first probe. shows: what it is.
    """

    name: str
    shows: str
    package: str
    stubs: tuple[str, ...]
    table: Mapping[str, tuple[str, ...]]
    probes: tuple[ProbeRow, ...]
    prepare: str

    def probe(self, name: str) -> ProbeRow | None:
        """The row of that name."""
        return next((row for row in self.probes if row.name == name), None)


class StreamsOfDevice(Protocol):
    """Streams that work is queued on: stood in for on a CPU, real on a device."""

    def reset(self, order: str, seed: int) -> None:
        """Forget what is queued, or wait for it; from now on work is late by this order."""

    def side(self) -> Any:
        """A stream that nobody waits for yet."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream current."""

    def queue(self, work: Callable[[], None]) -> None:
        """Work for the current stream."""

    def settle(self) -> None:
        """Let everything run that is queued."""


class Stop(Exception):
    """The engine broke in a measured section; the finding is made, and there is nothing more to measure."""


@dataclass(slots=True, kw_only=True)
class Rig:
    """What a probe is given for one schedule. judge: of the part under way, the control or the measured cases."""

    package: str
    names: Names
    machine: StreamsOfDevice
    stubs: Stubs
    subject: str
    schedule: int
    mix: Rng
    device: str = "cpu"
    judge: Judge = field(default_factory=Judge)

    @property
    def stand_ins(self) -> Machine:
        """The streams, where they are stood in for. Raises CannotDrive where they are real."""
        if not isinstance(self.machine, Machine):
            raise CannotDrive(f"this probe needs streams that are stood in for, and {self.device} has real ones")
        return self.machine

    def measured(self, call: Callable[[], T], what: str) -> T:
        """Let the engine work. Raises Stop where it breaks, CannotDrive where that is no evidence."""
        with self.stubs.window() as called:
            result = attempt(call, self.package)
        if called:
            raise CannotDrive(f"{what} called stand-ins, which move no bytes: {', '.join(sorted(called))}")
        if isinstance(result, Fault):
            if not result.is_engine:
                raise CannotDrive(f"{what}: {result.text} ({result.where or 'outside the engine'})")
            self.judge.find("KV902", "liveness", f"{what} raised {result.text} ({result.where})")
            raise Stop
        return result


class Probe(Protocol):
    """A probe."""

    def needs(self, subject: str) -> tuple[str, ...]:
        """Capabilities without which it cannot be driven."""

    def control(self, rig: Rig) -> None:
        """What every release does rightly, by the same calls; judged like the cases."""

    def measure(self, rig: Rig) -> None:
        """The cases of one schedule."""


def load(entry: str) -> object:
    """The object behind "module:name"."""
    module, attribute = entry.split(":")
    return cast(object, getattr(importlib.import_module(module), attribute))


def run(probe: Probe, rig: Rig, wants: tuple[str, ...] = ()) -> str | None:
    """Control and cases; what they have judged is in `rig.judge`. Returns why it is no evidence, None where it is."""
    try:
        result = attempt(lambda: _run(probe, rig, wants), rig.package)
    except CannotDrive as why:  # what a probe itself looked at is not implemented
        return f"cannot drive: {why}"
    return f"cannot drive: {result.text} ({result.where})" if isinstance(result, Fault) else result


def _run(probe: Probe, rig: Rig, wants: tuple[str, ...]) -> str | None:
    try:
        rig.names.require(probe.needs(rig.subject))
        _control(probe, rig)
        probe.measure(rig)
    except Stop:
        return None
    except CannotDrive as why:
        return f"cannot drive: {why}"
    judged = sum(rig.judge.words.values()) + rig.judge.counts.get("orderings_checked", 0)
    if not judged:
        return "nothing was judged"
    lacking = [] if rig.judge.findings else [name for name in wants if not rig.judge.counts.get(name)]
    return f"not exercised: {', '.join(lacking)}" if lacking else None


def _control(probe: Probe, rig: Rig) -> None:
    """Judge the control apart; nothing that it found or counted is left."""
    judge = rig.judge
    try:
        probe.control(rig)
    except Stop:
        raise CannotDrive(f"the control case failed: {judge.findings[-1].message}") from None
    finally:
        rig.judge = Judge(notes=judge.notes)
    if judge.findings:
        raise CannotDrive(f"the control case failed: {judge.findings[0].code} {judge.findings[0].message}")
    if not sum(judge.words.values()):
        raise CannotDrive("the control case judged nothing")
