"""Probe server: the child that holds an engine, run by the interpreter of the engine's environment.

It needs numpy and torch from there. It answers each JSON line that it reads with one JSON line, and ends when its
standard input does. The engine's own output goes to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch

from kvcheck.core.base.identity import commit_of, folder_digest
from kvcheck.core.base.record import Evidence
from kvcheck.core.probes.frame import streams
from kvcheck.core.probes.frame.cuda_streams import CudaMachine
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.lines_run import as_ranges, lines_of
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.probe import Probe, Rig, StreamsOfDevice, load, run
from kvcheck.core.probes.frame.stubs import Stubs
from kvcheck.core.probes.frame.tables import VARIABLES, EngineSpec, ProbeRow
from kvcheck.core.probes.frame.wire import Ask, Hello, Refusal, Reply, draws_of, serve


class ProbeServer:
    """One engine, imported once. device: "cpu", with stand-in streams, or "cuda[:N]", with real ones."""

    def __init__(self, spec: EngineSpec, device: str = "cpu") -> None:
        self._spec = spec
        self._device = device
        self._machine: StreamsOfDevice | None = streams.install() if device == "cpu" else None
        self._stubs = Stubs(spec.package, spec.stubs)
        self._stubs.install()
        self._names = Names(spec.table)
        self._folder: Path | None = None

    def start(self) -> Hello | Refusal:
        spec = self._spec
        if self._machine is None:
            try:
                self._machine = CudaMachine(self._device)
            except CannotDrive as error:
                return Refusal(reason=str(error))
        found = attempt(lambda: __import__(spec.package))
        if isinstance(found, Fault):
            return Refusal(reason=f"{spec.package} cannot be imported by {sys.executable}: {found.text}")
        if spec.prepare:
            prepare = load(spec.prepare)
            assert callable(prepare)
            ready = attempt(lambda: prepare(self._names))
            if isinstance(ready, Fault):
                return Refusal(reason=f"{spec.package} cannot be made ready: {ready.text} ({ready.where})")
        told = attempt(lambda: metadata.version(spec.package))
        version = "unknown" if isinstance(told, Fault) else told
        folders = map(Path, getattr(sys.modules[spec.package], "__path__", ()))
        folder = self._folder = next((each for each in folders if each.is_dir()), None)
        return Hello(
            engine=spec.name,
            version=version,
            python=platform.python_version(),
            torch=str(torch.__version__),
            device="cpu" if self._device == "cpu" else str(torch.cuda.get_device_name()),
            folder=None if folder is None else os.path.realpath(folder),
            files=None if folder is None else folder_digest(folder),
            commit=None if folder is None else commit_of(folder),
            absent={
                f"{row.scenario}/{row.name}.{gone.subject}": f"no {gone.lacks}: {gone.why}"
                for row in spec.probes
                for gone in row.dropped
                if version in gone.releases and self._missing(row, gone.subject) == [gone.lacks]
            },
        )

    def _missing(self, row: ProbeRow, subject: str) -> list[str]:
        """All needs count as missing if one cannot be imported."""
        probe = load(row.entry)
        assert callable(probe)
        needs = probe().needs(subject)
        found = [(name, self._names.find(name)) for name in needs]
        return [*needs] if any(each.error for _, each in found) else [name for name, each in found if each.why_not]

    def answer(self, ask: Ask) -> Reply:
        row = self._spec.probe(ask.probe)
        if row is None or ask.subject not in row.subjects:
            return Reply(evidence=Evidence(schedules=0), unknown=f"no probe {ask.probe} on {ask.subject}")
        assert self._machine is not None, "start comes first"
        rig = Rig(
            package=self._spec.package,
            names=self._names,
            machine=self._machine,
            device=self._device,
            stubs=self._stubs,
            subject=ask.subject,
            schedule=ask.schedule,
            mix=draws_of(ask),
        )
        self._machine.reset(streams.EAGER, 0)
        probe = load(row.entry)
        assert callable(probe)
        made: Probe = probe()
        wants = row.wants + (() if isinstance(self._machine, streams.Machine) else row.wants_held)
        unknown, lines = self._run(made, rig, wants, ask.traced)
        held = self._machine.take_report()
        for text in held.notes:
            rig.judge.note(text)
        reasons = [each for each in (unknown, None if rig.judge.findings else held.gap) if each]
        return Reply(
            findings=tuple(rig.judge.findings),
            evidence=rig.judge.evidence(),
            unknown="; ".join(reasons) or None,
            notes=tuple(rig.judge.notes),
            stubs=tuple(sorted(self._stubs.served)),
            lines={name: as_ranges(each) for name, each in lines.items()},
        )

    def _run(
        self, probe: Probe, rig: Rig, wants: tuple[str, ...], traced: tuple[str, ...]
    ) -> tuple[str | None, dict[str, set[int]]]:
        """Return why the schedule is no evidence, and its lines of traced files."""

        def run_all() -> str | None:
            unknown = run(probe, rig, wants)
            rig.machine.settle()
            return unknown

        if not traced or self._folder is None:
            return run_all(), {}
        for name in probe.needs(rig.subject):  # imported before, so that what they run at the import is not noted
            self._names.find(name)
        return lines_of(run_all, self._folder, traced)


def start(spec: EngineSpec, device: str = "cpu") -> Hello | Refusal:
    return ProbeServer(spec, device).start()


def main(entry: str, device: str, variables: str) -> None:
    """variables: the engine's own, as JSON."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name, value in VARIABLES[device.partition(":")[0]].items():
        os.environ[name] = value
    os.environ.update(json.loads(variables))
    torch.set_num_threads(1)
    spec = load(entry)
    assert isinstance(spec, EngineSpec)
    serve(ProbeServer(spec, device), sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
