"""A machine that is short of something is no finding: UNKNOWN with the reason, the same however many processes run."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcheck.commands.main import run
from kvcheck.core.base.errors import InternalError, TransferError, UnknownVerdict, machine_trouble
from kvcheck.core.run import workers
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.ranks.child import Ending
from kvcheck.core.stress.ranks.supervisor import RankReport, Supervisor
from kvcheck.core.stress.runner import ScheduleRunner

ROOT = Path(__file__).parents[2]
LOADED = "import resource, sys; import kvcheck.core.stress.runner"
SHORT = "the machine is short of"


def kvcheck(*arguments: str, limit: Callable[[], None] | None = None, **variables: str) -> tuple[int, str]:
    """The command under a limit of its own; its exit code, and all that it said."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcheck", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        preexec_fn=limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch.so: failed to map segment from shared object"),
        chained(TransferError("a link broke"), OSError(errno.ENFILE, "Too many open files in system")),
    ],
    ids=repr,
)
def test_what_the_system_raises_is_told_apart(error: Exception) -> None:
    assert (machine_trouble(error) or "").startswith(SHORT)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "No such file"),
        RuntimeError("KV cache pool is out of memory"),
        ImportError("no module"),
        TransferError("a link broke"),
        InternalError("x"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
    ],
    ids=repr,
)
def test_other_errors_are_what_they_are(error: Exception) -> None:
    assert machine_trouble(error) is None


@pytest.mark.processes
def test_ranks_that_cannot_meet_are_no_finding(tmp_path: Path) -> None:
    options = ["--shape", "llama-3-tiny", "--transport", "tcp", "--ranks", "2x2", "--out", str(tmp_path), "--seed", "1"]
    code, said = kvcheck(
        "stress", "pd-transfer", *options, limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    )
    assert code == 4, said
    assert "KV90" not in said.replace("KV990", "") and ("short of" in said or "met" in said), said


@pytest.mark.processes
def test_a_rank_that_dies_before_all_have_met_is_no_finding() -> None:
    class Dying(Supervisor):
        program = "rigs.rank_that_dies"

    plan = Plan(scenario="pd-transfer", shape="llama-3-tiny", backend="eager", transport="tcp", ranks="1x1", seed=5)
    with pytest.raises(UnknownVerdict, match=r"-0 ended with status 7: no luck; its ranks had not met"):
        Dying(plan, silence_s=60).run()


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_full_folder_for_temporary_files_is_unknown_with_any_number_of_jobs(jobs: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12k", "none", disk], capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        shapes = ["--shape", "llama-3-tiny", "--shape", "deepseek-v3-tiny", "--jobs", jobs, "--schedules", "8"]
        options = ["--seed", "1", "--no-reports", "--out", str(tmp_path / "runs")]
        code, said = kvcheck("stress", "hicache", *shapes, *options, TMPDIR=str(disk))
    finally:
        subprocess.run(["umount", disk], check=True)
    assert code == 4 and "No space left on device" in said and "next: set TMPDIR" in said, said
    (record,) = (tmp_path / "runs").glob("*/run.json")
    made = json.loads(record.read_text())
    assert made["complete"] and {row["verdict"] for row in made["scenarios"]} == {"unknown"}


RUN_2 = ["stress", "retract-resume", "--schedules", "2", "--seed", "1", "--no-reports"]
RUN_2 += ["--shape", "llama-3-tiny", "--shape", "qwen3-next-tiny", "--jobs"]
WORKER = "import os, sys\n{first}\nfrom kvcheck.commands import worker\n{then}\nsys.exit(worker.main())\n"
RAISES = "import kvcheck.core.stress.runner as e\ndef run(*_, **__):\n    raise {error}\ne.ScheduleRunner.run = run\n"
BROKEN_WORKERS = {
    "dies while it loads": ("os._exit(127)", "", 4, "while kvcheck was loaded, before its first schedule"),
    "cannot load": (
        "",
        "import kvcheck.core.run.workers as w\nw.work = lambda *_: __import__('short_of_memory')",
        4,
        SHORT,
    ),
    "no memory": ("", RAISES.format(error="MemoryError()"), 4, SHORT),
    "no descriptors": ("", RAISES.format(error="OSError(24, 'Too many open files')"), 4, SHORT),
    "kvcheck is wrong": ("", RAISES.format(error="KeyError('x')"), 70, "kvcheck itself failed in a process of its own"),
    "killed by its target": ("", RAISES.replace("raise {error}", "os._exit(4)"), 1, "KV902"),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", BROKEN_WORKERS)
def test_what_breaks_a_worker_decides_the_exit_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, then, code, why = BROKEN_WORKERS[name]
    (tmp_path / "broken_worker.py").write_text(WORKER.format(first=first, then=then))
    (tmp_path / "short_of_memory.py").write_text("raise ImportError('x.so: cannot allocate memory')\n")
    monkeypatch.syspath_prepend(tmp_path)
    begin = workers.start
    monkeypatch.setattr(workers, "start", lambda program, **keys: begin("broken_worker", **keys))
    assert run([*RUN_2, "2", "--out", str(tmp_path / "runs")]) == code
    told = capfd.readouterr()
    assert why in told.out + told.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError(), 4), (OSError(errno.EMFILE, "Too many open files"), 4), (KeyError("x"), 70)],
    ids=repr,
)
def test_the_same_errors_without_workers(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ScheduleRunner, "run", raising)
    assert run([*RUN_2, "1", "--out", str(tmp_path / "runs")]) == code


class Dead:
    """A rank's process that has ended by SIGABRT with these last words."""

    order = None

    def wait(self, within_s: float | None = None) -> Ending:
        """How it ended."""
        return Ending(-6, "[enforce fail at listener.cc:63] false. accept: Too many open files")


def test_the_last_words_of_a_rank_name_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(Plan(scenario="pd-transfer", shape="llama-3-tiny", transport="tcp", ranks="1x1"))
    supervisor.reports["decode-0"] = RankReport(name="decode-0")
    monkeypatch.setattr(supervisor, "_ready", {"decode-0"})
    monkeypatch.setattr(supervisor, "_children", {"decode-0": Dead()})
    with pytest.raises(UnknownVerdict, match=r"decode-0 ended by signal 6: the machine is short of file descriptors"):
        supervisor._take("decode-0", None)
