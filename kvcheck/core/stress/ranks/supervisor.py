"""Supervisor: starts a process for every rank, listens to all of them, and ends all of them.

Invariants:
- No child outlives `run`. A child whose supervisor was killed ends by itself.
- If no rank reports for silence_s seconds, the run ends and names the silent ranks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import ClassVar

from kvcheck.core.base.errors import TargetError, UnknownVerdict, machine_trouble
from kvcheck.core.base.private_network import PrivateNetwork
from kvcheck.core.base.record import value_from
from kvcheck.core.base.scratch import ScratchFolder
from kvcheck.core.cache.transfer.sockets.link import LEASE_S
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.ranks import worker
from kvcheck.core.stress.ranks.child import Child
from kvcheck.core.stress.ranks.spec import RankSpec, RankSummary, ranks_of
from kvcheck.core.stress.workload.events import Faulted

SILENCE_S = 120.0
PATIENCE_S = 10
ENDING_S = 10.0


@dataclass(slots=True, kw_only=True)
class RankReport:
    """death: how its process ended too early, or "". faulted: by request, the fault that its reason has to name.
    is_refusal: it ended with an error of the code under test."""

    name: str
    finished: dict[int, tuple[int, ...]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    faulted: dict[int, Faulted] = field(default_factory=dict)
    stalled: set[int] = field(default_factory=set)
    fenced: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_idle: bool = False
    summary: RankSummary | None = None
    error: str = ""
    is_refusal: bool = False
    death: str = ""


def _numbers(value: object) -> tuple[int, ...]:
    assert isinstance(value, list)
    return tuple(value)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Supervisor:
    program: ClassVar[str] = worker.__name__

    def __init__(
        self,
        plan: Plan,
        *,
        extra: Mapping[str, dict[str, object]] | None = None,
        silence_s: float = SILENCE_S,
        patience_s: int = PATIENCE_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self._plan = plan
        self._extra = extra or {}
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._lease_s = lease_s
        self._events: queue.Queue[tuple[str, dict[str, object] | None]] = queue.Queue()
        self._children: dict[str, Child] = {}
        self._ready: set[str] = set()
        self._is_broken = False
        self._addresses: dict[str, str] = {}
        self.reports: dict[str, RankReport] = {}
        self.silence = ""

    def run(self) -> Mapping[str, RankReport]:
        """Return the report of every rank, when all have ended. Raises UnknownVerdict if a library is missing."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(ScratchFolder("ranks")).path
            network = None
            if self._plan.transport == "mooncake":
                network = stack.enter_context(PrivateNetwork()).path
            return self._run(folder, network)

    def _run(self, folder: Path, network: str | None) -> Mapping[str, RankReport]:
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            self._start(folder, network)
            while not self._is_broken and any(not self._is_over(report) for report in self.reports.values()):
                try:
                    name, event = self._events.get(timeout=self._silence_s)
                except queue.Empty:
                    waited = [each.name for each in self.reports.values() if not self._is_over(each)]
                    self.silence = f"{', '.join(waited)} said nothing for {self._silence_s:.0f} s"
                    break
                self._take(name, event)
        finally:
            self._end()
            signal.signal(signal.SIGTERM, before)
        return self.reports

    def pid(self, name: str) -> int:
        return self._children[name].process.pid

    @staticmethod
    def _is_over(report: RankReport) -> bool:
        return bool(report.summary is not None or report.death)

    def _start(self, folder: Path, network: str | None) -> None:
        prefill, decode = ranks_of(self._plan)
        key = os.urandom(16).hex()
        for end, count in (("prefill", prefill), ("decode", decode)):
            for rank in range(count):
                name = f"{end}-{rank}"
                spec = RankSpec(
                    line=self._plan.line(),
                    end=end,
                    rank=rank,
                    prefill=prefill,
                    decode=decode,
                    key=key,
                    meeting=str(folder / end),
                    patience_s=self._patience_s,
                    lease_s=self._lease_s,
                    network=network,
                    extra=dict(self._extra.get(name, {})),
                )
                self.reports[name] = RankReport(name=name)
                self._children[name] = Child(spec, self.program, self._put)

    def _put(self, name: str, event: dict[str, object] | None) -> None:
        self._events.put((name, event))

    def _take(self, name: str, event: dict[str, object] | None) -> None:
        report = self.reports[name]
        if event is None:
            self._died(report)
            return
        kind = event["event"]
        if kind == "listening":
            self._addresses[name] = str(event["address"])
            self._tell_addresses()
        elif kind == "ready":
            self._ready.add(name)
        elif kind == "finished":
            report.finished[int(str(event["request"]))] = _numbers(event["tokens"])
        elif kind == "failed":
            report.failed[int(str(event["request"]))] = str(event["reason"])
        elif kind == "aborted":
            report.aborted.add(int(str(event["request"])))
        elif kind == "faulted":
            fault: Faulted = value_from(Faulted, {name: event[name] for name in ("request", "why", "names")}, kind)
            report.faulted[fault.request] = fault
        elif kind == "stalled":
            report.stalled.update(_numbers(event["requests"]))
        elif kind == "fenced":
            report.fenced.append(str(event["peer"]))
        elif kind == "lost":
            report.lost.append(str(event["what"]))
        elif kind == "idle":
            report.is_idle = True
            self._close_when_idle()
        elif kind == "closed":
            report.summary = value_from(RankSummary, event["summary"], "summary")
        elif kind == "error":
            report.error = f"{event['kind']}: {event['message']}"
            report.is_refusal = event["exit_code"] == TargetError.exit_code
            is_refused = any(
                each.is_refusal for each in self.reports.values()
            )  # its peers then report that it is missing
            if event["exit_code"] == UnknownVerdict.exit_code and not is_refused:
                raise UnknownVerdict(str(event["message"]))

    def _tell_addresses(self) -> None:
        decode = [child for child in self._children.values() if child.spec.end == "decode"]
        if len(self._addresses) == len(decode):
            for child in self._children.values():
                if child.spec.end == "prefill":
                    child.tell({"addresses": self._addresses})

    def _close_when_idle(self) -> None:
        if all(report.is_idle or report.death for report in self.reports.values()):
            for name, child in self._children.items():
                if not self.reports[name].death:
                    child.tell({"close": True})

    def _died(self, report: RankReport) -> None:
        if report.summary is not None:
            return
        ending = self._children[report.name].wait()
        code, text = ending.code, report.error or ending.text
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        death = f"{report.name} ended {how}" + (f": {text}" if text else "")
        if len(self._ready) < len(self.reports) and not any(each.is_refusal for each in self.reports.values()):
            raise UnknownVerdict(f"{death}; its ranks had not met, so nothing was under test yet")
        if trouble := machine_trouble(RuntimeError(text)):  # gloo and torch write such an error and end the process
            raise UnknownVerdict(f"{report.name} ended {how}: {trouble}")
        report.death = death
        self._is_broken = self._is_broken or len(self._ready) < len(self.reports)  # the others cannot go on without it
        self._close_when_idle()

    def _end(self) -> None:
        for child in self._children.values():
            child.close_input()
        for child in self._children.values():
            is_done = self.reports[child.spec.name].summary is not None
            child.wait(within_s=ENDING_S if is_done else 0.2)
            child.close()
