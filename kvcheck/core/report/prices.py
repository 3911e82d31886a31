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
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One row as shown: texts only, "n/a" for a value that does not apply."""

    kind: str
    what: str
    instead: str
    size: str
    cost: str
    rate: str
    added: str
    share: str
    ratio: str
    floor: str
    limit: str
    verdict: str
    rounds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Cost of an arm over its sizes: a part per call (fixed) and a part per byte (rate)."""

    what: str
    fixed: str
    rate: str
    sizes: str


def price_list(rows: Sequence[BenchRow]) -> list[Price]:
    """Return each comparison at its largest size, by kind."""
    return _prices(largest(rows), rows)


def all_prices(rows: Sequence[BenchRow]) -> list[Price]:
    return _prices(rows, rows)


def step_us(rows: Iterable[BenchRow], shape: str | None, device: str) -> float | None:
    """Return the time of an unprotected decode step; None if none was measured."""
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
    base, ratio = row.baseline_us.est, row.ratio
    lo, hi = (None if each is None else (each - 1) * base for each in (ratio.lo, ratio.hi))
    return Interval((ratio.est - 1) * base, lo, hi)


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
    """Whether the ratio's interval overlaps the noise floor around 1; False without an interval."""
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


def instead_text(row: BenchRow) -> str:
    return f"added to {row.baseline}" if row.is_added else row.baseline


def in_short(rows: Sequence[BenchRow]) -> str:
    """Return one line: free cases and cases with a part that costs; for running servers each number."""
    if of_server := [row for row in rows if kind_of(row.case) == SERVER]:
        first = of_server[0]
        told = ", ".join(f"{row.case} {row.ratio.est:.3g} ({verdict(row, None)})" for row in of_server)
        return f"{first.arm} over {first.baseline}, {first.size}: {told}."
    step = next((found for row in rows if (found := step_us(rows, row.shape, row.device)) is not None), None)
    verdicts: dict[str, set[str]] = {}
    for row in largest(rows):
        verdicts.setdefault(row.case, set()).add(verdict(row, step))
    free = [case for case, said in verdicts.items() if said <= {"free", "faster"}]
    costs = [case for case, said in verdicts.items() if "costs" in said]
    none = [case for case, said in verdicts.items() if said == {TOO_FEW}]
    checked = [case for case, said in verdicts.items() if said == {CHECKED}]
    unclear = [case for case in verdicts if case not in (*free, *costs, *none, *checked)]
    parts = (
        ("Free or faster than without", free),
        ("Costs something", costs),
        ("Not told from noise", unclear),
        (f"No price at the largest size, for fewer than {LEAST_ROUNDS} rounds", none),
        ("Right over threads, which give no prices", checked),
    )
    return " ".join(f"{what}: {', '.join(cases)}." for what, cases in parts if cases)


def kind_of(case: str) -> str:
    return KINDS.get(case, "other")


def bench_command(case: str) -> str:
    return f"kvcheck bench {SERVE if kind_of(case) == SERVER else case}"


def largest(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Keep the row of the largest size of each comparison, without Torch forms."""
    found: dict[tuple[str, str], BenchRow] = {}
    for row in rows:
        kept = found.get((row.case, row.arm))
        if not row.arm.endswith("torch") and (kept is None or size_key(row) >= size_key(kept)):
            found[row.case, row.arm] = row
    return list(found.values())


def size_key(row: BenchRow) -> tuple[int, list[int]]:
    return row.bytes or 0, [int(number) for number in NUMBER.findall(row.size)]


def curves(rows: Sequence[BenchRow]) -> list[Curve]:
    """Fit arms that were measured at three sizes or more."""
    by_arm: dict[tuple[str, str], list[BenchRow]] = {}
    for row in sorted(rows, key=size_key):
        if row.bytes is not None:
            by_arm.setdefault((row.case, row.arm), []).append(row)
    found = []
    for (case, arm), each in by_arm.items():
        if len(each) < 3:
            continue
        line = fitted([(float(row.bytes or 0), row.us.est) for row in each])
        found.append(
            Curve(
                what=f"{case} {arm}",
                fixed="n/a (a time is 0)" if line is None else time_text(max(0.0, line[0])),
                rate="n/a (no slope)" if line is None or line[1] <= 0 else _rate(1, line[1]),
                sizes=", ".join(row.size for row in each),
            )
        )
    return found


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Fit y = a + b x with weights 1 / y**2, so that small sizes count as much as large ones, and return (a, b).

    None if a y is not above 0. Weights are relative to the largest, so none is infinite.
    """
    least = min(y for _, y in points)
    if least <= 0:
        return None
    weights = [(least / y) ** 2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / (spread or 1)
    return mean_y - slope * mean_x, slope


def time_text(value: float) -> str:
    sign, size = ("-" if value < 0 else ""), abs(value)
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if size >= scale:
            return f"{sign}{size / scale:.3g} {unit}"
    return f"{sign}{size:.3g} µs"


def _near_one(value: float) -> str:
    return f"{value:.4f}" if 0 < abs(value - 1) < 0.005 else f"{value:.3g}"


def _rate(size_bytes: int, us: float) -> str:
    rate = size_bytes / us / 1e3
    return f"{rate:.3g} GB/s" if math.isfinite(rate) else "n/a"


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return "n/a"
    return f"{value:+.0f} %" if abs(value) >= 10 else f"{value:+.2f} %" if abs(value) >= 0.01 else f"{value:+.4f} %"


def _prices(chosen: Iterable[BenchRow], rows: Sequence[BenchRow]) -> list[Price]:
    made = [price_of(row, step_us(rows, row.shape, row.device)) for row in chosen]
    ordered = sorted(made, key=lambda price: ORDER.index(price.kind))
    # A kind is named in its first row only.
    kinds = [None, *(price.kind for price in ordered)]
    return [
        replace(price, kind="" if price.kind == before else price.kind)
        for price, before in zip(ordered, kinds, strict=False)
    ]


def price_of(row: BenchRow, step: float | None) -> Price:
    """Format a row. step: time of a decode step. A row of threads shows no numbers."""
    if is_check(row):
        numbers = dict.fromkeys(("cost", "rate", "added", "share", "ratio", "floor", "limit"), "n/a")
        named = {"kind": kind_of(row.case), "what": f"{row.case} {row.arm}", "instead": row.baseline, "size": row.size}
        return Price(**named, **numbers, verdict=verdict(row, step), rounds=str(len(row.ratios)))
    added = added_us(row)
    rate = _rate(row.bytes, row.us.est) if row.bytes and row.us.est > 0 else "n/a"
    return Price(
        kind=kind_of(row.case),
        what=f"{row.case} {row.arm}",
        instead=instead_text(row),
        size=row.size,
        cost=time_text(row.us.est),
        rate=rate,
        added=("" if added.est < 0 else "+") + time_text(added.est),
        share="n/a" if not step else _percent(100 * added.est / step),
        ratio=ratio_text(row.ratio),
        floor="n/a" if len(row.ratios) == 1 else f"±{floor_text(row)}",
        limit=limit_text(row) or "n/a",
        verdict=verdict(row, step),
        rounds=str(len(row.ratios)),
    )
