"""Results: the outcome of each edit, kept as one JSON line each, so that a campaign that was cut short goes on.

Invariants:
- A line is one write. A last line that was cut short is ignored when the file is read.
- A file holds the results of one code, one seed and one budget: they are in its first line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.record import value_from

RESULTS_FILE = "results.jsonl"
OUTCOMES = ("killed", "unknown", "survived", "hang", "crash", "unreached", "equivalent", "legal", "invalid", "unclear")
SURVIVED = ("survived", "unknown")
"""Outcomes of edits that no oracle found."""
NOT_GREEN = ("killed", "unknown", "hang", "crash")
"""Outcomes with which a default run does not pass, whether an oracle names the edit or not."""
JUDGED = ("killed", "unknown", "survived", "hang", "crash", "unclear")
"""Outcomes of edits that ran and are faults: neither equivalent nor legal. Shares are shares of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one edit.

    oracle, code, line, message: of the first finding, the plan line that shows it. kinds: every oracle and code of that
    schedule. cells: schedules that ran, by cell. cpu_s: of the schedules. total_cpu_s: with imports. reason: why an
    edit is equivalent or legal, or why nothing finds it. note: a broken oracle, or why a kill is none. is_guard: the
    edit is in a check. link, what, expect: of an edit written by hand.
    """

    id: str
    file: str
    line_number: int
    function: str
    operator: str
    diff: str
    outcome: str
    oracle: str = ""
    code: str = ""
    line: str = ""
    message: str = ""
    kinds: tuple[str, ...] = ()
    cells: dict[str, int] = field(default_factory=dict)
    reaching: int = 0
    schedules: int = 0
    cpu_s: float = 0.0
    total_cpu_s: float = 0.0
    reason: str = ""
    note: str = ""
    is_guard: bool = False
    link: str = ""
    what: str = ""
    expect: tuple[str, ...] = ()

    @property
    def is_kill(self) -> bool:
        return self.outcome == "killed"

    @property
    def is_expected(self) -> bool:
        return self.is_kill and (not self.expect or self.code in self.expect)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """The settings of all results of a file. cells: names of scenarios and shapes, where not all are tried."""

    code: str
    seed: int
    schedules: int
    cpu_s: float
    cells: str = ""


class ResultFile:
    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS_FILE

    def open(self, campaign: Campaign) -> dict[str, Result]:
        """Begin the file, or go on with it: results by id. Raises UsageError if it is another campaign's."""
        if not self.path.exists():
            self._append({"campaign": asdict(campaign)})
            return {}
        _drop_cut_line(self.path)
        head, results = read_results(self.path)
        if head != campaign:
            why = "the source has changed since; " if head.code != campaign.code else ""
            raise UsageError(
                f"{self.path}: expected results of {campaign}, got {head}; {why}choose another --out, and --again with "
                "this folder for the same edits"
            )
        return results

    def add(self, result: Result) -> None:
        self._append({"result": asdict(result)})

    def _append(self, value: Mapping[str, object]) -> None:
        try:
            with self.path.open("ab", buffering=0) as stream:
                stream.write((json.dumps(value, sort_keys=True) + "\n").encode())
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}; choose another --out") from error


def read_results(path: Path) -> tuple[Campaign, dict[str, Result]]:
    """The campaign of a file and its results by id; the last result of an id counts. Raises UsageError."""
    if path.is_dir():
        path = path / RESULTS_FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last one is empty, or was cut short
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {why_unread(error)}; expected a results.jsonl of tools.mutation"
        ) from error
    campaign, results = None, {}
    for line in lines:
        try:
            if campaign is None:
                campaign = value_from(Campaign, json.loads(line)["campaign"], "campaign")
            else:
                result = value_from(Result, json.loads(line)["result"], "result")
                results[result.id] = result
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: expected a line of tools.mutation, got {line[:60]!r}: {error}") from error
    if campaign is None:
        raise UsageError(f"{path}: expected results of tools.mutation, found no head line")
    return campaign, results


def _drop_cut_line(path: Path) -> None:
    """Remove a last line without its end, so that the next one begins a line."""
    whole = path.read_bytes()
    kept = whole.rfind(b"\n") + 1
    if kept < len(whole):
        os.truncate(path, kept)
