"""A kvcheck that is killed: its processes end with it, whatever they are at, and the next run tidies up after it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.live_processes import children_of, is_alive, poll

from kvcheck.commands.main import run
from kvcheck.core.base.child import StandardStreams, start
from kvcheck.core.base.scratch import ScratchFolder, sweep
from kvcheck.core.run.turns import Limit
from kvcheck.core.run.workers import tasks_text

ROOT = Path(__file__).parents[2]
LIMIT_S = 2.0
PATIENCE_S = 120.0
BEGUN_S = 0.1
"""It takes this processor time before kvcheck is loaded, whether torch is loaded before it or not."""
LONG = ["--requests", "100000", "--max-time", "600", "--seed", "1", "--no-reports"]
RUNS = {
    "workers": (["retract-resume", "--shape", "llama-3-tiny", "--shape", "qwen3-next-tiny", "--jobs", "2", *LONG], 2),
    "ranks": (["pd-transfer", "--transport", "tcp", "--shape", "llama-3-tiny", *LONG], 2),
    "engines": (["pd-transfer", "--transport", "mooncake", "--shape", "llama-3-tiny", *LONG], 4),
}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that nobody else uses."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def below(pid: int) -> list[int]:
    """All processes that descend from this one."""
    return [each for child in children_of(pid) for each in (child, *below(child))]


def has_begun(pid: int) -> bool:
    """Whether the process has loaded torch or Mooncake's engine, and worked for BEGUN_S: it is tied to its parent."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
        ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    except OSError:
        return False
    return ("libtorch" in maps or "/mooncake/" in maps) and ticks >= BEGUN_S * os.sysconf("SC_CLK_TCK")


def state(pid: int) -> str:
    """One letter, as in /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Callable[[list[str], int, bool], float]]:
    """Start kvcheck, wait until `count` processes have begun, stop them if asked, and kill it.

    Gives the seconds until all of them were gone.
    """
    seen: list[int] = []

    def kill(arguments: list[str], count: int, is_stopped: bool) -> float:
        command = [sys.executable, "-m", "kvcheck", "stress", *arguments, "--out", str(tmp_path / "runs")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
            try:
                assert poll(lambda: sum(map(has_begun, below(parent.pid))) >= count, PATIENCE_S)
                seen.extend(below(parent.pid))
                for pid in seen if is_stopped else ():
                    os.kill(pid, signal.SIGSTOP)
                assert poll(lambda: not is_stopped or all(state(pid) == "T" for pid in seen))
                assert all(map(is_alive, seen))
            finally:
                parent.kill()
                began = time.monotonic()
        poll(lambda: not any(map(is_alive, seen)), 5 * LIMIT_S)
        return time.monotonic() - began

    yield kill
    for pid in filter(is_alive, seen):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.schedules
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("kind", ["workers", "ranks", pytest.param("engines", marks=pytest.mark.mooncake)])
def test_processes_end_with_a_killed_kvcheck(
    kind: str, is_stopped: bool, killed: Callable[[list[str], int, bool], float], temporary: Path
) -> None:
    arguments, count = RUNS[kind]
    assert killed(arguments, count, is_stopped) < LIMIT_S
    left = [path.name for path in temporary.iterdir() if path.name.startswith("kvcheck-ranks-")]
    assert len(left) == (0 if kind == "workers" else 1)
    options = ["--schedules", "3", "--seed", "1", "--no-reports", "--out", str(temporary / "runs")]
    assert run(["stress", "retract-resume", "--shape", "llama-3-tiny", *options]) == 0
    assert not [path for path in temporary.iterdir() if path.name.startswith("kvcheck-")]


@pytest.mark.processes(starts=True)
def test_a_child_outlives_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[str]] = []
    streams = StandardStreams(stdin=subprocess.PIPE)
    thread = threading.Thread(target=lambda: started.append(start("kvcheck.commands.worker", streams=streams)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    (process,) = started
    assert process.poll() is None
    output, _ = process.communicate(tasks_text([], Limit()))
    assert (process.returncode, json.loads(output)) == (0, {"begun": True})


def test_a_stale_folder_is_removed_and_one_in_use_is_kept(temporary: Path) -> None:
    stale = temporary / "kvcheck-store-abcdefgh"
    stale.mkdir(mode=0o700)
    (stale / "object").write_bytes(b"x")
    with ScratchFolder("ranks") as live:
        swept = sweep()
        assert (swept.removed, swept.kept) == ((str(stale),), ())
        assert live.path.is_dir() and not stale.exists()
    assert not live.path.exists() and sweep().removed == ()


def test_what_is_not_of_a_dead_run_is_never_removed(temporary: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir(mode=0o700)
    (target / "file").touch()
    (temporary / "kvcheck-store-linkaway").symlink_to(target)
    (temporary / "kvcheck-ranks-somefile").touch()
    for name in ("kvcheck-store-backup-of-mine", "kvcheck-other-abcdefgh", "my-kvcheck-store-abcdefgh"):
        (temporary / name).mkdir(mode=0o700)
    (temporary / "kvcheck-store-openmode").mkdir(mode=0o755)
    before = sorted(temporary.iterdir())
    held = temporary / "kvcheck-store-heldhere"
    held.mkdir(mode=0o700)
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert sweep().removed == ()
    assert sorted(temporary.iterdir()) == sorted([*before, held]) and (target / "file").exists()
    os.close(lock)
    assert sweep().removed == (str(held),)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_strangers_folder_is_kept(temporary: Path) -> None:
    theirs = temporary / "kvcheck-store-stranger"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    assert sweep().removed == () and theirs.is_dir()


@pytest.mark.processes
def test_doctor_says_what_it_removed(temporary: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stale = temporary / "kvcheck-ranks-abcdefgh"
    stale.mkdir(mode=0o700)
    assert run(["doctor", "--out", str(tmp_path / "runs")]) == 0
    assert f"removed {stale}, left by runs that were killed" in capsys.readouterr().out
    assert run(["doctor", "--out", str(tmp_path / "runs")]) == 0
    assert "none is left by a run that was killed" in capsys.readouterr().out
