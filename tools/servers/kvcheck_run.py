"""Runs of kvcheck against servers, in this process: 80 starts of an interpreter cost minutes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from kvcheck.commands.main import run
from kvcheck.core.base.errors import KvcheckError
from kvcheck.core.base.record import RunRecord, read_record

MODEL = ("--layers", "4", "--kv-heads", "4", "--length", "4096", "--distance", "64")
START_S = 400.0


def arguments(about: str | None, cases: Iterable[str]) -> argparse.ArgumentParser:
    """A command line with a folder for results, the folder of environments, and cases, all if none is named."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=_folder)
    parser.add_argument("--environments", type=_folder, default=_folder(str(Path(__file__).parents[2] / "envs")))
    parser.add_argument("--only", action="append", choices=[*cases])
    return parser


def _folder(text: str) -> Path:
    return Path(text).resolve()


def known_answers(model: Path, *options: str) -> Path:
    if not (model / "known_answers.json").exists():
        run(["model", "make", str(model), *MODEL, *options])
    return model


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
