"""What a test may do without saying so: its markers, kept true while it runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvcheck.core.stress.runner import ScheduleRunner

PROCESSES, SCHEDULES, COMPILED = "processes", "schedules", "compiled"
QUICK = "quick"
MUTANTS_TEST = "test_a_mutant_is_killed_by_its_oracle_where_the_fixed_build_passes"
ONE_A_BUG = (
    "metadata-get-returns-views",
    "gate-waits-on-load-lane",
    "align-broadcasts",
    "node-keeps-queue-view",
    "failed-overwritten",
)
"""A mutant of each bug that is quickly killed: whole schedules that `make quick` runs all the same."""
HELD: set[str] = set()
"""Markers of the test under way."""


def mark_one_a_bug(items: Iterable[pytest.Item]) -> None:
    """Put the marker quick on the mutants' test, for ONE_A_BUG."""
    for item in items:
        if item.name.partition("[")[0] == MUTANTS_TEST and item.name.partition("[")[2].rstrip("]") in ONE_A_BUG:
            item.add_marker(QUICK)


class Refusing(subprocess.Popen[Any]):
    noted: list[str]

    def __init__(self, args: Any, *_: object, **__: object) -> None:
        words = [args] if isinstance(args, str | bytes | os.PathLike) else [*args]
        if Path(os.fsdecode(words[0])).name == "git":
            raise FileNotFoundError("no git in a test without the marker processes")
        self.noted.append(f"{PROCESSES}: it starts {' '.join(map(str, words))[:200]}")
        raise OSError("a test without the marker processes starts no process")

    def __del__(self) -> None:
        """Nothing was started."""


class Unmarked:
    """What the test under way has done without its marker."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def forbid_processes(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Refusing, "noted", self.done, raising=False)
        patch.setattr(subprocess, "Popen", Refusing)
        for name in ("fork", "posix_spawn", "posix_spawnp", "system"):
            patch.setattr(os, name, self._refusing(f"{PROCESSES}: it calls os.{name}"))

    def forbid_schedules(self, patch: pytest.MonkeyPatch) -> None:
        """No whole schedule runs from now on."""
        patch.setattr(ScheduleRunner, "run", self._refusing(f"{SCHEDULES}: it runs a whole schedule"))

    def _refusing(self, what: str) -> Callable[..., None]:
        def refuse(*_: object, **__: object) -> None:
            self.done.append(what)
            raise OSError(f"the test lacks a marker: {what}")

        return refuse
