"""Tables: the names of an engine's probes, their subjects, and their requirements.

A table names modules and imports none, so that a child without torch can read its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VARIABLES = {
    "cpu": {
        "TRITON_INTERPRET": "1",  # Triton kernels are interpreted on the CPU
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    },
    "cuda": {
        "TRITON_INTERPRET": "0",  # the caller's may be 1, and an interpreted hold would wait for its own process
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # a queue of the device for each stream: a held one blocks no other
        "TOKENIZERS_PARALLELISM": "false",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A subject that releases have dropped on purpose: there it has no cell. lacks: the one missing capability.

    A release that has it, or lacks another one too, is tried as any other.
    """

    subject: str
    lacks: str
    releases: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """Conditional findings of a subject that were reviewed: they are shown in one line. places: of causes, each "CODE
    PLACE" as in a baseline. Any other finding is shown whole."""

    subject: str
    releases: tuple[str, ...]
    places: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """entry: "module:Class". shows: its text for people. scenario: kvcheck's or the engine's word.

    wants: counts of Evidence that a schedule must reach to be evidence. wants_held: more of them, if streams are held.
    devices: kinds of device that it runs on. dropped, reviewed: facts about releases, by exact version. schedule_s:
    duration of a schedule on two idle cores; 0.0: too short to be announced.
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

    prepare: "module:function", called once in the child before the first probe, or "". program: "module:main" of the
    child. variables: prefixes of the engine's own environment variables, which `--env` takes. untried: text on
    parts that no probe tries. start: "module:function" that loads the engine as the program does, for a check of its
    imports. compiled: "module:function" that checks that compiled code runs on a device, and raises CannotDrive if it
    does not.
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
