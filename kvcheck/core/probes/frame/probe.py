"""Probe: one way to try an engine: its needs, a control that must pass first, and cases drawn from a seed.

Invariants:
- If the control finds something, judges nothing or raises, the probe cannot drive the engine: there is no verdict.
- A case in whose measured section a stand-in was called is no evidence, whatever it found.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import torch

from kvcheck.core.base.record import Finding
from kvcheck.core.base.rng import Rng
from kvcheck.core.probes.frame.content import ProbeJudge
from kvcheck.core.probes.frame.guard import Call, CannotDrive, Fault, attempt, call_text, is_of, under_way
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.streams import HoldReport, Machine
from kvcheck.core.probes.frame.stubs import Stubs

T = TypeVar("T")


class StreamsOfDevice(Protocol):
    """Streams to queue work on: stand-ins on a CPU, real ones on a device.

    fired: holds since the reset that the watchdog ended, known when settled. They imposed no order.
    """

    @property
    def fired(self) -> int: ...

    @property
    def main(self) -> Any: ...

    def reset(self, order: str, seed: int) -> None:
        """Drop queued work, or wait for it; then delay work in this order: eager (never), lazy (always) or random
        (drawn from the seed)."""

    def side(self) -> Any: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]: ...

    def queue(self, work: Callable[[], None], *, goes_last: bool = False) -> None:
        """Put work on the current stream. goes_last: it is released after all other held work."""

    def taken(self, read: Sequence[torch.Tensor], *, rest_stays: bool = False) -> Sequence[torch.Tensor]:
        """Return the values that the current stream has just read, unaffected by later work.

        rest_stays: work that the read does not wait for stays held.
        """

    def has_reached(self, is_reached: Callable[[], bool]) -> bool:
        """Query without a wait, after as much work has run as the order requires."""

    def let_go_until(self, is_reached: Callable[[], bool], *, on: Any = None) -> None:
        """Release held work step by step until this is true, before the process waits for it. on: of one stream
        only."""

    def waiting(self) -> AbstractContextManager[None]:
        """The engine may make the process wait in this block: held work is released."""

    def settle(self) -> None: ...

    def take_report(self) -> HoldReport:
        """How work was held since the last report. Call it when settled."""


class Stop(Exception):
    """Ends the schedule: the engine failed in a measured section, and the finding was added."""


@dataclass(slots=True, kw_only=True)
class Rig:
    """Context of a probe in one schedule. judge: of the control or of the measured cases.

    called: the engine's functions at its last recorded operation, or the one that was called since. copied: those of
    the copy to a finding's row; empty if none was recorded.
    """

    package: str
    names: Names
    machine: StreamsOfDevice
    stubs: Stubs
    subject: str
    schedule: int
    mix: Rng
    device: str = "cpu"
    judge: ProbeJudge = field(default_factory=ProbeJudge)
    called: Call = ()
    copied: Callable[[Finding], Call] = lambda _: ()

    def __post_init__(self) -> None:
        self.judge.called = lambda finding: self._text(self.copied(finding) or self.called)

    @property
    def stand_ins(self) -> Machine:
        """The stand-in streams. Raises CannotDrive if the streams are real."""
        if not isinstance(self.machine, Machine):
            raise CannotDrive(f"this probe needs streams that are stood in for, and {self.device} has real ones")
        return self.machine

    def measured(self, call: Callable[[], T], what: str, *, is_aside: bool = False) -> T:
        """Call the engine. Raises Stop if the engine fails, CannotDrive if the call is no evidence. is_aside: findings
        are about the call before."""
        with self.stubs.refused(what):
            result = attempt(call if is_aside else partial(self.watched, call), self.package)
        if isinstance(result, Fault):
            if not result.is_engine:
                raise CannotDrive(f"{what}: {result.text} ({result.where or 'outside the engine'})")
            self.called = result.call
            self.judge.find("KV902", "liveness", f"{what} raised {result.text} ({result.where})")
            raise Stop
        return result

    def watched(self, call: Callable[[], T]) -> T:
        """Make the call. Its first function of the engine becomes `called`."""
        before = sys.getprofile()

        def look(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and is_of(frame, self.package):
                sys.setprofile(before)
                self.called = ((frame.f_code, frame.f_code.co_firstlineno),)

        sys.setprofile(look)
        try:
            return call()
        finally:
            sys.setprofile(before)

    def record(self) -> None:
        """The engine is making an operation, and findings are about it."""
        self.called = under_way(self.package)

    def maker(self, made: object) -> dict[str, object] | None:
        """Return the engine's functions that made a list, for a finding about it; None if that was not recorded."""
        call: Call = getattr(made, "made_by", ())
        return {"called": self._text(call)} if call else None

    def _text(self, call: Call) -> str:
        return call_text(call, self.package) if call else ""


class Probe(Protocol):
    def needs(self, subject: str) -> tuple[str, ...]:
        """Capabilities that the release must have."""

    def control(self, rig: Rig) -> None:
        """A case that passes on every known release, by the same calls. It is judged like the cases of `measure`."""

    def measure(self, rig: Rig) -> None: ...


def load(entry: str) -> object:
    module, attribute = entry.split(":")
    return cast(object, getattr(importlib.import_module(module), attribute))


def run(probe: Probe, rig: Rig, wants: tuple[str, ...] = ()) -> str | None:
    """Return why the schedule is no evidence, or None. Findings are in `rig.judge`."""
    try:
        result = attempt(lambda: _run(probe, rig, wants), rig.package)
    except CannotDrive as why:  # the probe found an unimplemented part itself
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
    """Raises CannotDrive if it fails, with the capabilities that the probe did without: this release may have moved
    one."""
    judge = rig.judge
    rig.names.done_without.clear()
    try:
        probe.control(rig)
    except Stop:
        raise CannotDrive(_failed(judge.findings[-1].message, rig)) from None
    finally:
        rig.judge = ProbeJudge(notes=judge.notes, called=judge.called)
    if judge.findings:
        raise CannotDrive(_failed(f"{judge.findings[0].code} {judge.findings[0].message}", rig))
    if not sum(judge.words.values()):
        raise CannotDrive("the control case judged nothing")


def _failed(why: str, rig: Rig) -> str:
    without = "".join(f"; done without: {each}" for each in rig.names.done_without.values())
    return f"the control case failed: {why}{without}"
