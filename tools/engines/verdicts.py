"""Verdicts of releases: environments, stress, every cell's replay line so many times, and one page of all.

    python -m tools.engines.verdicts OUT sglang=0.5.9 sglang=0.5.23 vllm=0.33.0 [--times 20] [--schedules 20]

OUT/envs holds the environments (kept and used again), OUT/runs the runs, OUT/releases.{html,csv,md} the page, and
OUT/replays.csv what each line gave. Exit 0: all lines gave their verdict each time; 1: not all; 2: a step failed.

Invariants:
- A verdict is the one that `kvcheck stress` recorded; nothing here judges, and no release is expected to have any.
- Lines are replayed in a new process; a cell without a line, or without an answer to it, counts as not the same.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas

from kvcheck.core.base.record import read_record
from kvcheck.core.report.comparison.compare import compare
from kvcheck.core.run.store import write_text
from tools.engines.command import end, kvcheck, say

MARKER = "kvcheck-env.json"
"""In an environment that kvcheck env has begun."""


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    out = Path(asked.out).resolve()
    runs: list[str] = []
    rows: list[dict[str, object]] = []
    for release in asked.releases:
        engine, _, version = release.partition("=")
        if not _has_environment(out, engine, version):
            return 2
        limits = ["--schedules", str(asked.schedules), "--seed", str(asked.seed), "--format", "json"]
        made = _kvcheck(out, "probe", f"{engine}:envs/{engine}-{version}", *limits, "--out", "runs")
        if not made.strip():
            return 2  # what was wrong is on the terminal
        run = str(json.loads(made)["run_id"])
        runs.append(run)
        rows += _replayed(out, run, asked.times)
        write_text(out / "replays.csv", str(pandas.DataFrame(rows).to_csv(index=False)))
    formats = [part for name in ("html", "csv", "md") for part in ("-o", f"{name}=releases.{name}")]
    told = _kvcheck(out, "report", *(f"runs/{run}" for run in runs), *formats)
    odd = [row for row in rows if not row["same"]]
    say(f"{len(rows) - len(odd)} of {len(rows)} lines gave their cell's verdict {asked.times} times of {asked.times}")
    for row in odd:
        say(f"  {row['release']} {row['cell']}: {row['verdict']}, replayed {row['agreed']} times: {row['text']}")
    return 1 if odd else 0 if told else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Verdicts of installed engines, each replayed, on one page.")
    parser.add_argument("out", help="folder for environments, runs and the page")
    parser.add_argument("releases", nargs="+", type=_release, metavar="ENGINE=VERSION")
    parser.add_argument("--times", type=_count, default=20)
    parser.add_argument("--schedules", type=_count, default=20)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def _release(text: str) -> str:
    if not all(text.partition("=")):
        raise argparse.ArgumentTypeError(f"expected ENGINE=VERSION, such as sglang=0.5.23, got {text!r}")
    return text


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text!r}")
    return int(text)


def _has_environment(out: Path, engine: str, version: str) -> bool:
    folder = out / "envs" / f"{engine}-{version}"
    if (folder / "bin" / "python").exists() and not (folder / MARKER).exists():
        return True  # somebody's own
    folder.parent.mkdir(parents=True, exist_ok=True)
    return "next: kvcheck probe" in _kvcheck(
        out, "env", f"{engine}=={version}", str(folder), "--base", str(folder.parent / "base")
    )


def _replayed(out: Path, run: str, times: int) -> list[dict[str, object]]:
    """Every cell's line, so many times; all of a run in one process."""
    (table,) = compare([read_record(out / "runs" / run)]).tables
    cells = {row.id: row.cells[0] for group in table.groups for row in group.rows}
    lines = [shlex.split(cell.replay)[2] for cell in cells.values() if cell.replay.startswith("kvcheck replay ")]
    told = _kvcheck(out, "replay", *lines, "--times", str(times), "--format", "json") if lines else ""
    answers = {answer["cell"]: answer for answer in map(json.loads, told.splitlines())}
    rows: list[dict[str, object]] = []
    for name, cell in cells.items():
        answer = answers.get(name, {"verdict": "none", "agreed": 0, "times": times, "text": "no answer", "line": ""})
        is_same = answer["verdict"] == cell.name and answer["agreed"] == times
        row = {
            "release": cell.label,
            "cell": name,
            "verdict": cell.name,
            "same": is_same,
            "replayed": answer["verdict"],
        }
        rows.append({**row, **{key: answer[key] for key in ("agreed", "times", "line", "text")}})
    return rows


def _kvcheck(folder: Path, *arguments: str) -> str:
    say(f"$ kvcheck {shlex.join(arguments)[:160]}")
    return kvcheck(folder, *arguments).stdout


if __name__ == "__main__":
    sys.exit(end("verdicts", main))
