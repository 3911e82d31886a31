"""The ledger of a campaign: a file with one JSON line for each batch that has ended.

Invariants:
- A line is on disk before the next batch is counted. A killed process loses only the running batches.
- A truncated last line is left out. Any other damage, and a batch that is there twice, is a UsageError.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.stress.campaign.batches import BatchResult, parse_result

LEDGER = "batches.jsonl"


class Ledger:
    """Appends to the file. Raises UsageError, with the reason, if that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, found: Sequence[BatchResult]) -> None:
        """Write results; they are on disk when this returns."""
        text = "".join(f"{each.text()}\n" for each in found)
        try:
            with self._path.open("a", encoding="utf-8", newline="") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise UsageError(
                f"cannot write {self._path}: {error.strerror or error}; what it holds is kept: make room, and go on "
                "with --resume"
            ) from error


def read_ledger(path: Path) -> tuple[list[BatchResult], bool]:
    """Return the results in a file, and whether a truncated last line was left out. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8", errors="strict")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path}: {why_unread(error)}; expected the batches of a campaign, beside its run.json"
        ) from error
    *lines, rest = text.split("\n")
    found: list[BatchResult] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        try:
            result = parse_result(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: expected a batch of a campaign: {error}") from error
        if result.line in seen:
            raise UsageError(f"{path}, line {number}: expected each batch once, got {result.line} twice")
        seen.add(result.line)
        found.append(result)
    return found, bool(rest)
