"""Server: the child that judges an installed transfer engine, run by the interpreter of the engine's environment.

It loads no library itself: its agents do. It answers each JSON line that it reads with one JSON line.

Invariants:
- All engines of a child are in one private network; a note states if the system refuses one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from kvcheck.core.base.identity import MOONCAKE_BUILDS as BUILDS
from kvcheck.core.base.identity import commit_of, file_digest, folder_digest
from kvcheck.core.base.private_network import PrivateNetwork
from kvcheck.core.base.record import Evidence
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.tables import EngineSpec, ProbeRow
from kvcheck.core.probes.frame.wire import Ask, Hello, Refusal, Reply, draws_of, serve
from kvcheck.core.probes.mooncake import MOONCAKE
from kvcheck.core.probes.mooncake.agents import AgentLost, start_all
from kvcheck.core.probes.mooncake.memory import MappedMemory
from kvcheck.core.probes.mooncake.scene import QUIET, Scene, TransferRig


class TransferProbe(Protocol):
    def needs(self, subject: str) -> tuple[str, ...]:
        """Names of the library that the release must have."""

    def scene(self, rig: TransferRig) -> Scene: ...

    def control(self, scene: Scene) -> None:
        """A case that passes on every engine that works, by the same calls."""

    def measure(self, scene: Scene) -> None: ...


class TransferServer:
    """One installed engine. variables: its own, from the user. network: of its processes."""

    def __init__(self, variables: dict[str, str], network: PrivateNetwork) -> None:
        self._variables = variables
        self._network = network

    def start(self) -> Hello | Refusal:
        found = {build: version for build in BUILDS if (version := _version_of(build)) is not None}
        if len(found) > 1:
            told = ", ".join(f"{build} {version}" for build, version in found.items())
            return Refusal(reason=f"builds that overwrite each other's files are installed together: {told}")
        if why := self._why_not_loaded():
            return Refusal(reason=f"mooncake cannot be used by {sys.executable}: {why}")
        place = find_spec(MOONCAKE.package)
        folders = map(Path, () if place is None else place.submodule_search_locations or ())
        folder = next((each for each in folders if each.is_dir()), None)
        return Hello(
            engine=MOONCAKE.name,
            version=next(iter(found.values()), "unknown"),
            python=platform.python_version(),
            torch="",
            device="cpu",
            folder=None,  # no line of Python runs in a transfer
            files=None if folder is None else _digest(folder),
            commit=None if folder is None else commit_of(folder),
        )

    def _why_not_loaded(self) -> str | None:
        memory = MappedMemory()
        try:
            variables = {**QUIET, **self._variables}
            made = start_all(
                ["the engine"], network=self._network.path, memory=memory, variables=variables, needs=("engine",)
            )
        except CannotDrive as why:
            return str(why)
        finally:
            memory.close()
        for agent in made:
            agent.close()
        return None

    def answer(self, ask: Ask) -> Reply:
        row = MOONCAKE.probe(ask.probe)
        if row is None or ask.subject not in row.subjects:
            return Reply(evidence=Evidence(schedules=0), unknown=f"no probe {ask.probe} on {ask.subject}")
        rig = TransferRig(
            subject=ask.subject,
            schedule=ask.schedule,
            mix=draws_of(ask),
            variables=self._variables,
            network=self._network.path,
        )
        result = attempt(lambda: _run(row, rig))
        unknown = f"cannot drive: {result.text} ({result.where})" if isinstance(result, Fault) else result
        if self._network.path is None:
            rig.tally.note(f"the engines' ports were open to the network: {self._network.why}")
        tally = rig.tally
        return Reply(
            findings=tuple(tally.findings), evidence=tally.evidence(), unknown=unknown, notes=tuple(tally.notes)
        )


def _run(row: ProbeRow, rig: TransferRig) -> str | None:
    module, attribute = row.entry.split(":")
    probe = cast(TransferProbe, getattr(importlib.import_module(module), attribute)())
    try:
        with probe.scene(rig) as scene:
            probe.control(scene)
            scene.require_landed()
            try:
                probe.measure(scene)
            finally:
                scene.report()  # also events before the reason to stop
    except (CannotDrive, AgentLost) as why:
        return f"cannot drive: {why}"
    if rig.tally.findings:
        return None
    lacking = [name for name in row.wants if not rig.tally.counts.get(name)]
    return f"not exercised: {', '.join(lacking)}" if lacking else None


def _digest(folder: Path) -> str:
    found = hashlib.sha256(folder_digest(folder).encode())
    for library in sorted(folder.glob("engine*.so")):
        found.update(file_digest(library).encode())
    return found.hexdigest()


def _version_of(build: str) -> str | None:
    try:
        return metadata.version(build)
    except metadata.PackageNotFoundError:
        return None


def start(spec: EngineSpec) -> Hello | Refusal:
    with PrivateNetwork() as network:
        return TransferServer({}, network).start()


def main(entry: str, device: str, variables: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with PrivateNetwork() as network:
        serve(TransferServer(json.loads(variables), network), sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
