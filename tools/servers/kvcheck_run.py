"""One run of kvcheck against servers, in this process: 80 starts of an interpreter cost minutes."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from kvcheck.commands.main import run
from kvcheck.core.base.errors import KvcheckError
from kvcheck.core.base.record import RunRecord, read_record


class NoRecord(KvcheckError):
    """A run of kvcheck that judged nothing."""


def run_kvcheck(folder: Path, *words: str) -> tuple[int, RunRecord]:
    """Exit code and record of a command line. Runs lie in folder/runs; terminal output goes to folder/kvcheck.log.

    Raises NoRecord where the run left none.
    """
    runs, log = folder / "runs", folder / "kvcheck.log"
    before = set(runs.iterdir()) if runs.exists() else set()
    with log.open("a", encoding="utf-8") as stream, redirect_stdout(stream), redirect_stderr(stream):
        code = run([*words, "--out", str(runs)])
    new = [each for each in runs.iterdir() if each not in before] if runs.exists() else []
    if len(new) != 1:
        raise NoRecord(f"kvcheck {words[0]} ended with {code} and left no run; see {log}")
    return code, read_record(new[0])
