"""RunRecord: all results of one run, as one versioned value; all reports are made from it.

Invariants:
- A key that does not apply is None, never 0.
- A record is read back exactly as it was written. Any other file, down to the type of each key, is a UsageError.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.story import Story

SCHEMA_VERSION = "1"
RUN_ID = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_DEPTH = 32
MAX_NUMBER = 10**20
STOPPED = "stopped before the cell was finished"
LEFT_OUT = "more findings were made and are not in this record"
"""Stands in the warning of a run that kept only its first findings, beside their number."""

T = TypeVar("T")


class Verdict(Enum):
    """UNKNOWN: nothing was judged. The values are those of run.json."""

    PASS = "pass"
    UNKNOWN = "unknown"
    FAIL = "fail"

    @staticmethod
    def worst(verdicts: Iterable[Verdict]) -> Verdict:
        found = set(verdicts)
        if Verdict.FAIL in found:
            return Verdict.FAIL
        return Verdict.PASS if found == {Verdict.PASS} else Verdict.UNKNOWN

    @property
    def exit_code(self) -> int:
        return {Verdict.PASS: 0, Verdict.UNKNOWN: 4, Verdict.FAIL: 1}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """observed: a running server's activity, by kind of evidence (`kvcheck list evidence`). situations: counts by key
    (`kvcheck list situations`). refusals: illegal calls that an engine refused. traces: schedules with distinct host
    traces, within a workload."""

    schedules: int = 0
    events: int = 0
    requests: int = 0
    retractions: int | None = None
    resumes: int | None = None
    foreign_reuses: int | None = None
    lookups: int | None = None
    pages_wanted: int | None = None
    device_hit_pages: int | None = None
    host_hit_pages: int | None = None
    storage_hit_pages: int | None = None
    backups: int | None = None
    loads: int | None = None
    device_evictions: int | None = None
    host_evictions: int | None = None
    host_evictions_during_load: int | None = None
    transfers: int | None = None
    aborts: int | None = None
    retries: int | None = None
    refusals: int | None = None
    traces: int | None = None
    words_verified: dict[str, int] = field(default_factory=dict)
    orderings_checked: int | None = None
    observed: dict[str, int] = field(default_factory=dict)
    situations: dict[str, int] = field(default_factory=dict)

    def plus(self, other: Evidence) -> Evidence:
        sums: dict[str, object] = {}
        for row in dataclasses.fields(self):
            mine, theirs = getattr(self, row.name), getattr(other, row.name)
            if isinstance(mine, dict):
                names = [*mine, *(name for name in theirs if name not in mine)]
                sums[row.name] = {name: mine.get(name, 0) + theirs.get(name, 0) for name in names}
            else:
                sums[row.name] = theirs if mine is None else mine if theirs is None else mine + theirs
        return Evidence(**sums)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """shape: as in ScenarioResult. condition: an assumption that the engine does not make and this finding needs; a
    conditional finding fails a run only on request. cause: id of the finding that this one is a symptom of. story: for
    the first causes of a run only."""

    id: str = ""
    code: str
    oracle: str
    scenario: str = ""
    shape: str = ""
    tier: str | None = None
    buffer: str | None = None
    layer: int | None = None
    page: int | None = None
    row: int | None = None
    request: int | None = None
    seen_request: int | None = None
    lane: str | None = None
    message: str
    schedule: str = ""
    replay: str = ""
    minimal: dict[str, object] | None = None
    condition: str | None = None
    cause: str | None = None
    story: Story | None = None

    @property
    def cell(self) -> str:
        return f"{self.scenario}/{self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """floor: schedules that a pass needs. tried, not_tried: planned strategies ("lazy") and settings ("ranks 2x1").
    scope: a class of schedules that was run completely, in words."""

    wanted: int
    floor: int
    tried: tuple[str, ...] = ()
    not_tried: tuple[str, ...] = ()
    scope: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    code: str | None = None
    trace: str | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """id: "scenario/shape". coverage: None if nothing was planned. shape: a shape, "SHAPE/TRANSPORT" if the ranks were
    processes, or a probe."""

    id: str
    shape: str
    verdict: Verdict
    code: str | None = None
    reason: str | None = None
    schedules: int = 0
    duration_s: float = 0.0
    evidence: Evidence = field(default_factory=Evidence)
    coverage: Coverage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResult:
    """outcome: "killed", "survived", "killed-by-other", "clean-run-failed" or "not-exercised"; on a device
    "reproduced", "not-reproduced", "clean-run-failed", "lost" (its device or process) or "not-begun"."""

    name: str
    bug: str
    killer: str
    outcome: str
    schedules: int
    verdict: Verdict
    killed_by: str | None = None
    message: str | None = None
    replay: str | None = None


ADDED_ARM = "plus-"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its distribution-free interval of at least 95 %; lo and hi are None below six rounds."""

    est: float
    lo: float | None = None
    hi: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """us, baseline_us: microseconds a call. ratio: time of the arm over time of the baseline, in the same rounds; of an
    arm "plus-...", time of both over that of the baseline. ratios: one a round. floor: distance from 1 of the
    baseline's ratio to itself (upper end of its interval). limit: the physical limit measured beside it. limit_ratio:
    share of the limit reached. status: "ok", "noisy" if the floor is above 5 %, or "unknown" with the reason in
    `note`."""

    case: str
    arm: str
    baseline: str
    size: str
    shape: str | None
    device: str
    bytes: int | None
    us: Interval
    baseline_us: Interval
    ratio: Interval
    floor: float
    ratios: tuple[float, ...]
    limit: str | None = None
    limit_ratio: Interval | None = None
    status: str = "ok"
    note: str | None = None

    @property
    def is_added(self) -> bool:
        return self.arm.startswith(ADDED_ARM)

    @property
    def id(self) -> str:
        return "/".join(part for part in (self.case, self.arm, self.size, self.shape) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run of `kvcheck stress`, `probe`, `live`, `selftest` or `bench`."""

    schema_version: str = SCHEMA_VERSION
    run_id: str
    tool: dict[str, str]
    argv: tuple[str, ...]
    repro: str
    seed: int | None
    started_at: str
    duration_s: float
    verdict: Verdict
    exit_code: int
    complete: bool
    environment: dict[str, object]
    plan: dict[str, object]
    evidence: Evidence
    scenarios: tuple[ScenarioResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    bench: tuple[BenchRow, ...] = ()
    mutants: tuple[MutantResult, ...] = ()
    warnings: tuple[str, ...] = ()
    identity: Identity | None = None

    def to_json(self) -> str:
        return json.dumps(to_plain(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def check_run_id(run_id: str) -> None:
    if not RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"run id {run_id[:80]!r} cannot name a folder: expected one plain file name of letters, digits, . _ and -"
        )


def read_record(path: Path) -> RunRecord:
    """Read a record from run.json, the folder that holds it, or a .gz file. Raises UsageError."""
    file = path / "run.json" if path.is_dir() else path
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read run record {file}: {why_unread(error)}; expected a run.json or its folder"
        ) from error
    try:
        raw = json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{file}: not valid JSON at line {error.lineno} column {error.colno} ({error.msg}); "
            "the file is truncated or is not a run.json"
        ) from error
    except RecursionError as error:
        raise UsageError(f"{file}: not a run record: its brackets are nested without end") from error
    except ValueError as error:  # a number that is none or has no end
        raise UsageError(f"{file}: not a complete run record: {error}") from error
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise UsageError(f"{file}: expected a run record with schema_version, got {type(raw).__name__}")
    if raw["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"{file}: expected schema_version {SCHEMA_VERSION!r}, got {raw['schema_version']!r}: another version of "
            "kvcheck wrote it; read it with that one, or run again"
        )
    try:
        record: RunRecord = value_from(RunRecord, raw, "record")
    except ValueError as error:
        raise UsageError(f"{file}: not a complete run record: {error}") from error
    check_run_id(record.run_id)
    return record


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


# Not msgspec: for a dataclass it accepts unknown keys, and lets keys with a default be missing. Nor is it in the
# environment of every engine, where probes read the same types.
def value_from(kind: Any, raw: object, where: str) -> Any:
    """Parse JSON data into the annotated type `kind`. Raises ValueError that names the place `where`."""
    return _reader(kind)(raw, where)


@cache
def _reader(kind: Any) -> Callable[[object, str], Any]:
    """Cached, since taking an annotation apart takes longer than reading a value by it."""
    if kind is object:
        return _any_json
    if isinstance(kind, types.UnionType):
        (present,) = (_reader(each) for each in typing.get_args(kind) if each is not types.NoneType)
        return lambda raw, where: None if raw is None else present(raw, where)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is tuple:
        item = _reader(arguments[0])
        return lambda raw, where: tuple(item(row, f"{where}[{at}]") for at, row in enumerate(_expect(list, raw, where)))
    if origin is dict:
        item = _reader(arguments[1])
        return lambda raw, where: {
            key: item(value, f"{where}.{key[:40]}") for key, value in _expect(dict, raw, where).items()
        }
    if dataclasses.is_dataclass(kind):
        return _row_reader(cast(Any, kind))
    if issubclass(kind, Enum):
        return lambda raw, where: kind(raw)
    if kind is float:
        return lambda raw, where: _any_json(raw if type(raw) is int else _expect(float, raw, where), where)
    return lambda raw, where: _any_json(_expect(kind, raw, where), where)


def _row_reader(kind: Callable[..., Any]) -> Callable[[object, str], Any]:
    readers = {key: _reader(hint) for key, hint in typing.get_type_hints(kind).items()}

    def read(raw: object, where: str) -> Any:
        pairs = _expect(dict, raw, where)
        if odd := sorted(readers.keys() ^ pairs.keys()):
            fault = "missing" if odd[0] in readers else "not known"
            raise ValueError(f"{where}: the key {odd[0][:40]!r} is {fault}")
        return kind(**{key: readers[key](value, f"{where}.{key}") for key, value in pairs.items()})

    return read


def _any_json(raw: object, where: str) -> object:
    return _checked(raw, where, MAX_DEPTH)


def _expect(kind: type[T], raw: object, where: str) -> T:
    """`raw` if it is of exactly this type; true is no number."""
    if type(raw) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, got {type(raw).__name__}")
    return raw


def _checked(raw: object, where: str, room: int) -> object:
    if isinstance(raw, (dict, list)):
        if room == 0:
            raise ValueError(f"{where}: expected at most {MAX_DEPTH} levels of nesting")
        for item in raw.values() if isinstance(raw, dict) else raw:
            _checked(item, where, room - 1)
    elif isinstance(raw, (int, float)) and not -MAX_NUMBER <= raw <= MAX_NUMBER:
        raise ValueError(f"{where}: expected a number of at most 20 digits")
    return raw


def to_plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {row.name: to_plain(getattr(value, row.name)) for row in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
