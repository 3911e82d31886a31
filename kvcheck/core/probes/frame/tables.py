"""Tables: what an engine's probes are called, what they are tried on, and what it takes to run them.

Invariants:
- A table names modules and imports none, so that a child without torch can read its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A subject that releases have dropped on purpose: there it has no cell. lacks: the one capability that is gone.

    Where a release has it, or lacks another one too, the subject is tried as any other.
    """

    subject: str
    lacks: str
    releases: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """Conditional findings of a subject that somebody has looked into: they take one line. places: of causes, each
    "CODE PLACE" as a baseline has them. Any other finding is shown whole."""

    subject: str
    releases: tuple[str, ...]
    places: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """A probe of an engine. subjects: what it is tried on. entry: "module:Class". shows: its text for people.

    scenario: one of kvcheck's own, or the engine's word for it. wants: counts of Evidence that a schedule must reach
    to be evidence. devices: kinds of device that it runs on. wants_held: more of them, where streams are held.
    dropped, reviewed: what is known of releases, by their exact versions. schedule_s: how long a schedule takes on two
    quiet cores, of a probe that waits; 0.0: short enough to be left out of what a run announces.
    """

    name: str
    scenario: str
    subjects: tuple[str, ...]
    entry: str
    shows: str
    wants: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    wants_held: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    reviewed: tuple[Reviewed, ...] = ()
    schedule_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine's tables. stubs: packages that stand-ins may replace. table: capability -> places.

    prepare: "module:function", called once in the child with the names, before the first probe; "" where nothing is
    prepared. shows: its text for people. program: "module:main" of what the child runs. variables: how the names of the
    engine's own environment variables begin, which `--env` takes. untried: what no probe of it tries.
    start: "module:function" that loads the engine as that program does, for a check of its imports. compiled:
    "module:function" that says what compiled code runs on a device, and raises CannotDrive where none does.
    """

    name: str
    shows: str
    package: str
    stubs: tuple[str, ...]
    table: Mapping[str, tuple[str, ...]]
    probes: tuple[ProbeRow, ...]
    prepare: str = ""
    program: str = "kvcheck.core.probes.frame.probe_server:main"
    start: str = "kvcheck.core.probes.frame.probe_server:start"
    variables: tuple[str, ...] = ()
    untried: str = ""
    compiled: str = ""

    def probe(self, name: str) -> ProbeRow | None:
        return next((row for row in self.probes if row.name == name), None)
