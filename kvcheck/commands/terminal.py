"""Text for the terminal: rows of cells, findings with their replay lines, the last three lines.

Invariants:
- Counts that do not apply are not printed.
- Every line goes through `say`, `complain` or `warn`, which escape control characters.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

import typer

from kvcheck.core.base.nouns import counted, plural
from kvcheck.core.base.record import Evidence, Finding, RunRecord, ScenarioResult, Verdict, to_plain
from kvcheck.core.base.server_facts import SERVE_CASES, is_requirement
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.wording import (
    conditional_text,
    coverage_text,
    observed_texts,
    rounds_word,
    table_lines,
    wrapped,
)

_WORDS = {Verdict.PASS: "PASS", Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "????"}
MAX_SHOWN = 3
_STYLES = {
    r"^ (PASS|OK|FIXED|CLEAN)(?= |$)": "bold green",
    r"^ (FAIL|SLOWER|STILL FAILS)(?= |$)": "bold red",
    r"^ (\?\?\?\?|UNKNOWN|INCONCLUSIVE|NOT REPRODUCED)(?= |$)": "bold yellow",
    r"^ ok(?=  )": "green",
    r"^ (missing|unknown)(?=  )": "bold yellow",
    r"(?<!\w)✔": "green",
    r"(?<!\w)✘": "bold red",
    r"(?<![\w?])\?(?=[\d ]|[a-z]|$)": "bold yellow",
    r"\bKV\d{3}\b": "magenta",
    r"\b(kvcheck|pytest) [a-z-].*": "cyan",
    r"(?<=^ report )\S.*": "underline",
}
"""Styles by the text that they are given to: verdicts, marks, codes, commands and paths."""
WHOLE = re.compile(r"^ +(from|fails|next|then) |\bkvcheck [a-z]+ ")
"""Lines that are never folded."""
_MARKS = str.maketrans({"✔": "+", "✘": "x", "·": ".", "━": "=", "─": "-", "…": "...", "±": "+-"})
"""Replacements for an output that cannot encode them."""
WRITING = threading.RLock()
"""Held while a line is written: the clock of the progress line has a thread of its own."""
USUAL_COLUMNS, USUAL_ROWS = 80, 24
UNWRAPPED = 10_000
"""Columns without a terminal, unless COLUMNS is set: lines stay whole, to be searched."""
_ERASE = "\x1b[J"
"""Empty the terminal from here on."""


def say(line: str = "") -> None:
    """Print a line on stdout, its verdict coloured on a terminal. Raises OSError."""
    text = _shown(line, getattr(sys.stdout, "encoding", None))
    is_coloured = has_colours(sys.stdout)
    typer.echo(coloured(text) if is_coloured else text, color=is_coloured or None)


def say_fitting(line: str) -> None:
    """Print a line, folded at spaces to the terminal's width unless it has a command or a schedule, to be copied."""
    for part in [line] if WHOLE.search(line) else wrapped(line, columns()) or [""]:
        say(part)


def say_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, folding: Sequence[int] = (-1,)) -> None:
    """Print a table in the terminal's width. folding: columns of prose."""
    for line in table_lines([heads, *rows], columns(), folding=folding):
        say(line)


def print_json(value: object, *, indent: int | None = 1) -> None:
    """Print JSON on stdout, in ASCII: the same in any encoding, and nothing that a terminal obeys. Raises OSError."""
    sys.stdout.write(json.dumps(to_plain(value), indent=indent, allow_nan=False) + "\n")
    sys.stdout.flush()


def coloured(line: str) -> str:
    """Return the line with the codes of its styles."""
    from rich.console import Console
    from rich.text import Text

    text = Text(line)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=max(len(line), 1) + 1)
    for pattern, style in _STYLES.items():
        for found in re.finditer(pattern, line):
            text.stylize(style, *found.span())
    with console.capture() as made:
        console.print(text, soft_wrap=True, end="")
    return made.get()


def has_colours(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def is_live() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class _Live:
    """The last lines of a terminal, which each call replaces."""

    def __init__(self) -> None:
        self._rows = 0

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines, cut to the width; of lines that do not fit its height only the last is shown."""
        if not is_live():
            return
        width, height = terminal_size(sys.stderr)
        shown = [printable(line)[: width - 1] for line in (lines if len(lines) < height else lines[-1:])]
        styled = [coloured(line) for line in shown] if has_colours(sys.stderr) else shown
        with WRITING:
            up = f"\x1b[{self._rows - 1}A" if self._rows > 1 else ""
            sys.stderr.write(f"\r{up}{_ERASE}" + "\n".join(styled))
            sys.stderr.flush()
            self._rows = len(shown)


_LIVE = _Live()


def passing(text: str) -> None:
    """On a terminal, replace the passing lines of stderr by one, cut to its width."""
    _LIVE.show([text])


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return columns and rows; without a terminal USUAL_COLUMNS, or COLUMNS of the environment."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns, rows = 0, 0
    named = os.environ.get("COLUMNS", "")
    return columns or (int(named) if named.isdecimal() and int(named) else USUAL_COLUMNS), rows or USUAL_ROWS


def columns() -> int:
    """Return the columns of what is printed on stdout."""
    is_set = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return terminal_size(sys.stdout)[0] if is_set else UNWRAPPED


def clear_passing() -> None:
    _LIVE.show([])


HEARTBEAT_S = 30.0
"""Seconds between two lines of progress without a terminal."""
BAR = 30
"""Most characters of the bar of a live line; a sixth of a narrow terminal."""


class ProgressLine:
    """Progress with a clock: in place on a terminal; elsewhere, as in a log of CI, a line each HEARTBEAT_S."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._written_s = 0.0

    def show(self, text: str, share: float | None = None, above: Sequence[str] = ()) -> None:
        """share: of the whole that is done, from 0 to 1; None if it is not known. above: lines shown above it."""
        elapsed_s = time.monotonic() - self._began
        clock = _clock(elapsed_s)
        if share is not None and share >= LEAST_SHARE:
            clock += f" of about {_clock(elapsed_s / min(share, 1.0))}"
        size = min(BAR, terminal_size(sys.stderr)[0] // 6)
        bar = "" if share is None else f"{'━' * round(size * min(share, 1.0)):─<{size}}  "
        if is_live():
            _LIVE.show([*above, f" {bar}{clock}  {text}"])
        elif elapsed_s - self._written_s >= HEARTBEAT_S:
            self._written_s = elapsed_s
            complain(f"{clock}: {text}")


LEAST_SHARE = 0.05
"""Share of a run below which its end is not estimated."""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Terminal:
    """Shows a run: results on stdout, progress on stderr.

    is_quiet: only the record goes to stdout, at the end. is_verbose: details are printed. board: makes the lines above
    the progress of a terminal, for its columns.
    """

    def __init__(self, *, is_quiet: bool, is_verbose: bool = False) -> None:
        self.is_quiet, self.is_verbose = is_quiet, is_verbose
        self.board: Callable[[int], list[str]] | None = None
        self._line = ProgressLine()

    def say(self, text: str) -> None:
        if not self.is_quiet:
            with WRITING:
                clear_passing()
                say(text)

    def warn(self, text: str) -> None:
        warn(text)

    def detail(self, text: str) -> None:
        if self.is_verbose:
            self.say(text)

    def progress(self, text: str, share: float | None = None) -> None:
        if not self.is_quiet:
            is_drawn = self.board is not None and is_live()
            self._line.show(text, share, self.board(terminal_size(sys.stderr)[0]) if is_drawn and self.board else ())

    def clear(self) -> None:
        if not self.is_quiet:
            clear_passing()

    def record(self, record: RunRecord) -> None:
        if self.is_quiet:
            print_json(record)


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
    name, text = encoding or "utf-8", printable(line)
    try:
        return text.encode(name).decode(name)
    except UnicodeEncodeError:
        return text.translate(_MARKS).encode(name, "backslashreplace").decode(name)


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
