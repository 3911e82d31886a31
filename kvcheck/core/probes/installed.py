"""Installed engines as targets. Each is driven in a child process of its own environment.

    sglang                  the engine of the interpreter that runs kvcheck
    vllm:/path/to/venv      the engine of that environment, or of the interpreter at that path

Only the child imports an engine. Naming one, listing its probes and parsing a target do not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.registry import Registry
from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.frame.tables import EngineSpec

ENGINES: Registry[EngineSpec] = Registry(
    "engine",
    {
        "sglang": "kvcheck.core.probes.sglang:SGLANG",
        "vllm": "kvcheck.core.probes.vllm:VLLM",
        "lmcache": "kvcheck.core.probes.lmcache:LMCACHE",
        "mooncake": "kvcheck.core.probes.mooncake:MOONCAKE",
    },
)

ROOTS = ("python", "", "src")
"""Parent folders of the package in a checkout."""


@dataclass(frozen=True, slots=True)
class EngineTarget:
    engine: str
    python: Path

    @property
    def spec(self) -> EngineSpec:
        return ENGINES.load(self.engine)

    def start(
        self, patience: Patience, device: str = "cpu", variables: Mapping[str, str] | None = None
    ) -> EngineProcess:
        """Start a child that holds the engine. variables: the engine's own. Raises UnknownVerdict."""
        entry = dict(ENGINES.targets())[self.engine]
        program = self.spec.program
        return EngineProcess(self.engine, entry, self.python, patience, device, program=program, variables=variables)


def probes() -> dict[str, str]:
    """Each probe by its name: the engine, what it shows, and its subjects. No name is of two engines."""
    return {
        row.name: f"{engine}: {row.shows}; {', '.join(row.subjects)}."
        for engine in ENGINES.names()
        for row in ENGINES.load(engine).probes
    }


def checkout_of(engine: str, folder: Path) -> Path | None:
    places = (folder / root / engine for root in ROOTS)
    return next((place for place in places if (place / "__init__.py").is_file()), None)


def parse_target(target: str) -> EngineTarget:
    """Parse "sglang" or "sglang:/path". Raises UsageError for a path without an interpreter."""
    name, colon, place = target.partition(":")
    ENGINES.require(name)
    if not colon:
        return EngineTarget(name, Path(sys.executable))
    path = Path(place)
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.is_file() and (source := checkout_of(name, path)) is not None:
        raise UsageError(
            f"{target}: this is a checkout of {name} ({source}), and no environment; "
            f"next: kvcheck env --source {place} VENV, then kvcheck probe {name}:VENV"
        )
    if not place or not python.is_file() or not os.access(python, os.X_OK):
        raise UsageError(
            f"{target}: expected {name}, or {name}:DIR with an interpreter at DIR/bin/python; "
            f"found none at {python.absolute()}"
        )
    return EngineTarget(name, python.absolute())
