"""Budgets of the gate: rows of a TOML file that bound the cost of an arm against its baseline.

    [[budget]]
    case = "metadata-read"
    arm = "packed"
    baseline = "ten-views"
    size = "1024 rows"        # and shape, device: all rows if left out
    max_ratio = 0.5           # time of the arm over time of the baseline
    min_limit_ratio = 0.8     # share of the physical limit; at least one of the two bounds

Invariants:
- An unknown key is an error, since a misspelt bound would limit nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.record import BenchRow
from kvcheck.core.base.registry import unknown_name

NAMED = ("case", "arm", "baseline")
NARROWED = ("size", "shape", "device")
BOUNDS = ("max_ratio", "min_limit_ratio")
KEYS = (*NAMED, *NARROWED, *BOUNDS)
TABLE = "budget"
MOST = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """size, shape and device: None means all of them."""

    case: str
    arm: str
    baseline: str
    size: str | None = None
    shape: str | None = None
    device: str | None = None
    max_ratio: float | None = None
    min_limit_ratio: float | None = None

    def covers(self, row: BenchRow) -> bool:
        return all(getattr(self, name) in (None, getattr(row, name)) for name in (*NAMED, *NARROWED))

    @property
    def rows(self) -> tuple[str | None, ...]:
        return tuple(getattr(self, name) for name in (*NAMED, *NARROWED))

    def __str__(self) -> str:
        narrowed = "".join(f", {name} {getattr(self, name)}" for name in NARROWED if getattr(self, name) is not None)
        return f"{self.case}: {self.arm} over {self.baseline}{narrowed}"


def read_budgets(path: Path) -> tuple[Budget, ...]:
    """Raises UsageError for a missing or wrong file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not there, not text, or not TOML
        raise UsageError(
            f"budget file {path}: {why_unread(error)}; expected a TOML file with [[{TABLE}]] tables"
        ) from error
    for key in raw:
        if key != TABLE:
            raise UsageError(f"budget file {path}: unknown key {key!r}; known: [[{TABLE}]] tables and nothing else")
    tables = raw.get(TABLE, [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"budget file {path}: expected at least one [[{TABLE}]] table, in double brackets")
    budgets = tuple(_budget(f"budget file {path}, budget {at}", table) for at, table in enumerate(tables, 1))
    for at, budget in enumerate(budgets, 1):
        if budget.rows in (other.rows for other in budgets[: at - 1]):
            raise UsageError(f"budget file {path}, budget {at}: {budget} has a budget already; expected one for each")
    return budgets


def _budget(where: str, table: Mapping[str, object]) -> Budget:
    for key in table:
        if key not in KEYS:
            raise UsageError(f"{where}: {unknown_name('key', key, KEYS)}")
    for key in NAMED:
        if key not in table:
            raise UsageError(f"{where}: the key {key!r} is missing; expected {', '.join(NAMED)} and a bound")
    texts = {key: _text(where, key, table[key]) for key in (*NAMED, *NARROWED) if key in table}
    bounds = {key: _bound(where, key, table[key]) for key in BOUNDS if key in table}
    if not bounds:
        raise UsageError(f"{where}: expected {' or '.join(BOUNDS)}, got none of them")
    return Budget(**texts, **bounds)  # type: ignore[arg-type]


def _text(where: str, key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: {key}: expected a name in quotes, got {str(value)[:80]!r}")
    return value


def _bound(where: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        raise UsageError(f"{where}: {key}: expected a number above 0 and at most {MOST:,}, got {str(value)[:80]!r}")
    return float(value)
