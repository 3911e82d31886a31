"""Hand-written edits: a JSON list of bugs, each put in by exact texts, judged like generated edits.

    [{"name", "edits": [{"file", "old", "new"}], "link", "engine", "what", "expect": [codes]}]    four may be left out

Invariants:
- An old text occurs exactly once in its file, below kvcheck/core; the edited files compile.
- A bug is tried in every cell that reaches a line of it, in all schedules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcheck.core.base.codes import CODES
from kvcheck.core.base.errors import UsageError, why_unread
from tools.mutation.campaign import Subject
from tools.mutation.edits import CACHE, PACKAGE, diff_of_texts
from tools.mutation.reach import Reach
from tools.mutation.results import Result
from tools.mutation.source import Source

OPTIONAL = ("link", "engine", "what", "expect")
KEYS = {"name", "edits", *OPTIONAL}
NEEDED = f"name and edits, and if you like {', '.join(OPTIONAL)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandEdit:
    """One bug. texts: the edited files. places: (file, first line, last line) of what was replaced, before the edit."""

    name: str
    link: str
    what: str
    expect: tuple[str, ...]
    texts: Mapping[str, str]
    places: tuple[tuple[str, int, int], ...]
    diff: str


def read_hand_edits(path: Path) -> list[HandEdit]:
    """The bugs of a file, put into the source. Raises UsageError with the bug and the reason."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {why_unread(error)}; expected a JSON list of edits") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: expected a JSON list of objects with {NEEDED}, one at least")
    found = [_hand_edit(row, path) for row in rows]
    names = [each.name for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{path}: expected each name once, got {', '.join(twice)} twice")
    return found


def hand_subject(edit: HandEdit, reach: Reach) -> Subject:
    reached = {
        each.cell: each.all_bits
        for each in reach.cells
        if any(not file.startswith(f"{CACHE}/") or each.bits(file, first, last) for file, first, last in edit.places)
    }
    file, first, _ = edit.places[0]
    result = Result(
        id=edit.name,
        file=file,
        line_number=first,
        function="",
        operator="hand-written",
        diff=edit.diff,
        outcome="unreached",
        reaching=len(reached),
        link=edit.link,
        what=edit.what,
        expect=edit.expect,
    )
    return Subject(result=result, texts=edit.texts, reached=reached, is_in_turn=True)


def _hand_edit(row: Mapping[str, Any], path: Path) -> HandEdit:
    name, edits, expect = row.get("name"), row.get("edits"), row.get("expect", [])
    where = f"{path}, {name or 'a row without a name'}"
    if not name or not isinstance(name, str) or not edits or not isinstance(edits, list) or set(row) - KEYS:
        raise UsageError(f"{where}: expected {NEEDED}, got {', '.join(sorted(map(str, row)))}")
    if not isinstance(expect, list) or any(code not in CODES for code in expect):
        raise UsageError(f"{where}: expected codes of kvcheck list codes, got {expect!r}")
    before: dict[str, str] = {}
    texts: dict[str, str] = {}
    places: list[tuple[str, int, int]] = []
    for edit in edits:
        if not isinstance(edit, dict) or set(edit) != {"file", "old", "new"}:
            raise UsageError(f"{where}: expected an edit with file, old and new, got {str(edit)[:80]!r}")
        file = str(edit["file"]).removeprefix("kvcheck/")
        if file not in texts:
            before[file] = texts[file] = _text_of(file, where)
        old, new = str(edit["old"]), str(edit["new"])
        if (times := texts[file].count(old) if old else 0) != 1:
            raise UsageError(f"{where}: expected its old text once in {file}, found it {times} times: {old!r}")
        texts[file] = texts[file].replace(old, new)
        places += _places(file, before[file], old)
    for file, text in texts.items():
        try:
            compile(text, file, "exec")
        except SyntaxError as error:
            raise UsageError(f"{where}: {file} does not compile: {error}") from error
    return HandEdit(
        name=name,
        link=str(row.get("link", "")),
        what=str(row.get("what", "")),
        expect=tuple(map(str, expect)),
        texts=texts,
        places=tuple(places),
        diff="\n".join(diff_of_texts(before[file], texts[file]) for file in texts),
    )


def _text_of(file: str, where: str) -> str:
    target = (PACKAGE / file).resolve()
    if not target.is_relative_to((PACKAGE / "core").resolve()) or not target.is_file():
        raise UsageError(f"{where}: expected a file below kvcheck/core, got {file!r}")
    return target.read_text(encoding="utf-8")


def _places(file: str, text: str, old: str) -> Sequence[tuple[str, int, int]]:
    """The lines of a text, and those of the functions that it begins and ends in."""
    if old not in text:  # an edit of what an earlier one of the same bug has written
        return ()
    start = text.index(old)
    first = text.count("\n", 0, start) + 1
    last = text.count("\n", 0, start + len(old.rstrip())) + 1
    source = Source(file, text)
    around = {name: (low, high) for name, low, high in source.functions}
    names = {source.function_at(first), source.function_at(last)}
    inside = [(file, *around[name]) for name in sorted(names) if name]
    return inside or [(file, 0, 0)]
