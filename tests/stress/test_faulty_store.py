"""Faulty stores: damage is always refused, and a machine that cannot keep the files is no finding."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rigs.settings import with_settings

from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.turns import CellTask, Limit
from kvcheck.core.run.workers import BEGUN, tasks_text
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.scenarios.faulty_store import DAMAGE_EVERY, faulty_store
from kvcheck.core.stress.targets.builtin import BuiltinTarget

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
PAYLOAD = bytes(range(256)) * 4
KEYS = ("ab" * 32, "cd" * 32)
WITH_FILES = with_settings(Plan(scenario="hicache", shape="llama-3-tiny"), "store:files", "write policy:write-through")
"""A schedule that keeps its store in a folder, and puts something there."""


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_damage_is_refused_also_where_the_object_was_damaged_before(kind: str) -> None:
    damaged: list[str] = []
    with faulty_store(kind, damaged.append) as store:
        assert store is not None
        for key in KEYS:
            store.put(key, PAYLOAD)
        # One read in three damages is a cut, one a loss, one a flip: the key that was cut is flipped next.
        served = [store.get(KEYS[read == 2 * DAMAGE_EVERY], len(PAYLOAD)) for read in range(1, 3 * DAMAGE_EVERY + 1)]
        assert served[: DAMAGE_EVERY - 1] == [PAYLOAD] * (DAMAGE_EVERY - 1)
        assert served[DAMAGE_EVERY - 1 :] == [None] * (2 * DAMAGE_EVERY + 1)
        assert damaged == [KEYS[0], KEYS[1], KEYS[0]]
        store.put(KEYS[0], PAYLOAD)
        assert store.get(KEYS[0], len(PAYLOAD)) == PAYLOAD


@pytest.mark.schedules
def test_without_a_folder_for_temporary_files_a_schedule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="set TMPDIR"):
        ScheduleRunner(BuiltinTarget()).run(WITH_FILES)


@pytest.mark.schedules
def test_a_full_disk_stops_a_schedule_instead_of_changing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UnknownVerdict, match=r"No space left on device.*set TMPDIR"):
        ScheduleRunner(BuiltinTarget()).run(WITH_FILES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_process_that_is_told_to_end_takes_its_folder_along(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcheck.commands.worker"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    line = with_settings(Plan(scenario="hicache", shape="llama-3-tiny", requests=400), "store:files").line()
    process.stdin.write(tasks_text([(0, CellTask(plan=parse_line(line), schedules=1))], Limit()))
    process.stdin.close()
    process.stdin = None
    deadline = time.monotonic() + PATIENCE_S
    while not list(tmp_path.glob("*/*")) and time.monotonic() < deadline:  # what is in it was made behind it
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, "")
    begun, begins = output.splitlines()
    assert (begun, "begins" in json.loads(begins)) == (BEGUN, True)  # no report of the schedule that was cut
    assert list(tmp_path.iterdir()) == []
