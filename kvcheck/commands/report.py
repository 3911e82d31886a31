"""`kvcheck report`: writes reports from records of runs, in any format of the table.

Invariants:
- A report is made from the record alone.
- All runs are read and all options checked before the first file is written.
- A failed report changes no verdict. An impossible one is refused before a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvcheck.commands.options import DEFAULT_OUT, Format, StoredIn
from kvcheck.commands.terminal import print_json, say, warn
from kvcheck.core.base.errors import KvcheckError, UnknownVerdict, UsageError
from kvcheck.core.base.record import RunRecord, read_record
from kvcheck.core.base.registry import Registry
from kvcheck.core.report import COMPARISON_WRITERS, ENDINGS, STDOUT, WRITERS, destinations
from kvcheck.core.report.gate.result import GateResult
from kvcheck.core.run.store import check_writable, find_run, make_folder

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable that names the file of a GitHub Actions step's summary; only -o github=- appends to it."""
S = TypeVar("S")
T = TypeVar("T")


Job = tuple[RunRecord, str, Path]


def report(
    runs: Annotated[list[str], typer.Argument(help="Run id or its unique start, folder, or run.json; repeatable.")],
    output: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FORMAT=PATH",
            help="See kvcheck list formats; repeatable. Default: html and csv beside run.json.",
        ),
    ] = None,
    out: StoredIn = DEFAULT_OUT,
    format_name: Format = "text",
) -> None:
    """Write reports of runs.

    Without -o: report.html and the CSV tables beside run.json. With -o and a file name, several runs share one page
    (html, csv or md).
    """
    outputs = parse_outputs(output, format_name, known=(WRITERS, COMPARISON_WRITERS))
    named = [find_run(name, out) for name in runs]
    found = [*{path.resolve(): path for path in named}.values()]
    records = [(path, read_record(path)) for path in found]
    joint = [each for each in outputs if _is_joint(*each, len(records))]
    apart = [each for each in outputs if each not in joint]
    jobs = _jobs(records, apart) if outputs else _beside(records)
    for folder in {path for _, path in apart if path != STDOUT} if len(records) > 1 else ():
        make_folder(folder)
    check_outputs([(format_name, path) for _, format_name, path in jobs] + joint, sources=found)
    if joint:
        _compare(records, joint)
    written = [*joint]
    is_text = format_name == "text"
    for _, path in joint if is_text else ():
        say(str(path))
    for record, output_format, path in jobs:
        if path == STDOUT:
            if problem := _tell_github(record):
                warn(problem)
            continue
        loaded(WRITERS, output_format)(record, path)
        written.append((output_format, path))
        if is_text:
            say(str(path / f"*.{output_format}" if path.is_dir() else path))
    if not is_text:
        print_json({"files": [{"format": each, "path": str(path)} for each, path in written]})


def parse_outputs(
    output: list[str] | None, prints: str = "text", *, known: tuple[Registry[Any], ...] = (WRITERS,)
) -> list[tuple[str, Path]]:
    """Return the -o options, each with a format of `known`. prints: the command's --format. Raises UsageError."""
    outputs = [_output(text, known) for text in output or ()]
    if prints == "json" and any(path == STDOUT for _, path in outputs):
        raise UsageError("-o github=-: stdout is the JSON that --format json asks for; leave one of the two out")
    return outputs


def _is_joint(format_name: str, path: Path, runs: int) -> bool:
    is_file = path.is_file() or path.suffix.lower() == f".{format_name}"
    return format_name not in WRITERS.names() or (
        runs > 1 and is_file and not path.is_dir() and format_name in COMPARISON_WRITERS.names()
    )


def _compare(records: list[tuple[Path, RunRecord]], outputs: list[tuple[str, Path]]) -> None:
    from kvcheck.core.report.comparison.compare import compare

    comparison = compare([record for _, record in records])
    for format_name, path in outputs:
        loaded(COMPARISON_WRITERS, format_name)(comparison, path)


def check_outputs(outputs: list[tuple[str, Path]], sources: Sequence[Path] = ()) -> None:
    """Raise UsageError or UnknownVerdict unless each report can be written, to a path of its own and over no record."""
    records, taken = {path.resolve() for path in sources}, set[Path]()
    for format_name, path in outputs:
        files = {file.resolve() for file in destinations(format_name, path)}
        if files & records:
            raise UsageError(f"-o {format_name}={path}: expected another file than the record it is made from")
        above = {parent for file in taken for parent in file.parents}
        if files & (taken | above) or any(parent in taken for file in files for parent in file.parents):
            raise UsageError(f"two reports would be written to {path}; expected a path for each")
        taken |= files
    for format_name, path in outputs:
        writers: Registry[Any] = WRITERS if format_name in WRITERS.names() else COMPARISON_WRITERS
        loaded(writers, format_name)
        for file in destinations(format_name, path):
            check_writable(file)


def write_reports(
    record: RunRecord, folder: Path, outputs: list[tuple[str, Path]], *, beside: bool
) -> tuple[str | None, tuple[str, ...]]:
    """Return the page's path, if any, and the reasons for failed reports, which leave the others as they are."""
    jobs: list[Job] = [(record, format_name, path) for format_name, path in outputs]
    jobs += _beside([(folder / "run.json", record)]) if beside else []
    page = None
    problems = []
    for _, format_name, path in jobs:
        problem = report_problem(WRITERS, format_name, record, path)
        if problem is not None:
            problems.append(problem)
        elif format_name == "html":
            page = str(path)
    return page, tuple(problems)


def report_problem(
    writers: Registry[Callable[[S, Path], None]], format_name: str, subject: S, path: Path
) -> str | None:
    try:
        if path == STDOUT:
            return _tell_github(subject)
        loaded(writers, format_name)(subject, path)
    except KvcheckError as error:
        return f"no {format_name} report at {path}: {error}"
    except Exception as error:  # a writer that breaks must not replace the verdict by 70
        return (
            f"no {format_name} report at {path}: its writer failed ({type(error).__name__}: {error}); "
            "please report it with the run.json"
        )
    return None


def _tell_github(subject: object) -> str | None:
    """Print workflow commands and append the step's summary. Return why there is no summary, or None."""
    from kvcheck.core.report.ci.outcome import outcome_of
    from kvcheck.core.report.ci.to_github import summary, workflow_commands

    assert isinstance(subject, (RunRecord, GateResult)), "a comparison has no format github"
    outcome = outcome_of(subject)
    for line in workflow_commands(outcome):
        say(line)
    path = os.environ.get(SUMMARY)
    if not path:
        return f"{SUMMARY} is not set, so there is no step summary"
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(summary(outcome))
    except OSError as error:
        return f"no step summary at {path}: {error.strerror or error}"
    return None


def loaded(writers: Registry[T], format_name: str) -> T:
    """Return the writer of a format. Raises UnknownVerdict if a library is missing or broken."""
    try:
        return writers.load(format_name)
    except ImportError as error:
        fix = f"pip install {error.name.partition('.')[0]}" if error.name else "kvcheck doctor"
        raise UnknownVerdict(f"format {format_name} is not usable here: {error}; next: {fix}") from error


def _output(text: str, known: tuple[Registry[Any], ...]) -> tuple[str, Path]:
    format_name, equals, path = text.partition("=")
    if not equals or not path:
        raise UsageError(f"-o {text!r}: expected FORMAT=PATH, for example -o html=report.html")
    every = dict.fromkeys(name for writers in known for name in writers.names())
    Registry(known[0].kind, dict.fromkeys(every, "")).require(format_name)
    if Path(path) == STDOUT and format_name != "github":
        raise UsageError(f"-o {text}: expected a path; only github goes to stdout, as -o github=-")
    return format_name, Path(path)


def _beside(records: list[tuple[Path, RunRecord]]) -> list[Job]:
    names = (("html", "report.html"), ("csv", ""))
    return [(record, format_name, path.parent / name) for path, record in records for format_name, name in names]


def _jobs(records: list[tuple[Path, RunRecord]], outputs: list[tuple[str, Path]]) -> list[Job]:
    if len(records) == 1:
        return [(records[0][1], format_name, path) for format_name, path in outputs]
    for format_name, path in outputs:
        if path != STDOUT and (path.is_file() or path.name.lower().endswith(_ending(format_name))):
            raise UsageError(
                f"-o {format_name}={path}: {len(records)} runs need a folder, one file per run, and got a file; "
                f"try -o {format_name}={path.parent / format_name}"
            )
    return [
        (record, format_name, path if path == STDOUT else path / f"{record.run_id}{_ending(format_name)}")
        for _, record in records
        for format_name, path in outputs
    ]


def _ending(format_name: str) -> str:
    return f".{ENDINGS.get(format_name, format_name)}"
