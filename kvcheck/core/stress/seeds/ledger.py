"""The ledger of a run of many seeds: a file with one JSON line for each ended batch.

Invariants:
- A line is on disk before the next batch is counted: a killed process loses only running batches.
- A last line that was cut off is left out. Other damage, and a doubled or foreign batch, is a UsageError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.record import to_plain
from kvcheck.core.stress.seeds.batches import BatchResult, SeedsPlan, result_from

LEDGER = "batches.jsonl"


def append(path: Path, found: Sequence[BatchResult]) -> None:
    text = "".join(f"{json.dumps(to_plain(each))}\n" for each in found)
    try:
        with path.open("a", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}; what it holds is kept: make room, and go on with --resume"
        ) from error


def read_ledger(path: Path, plan: SeedsPlan) -> tuple[list[BatchResult], bool]:
    """Return the results of a run of this plan, and whether the last line was cut off. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8", errors="strict")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path}: {why_unread(error)}; expected the batches of a run with --seeds, beside its run.json"
        ) from error
    *lines, rest = text.split("\n")
    found: dict[str, BatchResult] = {}
    for number, line in enumerate(lines, 1):
        try:
            result = result_from(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: expected a batch of a run with --seeds: {error}") from error
        if result.line in found or not plan.has(result.plan):
            why = "is there twice" if result.line in found else "is not of the plan of its run"
            raise UsageError(f"{path}, line {number}: {result.line} {why}; expected each batch of the plan once")
        found[result.line] = result
    return [*found.values()], bool(rest)
