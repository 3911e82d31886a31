"""`kvcheck baseline`: makes, shows and edits the file of known findings for `kvcheck gate --baseline`.

Invariants:
- A row needs a finding or an UNKNOWN cell in a record.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.command import CONTEXT, Command, group
from kvcheck.commands.options import DEFAULT_OUT, Format, StoredIn, command_line
from kvcheck.commands.terminal import print_json, say, say_table
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import RunRecord, read_record
from kvcheck.core.report.gate.baseline import BaselineEntry, BaselineTable, EntryStatus, judge_rows
from kvcheck.core.report.gate.baseline_file import add_rows, read_baseline, remove_rows, rows_of
from kvcheck.core.report.gate.result import has_enough
from kvcheck.core.report.wording import FINDING
from kvcheck.core.run.store import find_run

Runs = Annotated[list[str], typer.Argument(help="Run id or its unique start, folder, or run.json; repeatable.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The baseline: a TOML file.")]
Owner = Annotated[str, typer.Option(help="Who answers for the rows.")]
Reason = Annotated[str, typer.Option(help="Why they are accepted, such as an upstream number.")]
Expires = Annotated[str, typer.Option(metavar="YYYY-MM-DD", help="The last day on which they count.")]
Conditional = Annotated[bool, typer.Option("--conditional", help="Conditional findings as well.")]

app = group()


@app.command(cls=Command, context_settings=CONTEXT)
def save(
    runs: Runs,
    file: File,
    owner: Owner,
    reason: Reason,
    expires: Expires,
    conditional: Conditional = False,
    out: StoredIn = DEFAULT_OUT,
    format_name: Format = "text",
) -> None:
    """Make a file with a row for each code of a cell, with its places, and each UNKNOWN of the runs."""
    if file.exists():
        raise UsageError(
            f"baseline {file}: expected a file that is not there yet; use kvcheck baseline accept or prune"
        )
    rows: dict[tuple[object, ...], BaselineEntry] = {}
    for record in _records(runs, out):
        found = _rows(record, owner=owner, reason=reason, expires=expires, conditional=conditional)
        rows.update((row.key, row) for row in found)
    if not rows:
        raise UsageError("these runs have no finding and no UNKNOWN: expected something to save")
    add_rows(file, [*rows.values()])
    if format_name == "json":
        _print_rows(file, read_baseline(file))
        return
    say(f"{file}: {counted(len(rows), 'row')}")
    say(f" next   {command_line('gate', *runs, '--baseline', str(file), out=out)}")


@app.command(cls=Command, context_settings=CONTEXT)
def show(file: File, format_name: Format = "text") -> None:
    """Print the rows of a file, those that have expired marked."""
    entries = read_baseline(file)
    if format_name == "json":
        _print_rows(file, entries)
        return
    expired = [row for row in entries if row.expires < _today()]
    heads = ("row", "covers", "owner", "until", "reason")
    table = [
        (str(row.number), row.what, row.owner, row.expires.isoformat() + " EXPIRED" * (row in expired), row.reason)
        for row in entries
    ]
    say_table(heads, table, folding=(1, 4))
    say()
    say(f" {counted(len(entries), 'row')}, {len(expired)} expired")
    say(f" next   {command_line('gate', 'RUN', '--baseline', str(file))}")


@app.command(cls=Command, context_settings=CONTEXT)
def accept(
    what: Annotated[
        list[str], typer.Argument(help="A finding as RUN#N; or a run and a finding's id or an UNKNOWN cell's name.")
    ],
    file: File,
    owner: Owner,
    reason: Reason,
    expires: Expires,
    out: StoredIn = DEFAULT_OUT,
    format_name: Format = "text",
) -> None:
    """Add a row for one finding or one UNKNOWN of a run to a file."""
    run, name = _named(what)
    (record,) = _records([run], out)
    picked = _rows(_only(record, name), owner=owner, reason=reason, expires=expires, conditional=True)
    there = {
        replace(row, place=place).key: row.number
        for row in (read_baseline(file) if file.exists() else ())
        for place in row.places or (None,)
    }
    if (number := next((there[row.key] for row in picked if row.key in there), None)) is not None:
        raise UsageError(f"baseline {file}: row {number} is about this already; renew its date by hand")
    add_rows(file, picked)
    if format_name == "json":
        _print_rows(file, read_baseline(file)[-len(picked) :])
        return
    for row in picked:
        say(f"{file}: {row.what}")


@app.command(cls=Command, context_settings=CONTEXT)
def prune(file: File, runs: Runs, out: StoredIn = DEFAULT_OUT, format_name: Format = "text") -> None:
    """Take rows out of a file whose finding or UNKNOWN is gone from the runs, and whose cells have enough evidence."""
    records = _records(runs, out)
    # Rows that have expired are judged too: an old date does not show that something is gone.
    entries = read_baseline(file)
    gone = [
        row
        for row in judge_rows(entries, records, datetime.date.min, has_enough)
        if row.status == EntryStatus.GONE.value
    ]
    if gone:
        remove_rows(file, [row.row for row in gone])
    if format_name == "json":
        numbers = {row.row for row in gone}
        _print_rows(file, [row for row in entries if row.number in numbers])
        return
    for row in gone:
        say(f"removed row {row.row}: {row.what}")
    say(f"{file}: {counted(len(gone), 'row')} removed, {len(entries) - len(gone)} left")


def _print_rows(file: Path, rows: Iterable[BaselineEntry]) -> None:
    today = _today()
    plain = [{**asdict(row), "expires": row.expires.isoformat(), "is_expired": row.expires < today} for row in rows]
    print_json({"file": str(file), "rows": plain})


def _records(runs: list[str], out: Path) -> list[RunRecord]:
    """Read the runs. Raise UsageError for an incomplete one: its missing cells are no property of the code."""
    records = [read_record(path) for path in dict.fromkeys(find_run(name, out) for name in runs)]
    for record in records:
        if not record.complete:
            raise UsageError(f"run {record.run_id} was cut short; expected a complete run: {record.repro}")
    return records


def _named(what: list[str]) -> tuple[str, str]:
    if len(what) == 2:
        return what[0], what[1]
    named = FINDING.fullmatch(what[0])
    if len(what) > 2 or named is None or named["part"] is not None:
        raise UsageError(
            f"{' '.join(what)}: expected one finding as RUN#N, such as 20260102-030405-0c4e91d7#1, or a run and the "
            "name of an UNKNOWN cell"
        )
    return named["run"], named["number"]


def _only(record: RunRecord, name: str) -> RunRecord:
    wanted = name if name.startswith(f"{record.run_id}.") else f"{record.run_id}.{name}"
    found = next((each for each in record.findings if wanted == each.id), None)
    if found is not None and found.cause is not None:
        raise UsageError(f"finding {name} is a symptom of {found.cause}; accept its cause, which covers it")
    if found is not None:
        return replace(record, findings=(found,), scenarios=())
    cells = tuple(row for row in record.scenarios if row.id == name)
    unknown = rows_of(replace(record, findings=(), scenarios=cells), owner="", reason="", expires=datetime.date.min)
    if not any(row.kind is BaselineTable.UNKNOWN for row in unknown):
        causes = [each.id.removeprefix(f"{record.run_id}.") for each in record.findings if each.cause is None]
        known = ", ".join(causes) or "none"
        raise UsageError(f"run {record.run_id} has no finding and no UNKNOWN cell {name!r}; its findings: {known}")
    return replace(record, findings=(), scenarios=cells)


def _rows(record: RunRecord, *, owner: str, reason: str, expires: str, conditional: bool) -> tuple[BaselineEntry, ...]:
    for name, text in (("owner", owner), ("reason", reason)):
        if not text.strip():
            raise UsageError(f"--{name}: expected a text, got {text!r}")
    return rows_of(record, owner=owner, reason=reason, expires=_day(expires), conditional=conditional)


def _day(text: str) -> datetime.date:
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"--expires {text!r}: expected a date such as 2027-03-01") from error
    if day < _today():
        raise UsageError(f"--expires {text}: expected today or later, got a date that has passed")
    return day


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
