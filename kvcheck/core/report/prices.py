"""The price list: the cost of each clone, wait and seal, in microseconds and as a share of a decode step.

Invariants:
- "free" depends only on the interval's upper end. "faster" and "costs" need the whole interval beyond the noise floor.
- A share of a decode step needs a step measured in the same run on the same shape and device.
- Running servers have no "free" and "costs", only "faster" and "slower".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.base.rounds import LEAST_ROUNDS, TAIL, sign_p
from kvcheck.core.base.server_facts import SERVE, SERVE_CASES

SERVER = "running server"
KINDS = {
    "metadata-read": "clone",
    "offload-restore": "clone",
    "guarded-read": "wait",
    "layer-load": "wait",
    "decode-step": "all of them",
    "seal": "seal",
    "nvlink-aux": "seal",
    **dict.fromkeys(SERVE_CASES, SERVER),
}
ORDER = ("all of them", "clone", "wait", "seal", SERVER, "other")
TOO_FEW = "n/a: too few rounds"
NO_MEASUREMENT = "n/a: not a measurement"
CHECKED = "right, no price"
ALIKE = "not told apart"
NUMBER = re.compile(r"\d+")
FREE_SHARE = 0.001
"""An addition that is certainly below this share of a decode step is free, whatever its ratio is."""
FREE_RATIO = 1.01
"""An arm that is certainly at most 1 % slower is free as well."""


NA = "n/a"
LEAST, MOST = 1e-3, 1e3
"""Smallest and largest ratio on any axis, however far a measurement lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One row as shown: texts, "n/a" for a value that does not apply.

    step_share, share_floor: the added time and the noise floor in per cent of a decode step.
    """

    row: BenchRow
    verdict: str
    instead: str
    cost: str = NA
    rate: str = NA
    added: str = NA
    share: str = NA
    step_share: Interval | None = None
    share_floor: float = 0.0
    ratio: str = NA
    floor: str = NA
    limit: str = NA


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A horizontal axis of `width` pixels. none: the value of no difference."""

    low: float
    high: float
    none: float
    is_log: bool
    width: int
    marks: tuple[float, ...]

    def x(self, value: float) -> float:
        """Return the distance from the left, with room for a dot at both ends."""
        if not self.is_log:
            share = (value - self.low) / (self.high - self.low)
        else:
            share = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return round(4 + (self.width - 8) * min(1.0, max(0.0, share)), 1)


def ratio_axis(ratios: Iterable[Interval]) -> Axis:
    ends = [end for each in ratios for end in (each.est, each.lo, each.hi) if _is_placed(end)]
    low, high = max(LEAST, min([0.8, *ends])), min(MOST, max([1.25, *ends]))
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    marks = tuple(10.0**power for power in powers) if len(powers) > 1 else (low, 1.0, high)
    return Axis(low=low, high=high, none=1.0, is_log=True, width=150, marks=marks)


def _is_placed(value: float | None) -> TypeGuard[float]:
    return value is not None and 0 < value < math.inf


SHARES = Axis(low=-10.0, high=10.0, none=0.0, is_log=False, width=110, marks=(-10.0, 0.0, 10.0))
"""Per cent of a decode step. Equal on every page, since this share decides whether a part matters."""


def prices_by_case(chosen: Iterable[BenchRow], rows: Sequence[BenchRow]) -> dict[str, list[Price]]:
    """Return the chosen rows by case, in the order of kinds. rows: all of the run, with its decode steps."""
    found: dict[str, list[Price]] = {}
    for row in sorted(chosen, key=lambda row: ORDER.index(kind_of(row.case))):
        found.setdefault(row.case, []).append(price_of(row, step_us(rows, row.shape, row.device)))
    return found


def decode_steps(rows: Sequence[BenchRow]) -> dict[str, float]:
    """Return the microseconds of an unprotected decode step by "SHAPE on DEVICE"."""
    found = {(row.shape, row.device): step_us(rows, row.shape, row.device) for row in rows if not is_check(row)}
    return {f"{shape} on {device}": step for (shape, device), step in found.items() if shape and step is not None}


def step_us(rows: Iterable[BenchRow], shape: str | None, device: str) -> float | None:
    for row in rows:
        if row.case == "decode-step" and row.device == device and (shape is None or row.shape == shape):
            return row.baseline_us.est
    return None


def is_check(row: BenchRow) -> bool:
    """Whether the row's lanes are threads: its outputs were checked, and its times are no prices."""
    return row.device == "threads"


def has_price(row: BenchRow) -> bool:
    return row.status != "unknown" and row.ratio.lo is not None and row.ratio.hi is not None


def is_enough(row: BenchRow) -> bool:
    return len(row.ratios) >= LEAST_ROUNDS if is_check(row) else has_price(row)


def added_us(row: BenchRow) -> Interval:
    """Microseconds that the arm adds to its baseline; negative if it is faster."""
    lo, hi = (None if end is None else end - 1 for end in (row.ratio.lo, row.ratio.hi))
    return _scaled(Interval(row.ratio.est - 1, lo, hi), row.baseline_us.est)


def verdict(row: BenchRow, step: float | None) -> str:
    if is_check(row):
        return CHECKED if is_enough(row) else TOO_FEW
    if row.status == "unknown":
        return NO_MEASUREMENT
    if row.ratio.lo is None or row.ratio.hi is None:
        return TOO_FEW
    if kind_of(row.case) == SERVER:
        return _told_apart(row)
    most = added_us(row).hi
    if row.ratio.hi < 1 - row.floor:
        return "faster"
    if row.ratio.hi <= FREE_RATIO or (step is not None and most is not None and most < FREE_SHARE * step):
        return "free"
    return "costs" if row.ratio.lo > 1 + row.floor else ALIKE


def _told_apart(row: BenchRow) -> str:
    """Return faster or slower if interval and sign test of the rounds exceed the noise floor, else ALIKE.

    A run makes one claim per case, which divides the error level: at least seven rounds.
    """
    part, noise = TAIL / len(SERVE_CASES), 1 + row.floor
    assert row.ratio.lo is not None and row.ratio.hi is not None, "it has a price"
    if row.ratio.lo > noise and sign_p(row.ratios, noise) <= part:
        return "slower"
    if row.ratio.hi < 1 / noise and sign_p([1 / each for each in row.ratios], noise) <= part:
        return "faster"
    return ALIKE


def is_alike(row: BenchRow) -> bool:
    lo, hi = row.ratio.lo, row.ratio.hi
    return lo is not None and hi is not None and lo <= 1 + row.floor and hi >= 1 - row.floor


def limit_text(row: BenchRow) -> str | None:
    if row.limit is None or (share := row.limit_ratio) is None:
        return None
    text = f"{100 * share.est:.0f} % of {row.limit}"
    if share.est <= 1:
        return text
    if share.lo is None:
        return f"{text}, too few rounds"
    return f"{text}, beyond this reference" if share.lo > 1 + row.floor else f"{text}, {ALIKE} from it"


def ratio_text(ratio: Interval) -> str:
    span = "n/a" if ratio.lo is None or ratio.hi is None else f"{_near_one(ratio.lo)}–{_near_one(ratio.hi)}"
    return f"{_near_one(ratio.est)} ({span})"


def floor_text(row: BenchRow) -> str:
    if len(row.ratios) == 1:
        return "n/a"
    return f"{100 * row.floor:.1f} %" if row.floor >= 0.001 or not row.floor else f"{100 * row.floor:.1g} %"


def in_short(rows: Sequence[BenchRow]) -> str:
    """Return one line: free cases and cases with a part that costs; for running servers each number."""
    if of_server := [row for row in rows if kind_of(row.case) == SERVER]:
        first = of_server[0]
        told = ", ".join(f"{row.case} {row.ratio.est:.3g} ({verdict(row, None)})" for row in of_server)
        return f"{first.arm} over {first.baseline}, {first.size}: {told}."
    step = next((found for row in rows if (found := step_us(rows, row.shape, row.device)) is not None), None)
    by_case: dict[str, list[BenchRow]] = {}
    for row in largest(rows):
        by_case.setdefault(row.case, []).append(row)
    alone = {case: {verdict(row, None) for row in of_case} for case, of_case in by_case.items()}
    beside = {case: {verdict(row, step) for row in of_case} for case, of_case in by_case.items()}
    costs = [case for case, found in beside.items() if "costs" in found]
    free = [case for case, found in alone.items() if found <= {"free", "faster"}]
    small = [case for case, found in beside.items() if found <= {"free", "faster"} and case not in free]
    none = [case for case, found in beside.items() if found == {TOO_FEW}]
    checked = [case for case, found in beside.items() if found == {CHECKED}]
    unclear = [case for case in by_case if case not in (*free, *small, *costs, *none, *checked)]
    parts = (
        ("Free or faster than without", free),
        (f"Less than {100 * FREE_SHARE:g} % of a decode step", small),
        ("Costs something", [f"{case} ({_costliest(by_case[case], step)})" for case in costs]),
        ("Not told from noise", unclear),
        (f"No price at the largest size, for fewer than {LEAST_ROUNDS} rounds", none),
        ("Right over threads, which give no prices", checked),
    )
    return " ".join(f"{what}: {', '.join(cases)}." for what, cases in parts if cases)


def _costliest(rows: Iterable[BenchRow], step: float | None) -> str:
    most = max((row for row in rows if verdict(row, step) == "costs"), key=lambda row: row.ratio.est)
    more = 100 * (most.ratio.est - 1)
    return f"{most.arm} {more:+.3g} %" if more < 100 else f"{most.arm} {most.ratio.est:.3g} times {most.baseline}"


def kind_of(case: str) -> str:
    return KINDS.get(case, "other")


def bench_command(case: str) -> str:
    return f"kvcheck bench {SERVE if kind_of(case) == SERVER else case}"


def largest(rows: Sequence[BenchRow]) -> list[BenchRow]:
    found: dict[tuple[str, str], BenchRow] = {}
    for row in rows:
        kept = found.get((row.case, row.arm))
        if not row.arm.endswith("torch") and (kept is None or size_key(row) >= size_key(kept)):
            found[row.case, row.arm] = row
    return list(found.values())


def size_key(row: BenchRow) -> tuple[int, list[int]]:
    return row.bytes or 0, [int(number) for number in NUMBER.findall(row.size)]


def time_text(value: float) -> str:
    sign, size = ("-" if value < 0 else ""), abs(value)
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if size >= scale:
            return f"{sign}{size / scale:.3g} {unit}"
    return f"{sign}{size:.3g} µs"


def _near_one(value: float) -> str:
    return f"{value:.4f}" if 0 < abs(value - 1) < 0.005 else f"{value:.3g}"


def rate_text(size_bytes: int, us: float) -> str:
    rate = size_bytes / us / 1e3
    return f"{rate:.3g} GB/s" if math.isfinite(rate) else "n/a"


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return "n/a"
    return f"{value:+.0f} %" if abs(value) >= 10 else f"{value:+.2f} %" if abs(value) >= 0.01 else f"{value:+.4f} %"


def price_of(row: BenchRow, step: float | None) -> Price:
    """Format a row. step: time of a decode step. A row of threads shows no numbers."""
    if is_check(row):
        return Price(row=row, instead=row.baseline, verdict=verdict(row, step))
    added = added_us(row)
    share = _scaled(added, 100 / step) if step else None
    return Price(
        row=row,
        verdict=verdict(row, step),
        instead=f"added to {row.baseline}" if row.is_added else row.baseline,
        cost=time_text(row.us.est),
        rate=rate_text(row.bytes, row.us.est) if row.bytes and row.us.est > 0 else NA,
        added=("" if added.est < 0 else "+") + time_text(added.est),
        share=NA if share is None else _percent(share.est),
        step_share=share,
        share_floor=100 * row.floor * row.baseline_us.est / step if step else 0.0,
        ratio=ratio_text(row.ratio),
        floor=NA if len(row.ratios) == 1 else f"±{floor_text(row)}",
        limit=limit_text(row) or NA,
    )


def _scaled(interval: Interval, by: float) -> Interval:
    lo, hi = (None if end is None else end * by for end in (interval.lo, interval.hi))
    return Interval(interval.est * by, lo, hi)
