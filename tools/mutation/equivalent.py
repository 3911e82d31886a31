"""Edits that are explained: equivalent ones with the argument for it, and survivors with why they are left.

Invariants:
- Every id is an edit of its file as it is today. One that is not is an error: its argument speaks of other code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvcheck.core.base.errors import UsageError, why_unread
from tools.mutation.edits import Edit
from tools.mutation.results import SURVIVED, Result

LIST = Path(__file__).parent / "equivalent.toml"
LEGAL = "a legal choice"
"""A reason that begins with this marks another correct way to do it. A finding about it would be a false alarm."""
LEFT = Path(__file__).parent / "survivors.toml"
"""Survivors that are judged all the same, each with the reason why nothing finds it."""


def read_equivalent(path: Path = LIST) -> dict[str, dict[str, str]]:
    """File -> id -> argument. Raises UsageError."""
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {why_unread(error)}; expected a TOML file with a table for each file"
        ) from error
    for file, rows in value.items():
        if not isinstance(rows, dict) or not all(isinstance(text, str) and text.strip() for text in rows.values()):
            raise UsageError(f"{path}, {file}: expected a table of ids, each with an argument")
    return value


def reasons_for(edits: Mapping[str, Sequence[Edit]], path: Path = LIST) -> dict[str, str]:
    """Id -> argument, of the listed edits of these files. edits: by file. Raises UsageError for ids that are none."""
    reasons: dict[str, str] = {}
    for file, rows in read_equivalent(path).items():
        if file in edits:
            reasons |= rows
            if gone := sorted(set(rows) - {edit.id for edit in edits[file]}):
                raise UsageError(f"{path}: expected ids of edits of {file}, got {', '.join(gone)}; remove their rows")
    return reasons


def explained(result: Result, equivalent: Mapping[str, str], left: Mapping[str, str]) -> Result:
    """The result with its reason, by the lists as they are now. equivalent, left: reasons by id. A kill needs none."""
    reason = equivalent.get(result.id)
    if reason is not None and result.outcome in SURVIVED:
        return replace(result, reason=reason, outcome="equivalent")
    reason = left.get(result.id)
    if reason is None or result.outcome not in (*SURVIVED, "hang", "crash"):
        return result
    is_legal = reason.startswith(LEGAL) and result.outcome in SURVIVED
    return replace(result, reason=reason, outcome="legal" if is_legal else result.outcome)
