"""Files of baselines: TOML that people edit.

    [[finding]]
    engine = "vllm"                                # builtin, sglang, vllm, lmcache, "vllm server"; any if left out
    cell = "preemption/scheduler.priority"         # * matches any text, also in place
    code = "KV102"
    place = "content: device kv"                   # as kvcheck gate prints it; a list has several
    owner = "kv team"
    reason = "vllm-project/vllm#43569"
    expires = 2027-03-01                           # the last valid day

    [[unknown]]
    engine = "sglang"
    cell = "hicache-hybrid/index-moves.mamba-tree-kernel"
    says = "only supports layout"                  # a part of the reason; * matches any text
    owner = "kv team"
    reason = "0.5.14 and 0.5.15 keep states on the host by direct copies alone"
    expires = 2027-03-01

Invariants:
- Adding or removing a row keeps every other line of the file, comments and order too. The new text is parsed and
  compared before the file is replaced.
- A wrong file is a UsageError with the row's number.
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from kvcheck.core.base.causes import place_of
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.record import RunRecord, Verdict
from kvcheck.core.base.registry import did_you_mean, unknown_name
from kvcheck.core.report.gate.baseline import BaselineEntry, BaselineTable, engine_name, roots
from kvcheck.core.run.store import write_text

ABOUT = {BaselineTable.FINDING: ("cell", "code", "place"), BaselineTable.UNKNOWN: ("cell", "says")}
WHOSE = ("owner", "reason", "expires")
HEADER = re.compile(r"^\[\[\s*(finding|unknown)\s*\]\]", re.MULTILINE)
COMMENTS = re.compile(r"(?:^[ \t]*#[^\n]*\n)+\Z", re.MULTILINE)


SHIPPED = Path(__file__).parent / "engines.toml"
"""The known findings of the newest engines, which comes with kvcheck."""


def read_baseline(path: Path) -> tuple[BaselineEntry, ...]:
    """Return the rows of a file; the name "engines" alone is the file that comes with kvcheck."""
    path = SHIPPED if str(path) == SHIPPED.stem and not path.exists() else path
    return parse_baseline(_text_of(path), path)


def parse_baseline(text: str, path: Path) -> tuple[BaselineEntry, ...]:
    """Return the rows of a text. path: for messages. Raises UsageError."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"baseline {path}: {why_unread(error)}; expected TOML with [[finding]] and [[unknown]] tables"
        ) from error
    rows: list[BaselineEntry] = []
    for key, tables in raw.items():
        if key not in [kind.value for kind in BaselineTable]:
            raise UsageError(f"baseline {path}: unknown key {key!r}; known: [[finding]] and [[unknown]] tables")
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise UsageError(f"baseline {path}: {key}: expected tables in double brackets, [[{key}]]")
    numbers = _numbers(text, raw)
    for kind in BaselineTable:
        for at, table in enumerate(raw.get(kind.value, ())):
            number = numbers[kind][at]
            rows.append(_entry(f"baseline {path}, row {number} ({kind.value} {at + 1})", kind, number, table))
    # Tables are parsed by kind; rows keep the order of the file.
    rows.sort(key=lambda entry: entry.number)
    seen: dict[tuple[object, ...], int] = {}
    for entry in rows:
        if (first := seen.setdefault(entry.key, entry.number)) != entry.number:
            raise UsageError(f"baseline {path}, row {entry.number}: the same as row {first}; expected one of them")
    return tuple(rows)


def add_rows(path: Path, entries: Sequence[BaselineEntry]) -> None:
    text = _text_of(path) if path.exists() else ""
    before = parse_baseline(text, path)
    gap = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
    after = text + gap + "\n".join(block(entry) for entry in entries)
    expected = [*before, *(replace(each, number=len(before) + at) for at, each in enumerate(entries, 1))]
    _replace(path, after, expected)


def remove_rows(path: Path, numbers: Collection[int]) -> None:
    """Remove rows, each with the comment lines right above it."""
    text = _text_of(path)
    before = parse_baseline(text, path)
    starts = [found.start() - len(_comments_above(text[: found.start()])) for found in HEADER.finditer(text)]
    edges = [0, *starts, len(text)]
    kept = [text[start:end] for at, (start, end) in enumerate(pairwise(edges)) if at not in numbers]
    left = [entry for entry in before if entry.number not in numbers]
    _replace(path, "".join(kept), [replace(each, number=at) for at, each in enumerate(left, 1)])


def block(entry: BaselineEntry) -> str:
    pairs = {"engine": entry.engine, **{key: getattr(entry, key) for key in (*ABOUT[entry.kind], *WHOSE)}}
    lines = [f"{key} = {_toml(value)}" for key, value in pairs.items() if value is not None]
    return "\n".join((f"[[{entry.kind.value}]]", *lines)) + "\n"


def rows_of(
    record: RunRecord, *, owner: str, reason: str, expires: datetime.date, conditional: bool = False
) -> tuple[BaselineEntry, ...]:
    """Make a row for each code of a cell, with the places of its causes, and for each UNKNOWN of a run. conditional:
    include conditional findings."""
    made = partial(BaselineEntry, number=0, engine=engine_name(record), owner=owner, reason=reason, expires=expires)
    places: dict[tuple[str, str], list[str]] = {}
    for at, each in roots(record.findings):
        if (each.condition is None or conditional) and each is record.findings[at]:
            places.setdefault((each.cell, each.code), []).append(place_of(each))
    found = [
        made(kind=BaselineTable.FINDING, cell=cell, code=code, place=each[0] if len(each) == 1 else tuple(each))
        for (cell, code), named in places.items()
        for each in [[*dict.fromkeys(named)]]
    ]
    found += [
        made(kind=BaselineTable.UNKNOWN, cell=row.id, says=_known_by(row.reason))
        for row in record.scenarios
        if row.verdict is Verdict.UNKNOWN and row.reason
    ]
    return tuple({entry.key: entry for entry in found}.values())


def _known_by(reason: str) -> str:
    """The stable part of a reason: without numbers and without a final part in brackets."""
    return re.sub(r"\d+(?:[.,]\d+)*", "*", reason.splitlines()[0].partition(" (")[0])


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # editors on Windows write a byte order mark
    except OSError as error:
        raise UsageError(
            f"baseline {path}: {why_unread(error)}; expected a TOML file, which kvcheck baseline save makes"
        ) from error
    except ValueError as error:
        raise UsageError(f"baseline {path}: not UTF-8 text ({error}); expected a TOML file") from error


def _numbers(text: str, raw: Mapping[str, object]) -> dict[BaselineTable, list[int]]:
    """Row numbers over both tables in file order; by table if headers cannot be located."""
    found: dict[BaselineTable, list[int]] = {kind: [] for kind in BaselineTable}
    for at, match in enumerate(HEADER.finditer(text), 1):
        found[BaselineTable(match[1])].append(at)
    sizes = {kind: len(tables) if isinstance(tables := raw.get(kind.value, []), list) else 0 for kind in BaselineTable}
    if any(
        len(found[kind]) != sizes[kind] for kind in BaselineTable
    ):  # written in another form, such as one inline array
        first = sizes[BaselineTable.FINDING]
        return {
            BaselineTable.FINDING: [*range(1, first + 1)],
            BaselineTable.UNKNOWN: [*range(first + 1, first + sizes[BaselineTable.UNKNOWN] + 1)],
        }
    return found


def _entry(where: str, kind: BaselineTable, number: int, table: Mapping[str, object]) -> BaselineEntry:
    known = ("engine", *ABOUT[kind], *WHOSE)
    for key in table:
        if key not in known:
            raise UsageError(f"{where}: {unknown_name('key', key, known)}")
    for key in known[1:]:
        if key not in table:
            raise UsageError(f"{where}: the key {key!r} is missing; expected {', '.join(known[1:])}")
    texts = {
        key: _place(where, value) if key == "place" else _text(where, key, value)
        for key, value in table.items()
        if key != "expires"
    }
    if kind is BaselineTable.FINDING and texts["code"] not in CODES:
        hint = did_you_mean(str(texts["code"]), CODES)
        raise UsageError(f"{where}: code: expected a finding code, got {texts['code']!r}{hint}; see kvcheck list codes")
    expires = table["expires"]
    if isinstance(expires, datetime.datetime) or not isinstance(expires, datetime.date):
        raise UsageError(f"{where}: expires: expected a date such as 2027-03-01, without quotes, got {expires!r}")
    return BaselineEntry(number=number, kind=kind, expires=expires, **{"engine": None, **texts})  # type: ignore[arg-type]


def _text(where: str, key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: {key}: expected a text in quotes, got {str(value)[:80]!r}")
    return value


def _place(where: str, value: object) -> str | tuple[str, ...]:
    if isinstance(value, list) and value:
        return tuple(_text(where, "place", each) for each in value)
    return _text(where, "place", value)


def _comments_above(text: str) -> str:
    found = COMMENTS.search(text)
    return found[0] if found else ""


def _toml(value: object) -> str:
    if isinstance(value, datetime.date):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")  # allowed in JSON, not in TOML


def _replace(path: Path, text: str, expected: Sequence[BaselineEntry]) -> None:
    try:
        is_right = list(parse_baseline(text, path)) == list(expected)
    except UsageError as error:
        raise UsageError(f"baseline {path} cannot be edited without a person: {error}") from error
    if not is_right:
        raise UsageError(
            f"baseline {path}: its rows are not written as [[finding]] and [[unknown]] tables that begin a line, so "
            "it cannot be edited without a person; edit it by hand"
        )
    write_text(path, text)
