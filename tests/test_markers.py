"""Markers of tests: what is refused without them, and what a forked process is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.engine import environment, interpreter
from rigs.forked import is_stand_in
from rigs.guards import ONE_A_BUG, Unmarked
from rigs.live_processes import is_alive, poll

from kvcheck.core.base.child import StandardStreams, start
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import MUTANTS, mutant

ROOT = Path(__file__).parents[1]
STARTERS: dict[str, Callable[[], object]] = {
    "a command": lambda: subprocess.run([sys.executable, "-V"], check=False),
    "a line for the shell": lambda: subprocess.Popen("true", shell=True),
    "a fork": lambda: os.fork(),  # by the name that is refused
    "the system's shell": lambda: os.system("true"),
}
WHO_AM_I = """
import json, os, sys
descriptors = sorted(map(int, os.listdir("/proc/self/fd")))
print(json.dumps([os.getppid(), os.getpgid(0), sorted(os.environ), os.getcwd(), descriptors, "torch" in sys.modules,
                  sys.argv, sys.stdin.read()]))
sys.exit(7)
"""

STARTS_ANOTHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-m", "sleeps"]).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", STARTERS)
def test_a_process_without_the_marker_is_refused_and_noted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unmarked = Unmarked()
    unmarked.forbid_processes(monkeypatch)
    with pytest.raises(OSError, match="marker"):
        STARTERS[name]()
    assert len(unmarked.done) == 1 and unmarked.done[0].startswith("processes: ")


def test_git_is_not_there_and_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    unmarked = Unmarked()
    unmarked.forbid_processes(monkeypatch)
    with pytest.raises(FileNotFoundError):
        subprocess.run(["/usr/bin/git", "status"], check=False)
    assert unmarked.done == []


def test_a_whole_schedule_without_the_marker_is_refused_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    unmarked = Unmarked()
    unmarked.forbid_schedules(monkeypatch)
    with pytest.raises(OSError, match="marker"):
        ScheduleRunner(BuiltinTarget()).run(Plan(scenario="retract-resume", shape="llama-3-tiny"))
    assert unmarked.done == ["schedules: it runs a whole schedule"]


def test_one_mutant_of_each_bug_is_quick() -> None:
    assert sorted(mutant(name).bug for name in ONE_A_BUG) == sorted({mutant(name).bug for name in MUTANTS})


@pytest.mark.processes
@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.processes(starts=True))])
def test_a_forked_process_is_what_a_started_one_is(
    is_forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "who_am_i.py").write_text(WHO_AM_I)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    process = start("who_am_i", "a", "b", streams=StandardStreams(stdin=subprocess.PIPE))
    output, _ = process.communicate("from the parent")
    parent, group, variables, here, descriptors, has_torch, argv, said = json.loads(output)
    assert (parent, group, here) == (os.getpid(), process.pid, os.getcwd())
    assert "HF_TOKEN" not in variables and "PATH" in variables
    assert descriptors[:3] == [0, 1, 2] and len(descriptors) == 4, "and the folder that is read"
    assert (argv[1:], said, process.returncode) == (["a", "b"], "from the parent", 7)
    assert has_torch == is_forked


@pytest.mark.processes
def test_a_forked_command_and_all_servers_end_with_what_started_it(tmp_path: Path) -> None:
    (tmp_path / "starts_another.py").write_text(STARTS_ANOTHER)
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)\n")
    command = [sys.executable, "-m", "starts_another"]
    below: set[int] = set()
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            files = [Path(f"/proc/{each}/task/{each}/children") for each in (process.pid, child)]
            has_all = poll(lambda: [len(file.read_text().split()) for file in files] == [2, 1])
            below.update(int(pid) for file in files for pid in file.read_text().split())
        finally:
            process.kill()
    assert has_all and child in below, "a server each, and the command that was started"
    assert poll(lambda: not any(map(is_alive, below)))


def test_processes_of_stand_in_environments_alone_are_forked_besides_this_interpreters(tmp_path: Path) -> None:
    stand_in = environment(tmp_path / "stand-in", None) / "bin" / "python"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "other")
    assert is_stand_in(stand_in)
    assert not is_stand_in(tmp_path / "other" / "bin" / "python")
    assert not is_stand_in(interpreter(tmp_path / "script", "exit 3") / "bin" / "python")
