"""`kvcheck report`: turn records of runs into HTML, CSV and JSON.

Invariants:
- A report is made from the record alone: nothing is run again, and the record is not changed.
- Every run is read and every option checked before the first file is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.terminal import say
from kvcheck.core.errors import UsageError
from kvcheck.core.record import RunRecord, read_record
from kvcheck.core.report import WRITERS
from kvcheck.core.report.store import find_run, make_folder

RUNS_FOLDER = Path("reports/runs")


@dataclass(frozen=True, slots=True)
class Job:
    """One file, or folder of tables, to be written."""

    record: RunRecord
    format_name: str
    path: Path


def report(
    runs: Annotated[list[str], typer.Argument(help="Run id, unique start of one, folder, or run.json.")],
    output: Annotated[
        list[str] | None,
        typer.Option("--output", "-o", metavar="FORMAT=PATH", help="html, csv or json, and where to; repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = RUNS_FOLDER,
) -> None:
    """Write HTML, CSV and JSON reports of runs.

    Without -o: report.html and the CSV tables, beside the run.json they are made from.

    Examples:

      kvcheck report 20260102-030405-0c4e

      kvcheck report 20260102 -o html=report.html -o csv=run.csv

      kvcheck report runs/a runs/b -o html=pages
    """
    targets = report_targets(output)
    found = list(dict.fromkeys(find_run(name, out) for name in runs))
    records = [(path, read_record(path)) for path in found]
    jobs = _jobs(records, targets) if targets else _beside(records)
    _refuse_collisions(jobs)
    for folder in {path for _, path in targets} if len(records) > 1 else ():
        make_folder(folder)
    for job in jobs:
        WRITERS.load(job.format_name)(job.record, job.path)
        say(str(job.path))


def report_targets(output: list[str] | None) -> list[tuple[str, Path]]:
    """The -o options of a command. Raises UsageError for a bad one."""
    return [_target(text) for text in output or ()]


def write_reports(record: RunRecord, folder: Path, targets: list[tuple[str, Path]], *, beside: bool) -> str | None:
    """Write what -o asks for, and the default reports beside run.json; the page's path, if one was written."""
    jobs = [Job(record, format_name, path) for format_name, path in targets]
    if beside:
        jobs += _beside([(folder / "run.json", record)])
    for job in jobs:
        WRITERS.load(job.format_name)(job.record, job.path)
    pages = [str(job.path) for job in jobs if job.format_name == "html"]
    return pages[-1] if pages else None


def _target(text: str) -> tuple[str, Path]:
    """The two halves of FORMAT=PATH. Raises UsageError for anything else."""
    format_name, equals, path = text.partition("=")
    if not equals or not path:
        raise UsageError(f"-o {text!r}: expected FORMAT=PATH, for example -o html=report.html")
    WRITERS.require(format_name)
    return format_name, Path(path)


def _beside(records: list[tuple[Path, RunRecord]]) -> list[Job]:
    jobs = []
    for path, record in records:
        jobs.append(Job(record, "html", path.parent / "report.html"))
        jobs.append(Job(record, "csv", path.parent))
    return jobs


def _jobs(records: list[tuple[Path, RunRecord]], targets: list[tuple[str, Path]]) -> list[Job]:
    if len(records) == 1:
        return [Job(records[0][1], format_name, path) for format_name, path in targets]
    for format_name, path in targets:
        if path.is_file() or path.suffix.lower() == f".{format_name}":
            raise UsageError(
                f"-o {format_name}={path}: {len(records)} runs need a folder, one file per run, and got a file; "
                f"try -o {format_name}={path.parent / format_name}"
            )
    return [
        Job(record, format_name, path / f"{record.run_id}.{format_name}")
        for _, record in records
        for format_name, path in targets
    ]


def _refuse_collisions(jobs: list[Job]) -> None:
    """Two reports in one file would silently become the last one; CSV folders are shared by no two runs either."""
    taken: set[Path] = set()
    for job in jobs:
        # Tables beside a run.json and the page beside it share the folder, not a file name.
        place = job.path.resolve()
        if place in taken:
            raise UsageError(f"two reports would be written to {job.path}; expected a path for each")
        taken.add(place)
