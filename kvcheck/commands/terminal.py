"""Text for the terminal: rows of cells, findings with their replay lines, the last three lines.

Invariants:
- Counts that do not apply are not printed.
- Every line goes through `say`, `complain` or `warn`, which escape control characters.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from typing import TextIO

import typer

from kvcheck.commands.probes import reviewed_findings
from kvcheck.core.base.causes import Bug, bugs
from kvcheck.core.base.nouns import counted, plural
from kvcheck.core.base.record import Evidence, Finding, RunRecord, ScenarioResult, Verdict, to_plain
from kvcheck.core.base.server_facts import SERVE_CASES, is_requirement, server_of
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.prices import is_check, is_enough
from kvcheck.core.report.view import cause_view, verdicts_text, work_counts
from kvcheck.core.report.wording import conditional_text, coverage_text, observed_texts, rounds_word

_WORDS = {Verdict.PASS: "PASS", Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "????"}
MAX_SHOWN = 3
_COLOURS = {
    **dict.fromkeys(("PASS", "OK", "FIXED", "CLEAN"), "green"),
    **dict.fromkeys(("FAIL", "SLOWER", "STILL FAILS"), "red"),
    **dict.fromkeys(("????", "UNKNOWN", "INCONCLUSIVE", "NOT REPRODUCED"), "yellow"),
}
_VERDICT = re.compile(rf"^ ({'|'.join(map(re.escape, _COLOURS))})(?= |$)")
_CLEAR = "\r\x1b[K"
"""Return to the start of a terminal line, and empty it."""
WRITING = threading.RLock()
"""Held while a line is written: the clock of the progress line has a thread of its own."""
USUAL_COLUMNS = 80


def say(line: str = "") -> None:
    """Print a line on stdout, its verdict coloured on a terminal. Raises OSError."""
    text = _shown(line, getattr(sys.stdout, "encoding", None))
    is_coloured = has_colours(sys.stdout)
    if is_coloured:
        text = _VERDICT.sub(lambda found: typer.style(found[0], fg=_COLOURS[found[1]], bold=True), text)
    typer.echo(text, color=is_coloured or None)


def has_colours(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def is_live() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def passing(text: str) -> None:
    """On a terminal, replace the passing line of stderr, cut to its width."""
    if is_live():
        with WRITING:
            sys.stderr.write(f"{_CLEAR}{printable(text)[: _columns() - 1]}")
            sys.stderr.flush()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError, AttributeError):
        return USUAL_COLUMNS


def clear_passing() -> None:
    passing("")


HEARTBEAT_S = 30.0
"""Seconds between two lines of progress without a terminal."""


class ProgressLine:
    """Progress with a clock: in place on a terminal; elsewhere, as in a log of CI, a line each HEARTBEAT_S."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._written_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def show(self, text: str) -> None:
        elapsed_s = self.elapsed_s
        passing(f"{elapsed_s:6.1f}s  {text}")
        if not is_live() and elapsed_s - self._written_s >= HEARTBEAT_S:
            self._written_s = elapsed_s
            complain(f"{elapsed_s:.0f} s: {text}")


class Terminal:
    """Shows a run: results on stdout, progress on stderr. is_quiet: only the record goes to stdout, at the end."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self._line = ProgressLine()

    def say(self, text: str) -> None:
        if not self.is_quiet:
            with WRITING:
                clear_passing()
                say(text)

    def warn(self, text: str) -> None:
        warn(text)

    def progress(self, text: str) -> None:
        if not self.is_quiet:
            self._line.show(text)

    def clear(self) -> None:
        if not self.is_quiet:
            clear_passing()

    def record(self, record: RunRecord) -> None:
        if self.is_quiet:
            # In ASCII: the same JSON, whatever the encoding of stdout, and nothing that a terminal obeys.
            sys.stdout.write(json.dumps(to_plain(record), indent=1) + "\n")
            sys.stdout.flush()


def complain(message: str) -> None:
    """Print a line on stderr, ignoring a failed write: there is no other place to report it."""
    try:
        with WRITING:
            clear_passing()
            typer.echo(_shown(f"kvcheck: {message}", getattr(sys.stderr, "encoding", None)), err=True)
    except OSError:
        return


def warn(message: str) -> None:
    complain(f"warning: {message}")


def _shown(line: str, encoding: str | None) -> str:
    name = encoding or "utf-8"
    return printable(line).encode(name, "backslashreplace").decode(name)


def cell_lines(row: ScenarioResult, findings: Iterable[Finding] = ()) -> list[str]:
    evidence, found = row.evidence, row.coverage
    unit = rounds_word(evidence).removesuffix("s")
    counts = [
        counted(row.schedules, unit)
        if found is None
        else f"{row.schedules}/{found.wanted} {plural(found.wanted, unit)}"
    ]
    if is_requirement(row):
        counts = []  # it has no evidence of its own
    elif row.id in SERVE_CASES:
        counts = [counted(row.schedules, "round")]  # what was answered is judged in rows of its own
    elif evidence.observed:
        happened = {kind: count for kind, count in evidence.observed.items() if count}
        counts += [counted(evidence.requests, "request"), *observed_texts(happened)]
    else:
        if evidence.traces is not None and evidence.traces < row.schedules:
            counts.append(f"{evidence.traces:,} of them distinct")
        counts += [*_counts(evidence), counted(sum(evidence.words_verified.values()), "word")]
        counts += [counted(evidence.refusals, "refusal")] if evidence.refusals else []
    seconds = [] if row.id in SERVE_CASES else [f"{row.duration_s:.1f}s"]
    marks = [text] if (text := conditional_text(row.id, findings)) else []
    line = f" {_WORDS[row.verdict]}  {row.id:<34} {'  '.join([*counts, *seconds, *marks])}"
    why = [f"       {': '.join(part for part in (row.code, row.reason) if part)}"] if row.reason else []
    tried = [f"       {coverage_text(found)}"] if found is not None and (found.tried or found.not_tried) else []
    return [line, *why, *tried]


def _counts(evidence: Evidence) -> list[str]:
    if evidence.lookups:
        wanted = evidence.pages_wanted
        hits = (evidence.device_hit_pages, evidence.host_hit_pages, evidence.storage_hit_pages)
        rates = "/".join("-" if not wanted or hit is None else f"{100 * hit / wanted:.0f}" for hit in hits)
        evictions = f"{evidence.device_evictions or 0}+{evidence.host_evictions or 0} evictions"
        return [counted(evidence.loads or 0, "load"), evictions, f"hits {rates} %"]
    sealed = evidence.words_verified.get("sealed", 0) * 8
    counts = [counted(evidence.transfers or 0, "transfer"), f"{sealed:,} bytes sealed"] if sealed else []
    named = (("retraction", evidence.retractions), ("resume", evidence.resumes))
    counts += [counted(value, noun) for noun, value in named if value is not None]
    return counts + ([] if evidence.foreign_reuses is None else [f"{evidence.foreign_reuses} into reused pages"])


def bug_lines(number: int, bug: Bug, record: RunRecord | None = None) -> list[str]:
    """record: of the run that stores both; None: lines are whole and without a story."""
    cause = cause_view(number, bug, record)
    finding = cause.finding
    head = f" {number}  {finding.code} {cause.title}   {finding.cell}   (oracle {finding.oracle})"
    return [head, *(f"    {label:<8}{text}" for label, text in cause.facts.items())]


def findings_block(findings: tuple[Finding, ...], record: RunRecord | None = None) -> list[str]:
    """Return the first causes, different codes first, and the number left out; reviewed conditions as a line a cell."""
    reviewed = {} if record is None else reviewed_findings(record, findings)
    told = {finding.id for found in reviewed.values() for finding in found}
    findings = tuple(finding for finding in findings if finding.id not in told)
    found = bugs(findings)
    first_of_code = {bug.cause.code: bug for bug in reversed(found)}
    ordered = sorted(found, key=lambda bug: (bug.cause.condition is not None, bug is not first_of_code[bug.cause.code]))
    shown = ordered[:MAX_SHOWN]
    lines = [line for number, bug in enumerate(shown, 1) for line in (*bug_lines(number, bug, record), "")]
    if len(found) > len(shown):
        noun = "more cause" if len(found) < len(findings) else "more finding"
        lines.append(f"    and {counted(len(found) - len(shown), noun)} in the report")
    return lines + [
        f" ----  {cell}: {counted(len(each), 'conditional finding')}, reviewed for this release: {why}"
        for (cell, why), each in reviewed.items()
    ]


def verdict_lines(record: RunRecord) -> list[str]:
    parts = [verdicts_text([*(row.verdict for row in record.scenarios), *(row.verdict for row in record.mutants)])]
    if conditional := sum(finding.condition is not None for finding in record.findings):
        parts.append(counted(conditional, "conditional finding"))
    state = "" if record.complete else "   (interrupted: partial)"
    work = ", ".join(counted(count, noun) for count, noun in work_counts(record))
    if record.bench:
        usable = sum(map(is_enough, record.bench))
        least = min(len(row.ratios) for row in record.bench)
        what = "checked" if any(map(is_check, record.bench)) else "with a price"
        work = f"{usable} of {counted(len(record.bench), 'row')} {what}, rounds: {least} or more"
    return [
        f" {record.verdict.value.upper()}  {', '.join(filter(None, parts)) or 'nothing was judged'}   "
        f"{work}   {record.duration_s:.1f}s{state}"
    ]


def left_out_lines(record: RunRecord) -> list[str]:
    passing = [row for row in record.scenarios if row.verdict is Verdict.PASS]
    planned = [(row.coverage.wanted, row.schedules) for row in passing if row.coverage is not None]
    left = sum(max(0, wanted - ran) for wanted, ran in planned)
    if not left or not record.complete or server_of(record) is not None:
        return []
    total = counted(sum(wanted for wanted, _ in planned), "planned schedule")
    return [f" left out    {left:,} of {total}: the time was up; for more, --max-time SECONDS", ""]


def place_lines(record: RunRecord, where: str) -> list[str]:
    return [f" report {where}", f" exit {record.exit_code}"]
