"""What releases of Mooncake's transfer engine report of their writes, by release and setting: runs and a table.

    python -m tools.engines.transfer_table OUT 0.3.9 0.3.13.post1 0.3.13.post1,MC_TCP_PROTO=1 [--schedules 3]
    python -m tools.engines.transfer_table OUT

OUT/envs holds the environments (kept and used again), OUT/runs the runs, OUT/transfers.csv a row for each cell of each
run, OUT/transfers.md a row for each run. Without a release the two tables are made again from OUT/runs.
Exit 0: the tables are written; 2: a step failed.

Invariants:
- A number is one of a stored run, with the number of tries that it is of. Nothing here judges.
- The tables are made from the records alone, ordered by release and setting.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcheck.core.base.record import Finding, RunRecord, ScenarioResult, read_record
from kvcheck.core.run.store import write_text
from tools.engines.command import kvcheck

SHAPES = ("landing.sync", "landing.batch", "landing.frozen", "registration.batch", "notification.batch")
PLACES = 6
"""Places in the peer that a schedule of registration tries, none of them registered as a whole."""
RATE = re.compile(r"(\d+) of (\d+) ")
KINDS = {
    "early": "early",
    "torn": "torn",
    "lost": "lost",
    "late": "late",
    "strange": "strange",
    "notification": "early",
}
COLUMNS = ("release", "settings", "cell", "verdict", "schedules", "writes", "words", "found", "seconds", "run")
HEAD = (
    "| release | settings | writes to running peers | early, torn, lost, late | writes to a stopped peer | early | "
    "illegal places accepted | notifications | early |"
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Mooncake's transfer engine by release and setting.")
    parser.add_argument("out", help="folder for environments, runs and tables")
    parser.add_argument("releases", nargs="*", metavar="VERSION[,NAME=VALUE...]")
    parser.add_argument("--schedules", type=int, default=3)
    asked = parser.parse_args(arguments)
    out = Path(asked.out).resolve()
    for release in asked.releases:
        version, *settings = release.split(",")
        folder = f"envs/mooncake-{version}"
        given = [word for setting in settings for word in ("--env", setting)]
        shapes = [word for shape in SHAPES for word in ("--probe", shape)]
        limits = ["--schedules", str(asked.schedules), "--seed", "1", "--no-reports", "--out", "runs"]
        made = kvcheck(out, "env", f"mooncake=={version}", folder, is_shown=True).returncode
        ran = made or kvcheck(out, "probe", f"mooncake:{folder}", *given, *shapes, *limits, is_shown=True).returncode
        if made or ran not in (0, 1, 4):
            return 2
    runs = records(out / "runs")
    write_text(out / "transfers.csv", table(runs))
    write_text(out / "transfers.md", "\n".join(markdown(runs)) + "\n")
    return 0


def records(folder: Path) -> list[RunRecord]:
    runs = [read_record(path.parent) for path in folder.glob("*/run.json")]
    return sorted(runs, key=lambda run: ([int(n) for n in re.findall(r"\d+", _release(run))], _settings(run)))


def table(runs: Sequence[RunRecord]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for run in runs:
        for cell in run.scenarios:
            evidence = cell.evidence
            found = "; ".join(_found(each) for each in _findings(run, cell))
            words = sum(evidence.words_verified.values())
            verdict = f"{cell.verdict.name} {cell.code or ''}".strip()
            counts = (cell.schedules, evidence.transfers, words, found, cell.duration_s)
            rows.writerow((_release(run), _settings(run), cell.shape, verdict, *counts, run.run_id))
    return text.getvalue()


def markdown(runs: Sequence[RunRecord]) -> list[str]:
    return [HEAD, re.sub(r"[^|]+", "---", HEAD), *map(_row, runs)]


def _row(run: RunRecord) -> str:
    cells = {cell.shape: cell for cell in run.scenarios}
    lists = [cells[shape] for shape in ("landing.sync", "landing.batch")]
    frozen, places, notes = (cells[shape] for shape in ("landing.frozen", "registration.batch", "notification.batch"))
    wrong = [sum(_wrong(run, cell, lane) for cell in lists) for lane in ("early", "torn", "lost", "late")]
    accepted = {each.lane for each in _findings(run, places) if each.code == "KV308"}
    figures = (
        f"{sum(cell.evidence.transfers or 0 for cell in lists):,}",
        ", ".join(map(str, wrong)) if any(wrong) else "0",
        f"{frozen.evidence.transfers or 0:,}",
        str(_wrong(run, frozen, "early") + _wrong(run, frozen, "torn")),
        f"{len(accepted)} of {PLACES}",
        f"{notes.evidence.orderings_checked or 0:,}",
        str(_wrong(run, notes, "notification")),
    )
    settings = f"`{_settings(run)}`" if _settings(run) else "none"
    return f"| {_release(run)} | {settings} | {' | '.join(figures)} |"


def _wrong(run: RunRecord, cell: ScenarioResult, lane: str) -> int:
    return sum(int(_tries(each)[0]) for each in _findings(run, cell) if each.lane == lane)


def _findings(run: RunRecord, cell: ScenarioResult) -> Iterator[Finding]:
    return (each for each in run.findings if each.shape == cell.shape and each.condition is None)


def _found(finding: Finding) -> str:
    count, tries = _tries(finding)
    return f"{finding.code} {KINDS.get(finding.lane or '', finding.lane)}: {count} of {tries}"


def _tries(finding: Finding) -> tuple[str, str]:
    rate = RATE.match(finding.message)
    assert rate is not None, f"a finding without a rate: {finding.message}"
    return rate[1], rate[2]


def _release(run: RunRecord) -> str:
    engine = run.environment["engine"]
    assert isinstance(engine, dict)
    return str(engine["version"])


def _settings(run: RunRecord) -> str:
    given = run.plan.get("engine_env", {})
    assert isinstance(given, dict)
    return ", ".join(f"{name}={value}" for name, value in given.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
