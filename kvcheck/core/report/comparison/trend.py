"""Trend: verdicts, counts and prices of runs of one kind over time, the oldest first.

Invariants:
- A run that did not judge a cell, or lacks a price, has no entry there. It is never a pass.
- A price is compared by its ratio to the baseline of the same run, never by microseconds of two days.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcheck.core.base.record import Interval, RunRecord, Verdict
from kvcheck.core.report.prices import is_check, ratio_text

LEAST_RUNS = 3
"""Fewest runs of a trend; two runs have a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTrend:
    id: str
    verdicts: tuple[Verdict | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTrend:
    id: str
    ratios: tuple[Interval | None, ...]
    floors: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Runs by start time. words: words judged by each."""

    starts: tuple[str, ...]
    run_ids: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    words: tuple[int, ...]
    cells: tuple[CellTrend, ...]
    prices: tuple[PriceTrend, ...]


def trend_of(records: Sequence[RunRecord]) -> Trend | None:
    if len(records) < LEAST_RUNS:
        return None
    runs = sorted(records, key=lambda record: (record.started_at, record.run_id))
    cells = [{row.id: row.verdict for row in run.scenarios} for run in runs]
    prices = [
        {f"{row.id} to {row.baseline}, {row.device}": row for row in run.bench if not is_check(row)} for run in runs
    ]
    return Trend(
        starts=tuple(run.started_at for run in runs),
        run_ids=tuple(run.run_id for run in runs),
        verdicts=tuple(run.verdict for run in runs),
        words=tuple(sum(run.evidence.words_verified.values()) for run in runs),
        cells=tuple(
            CellTrend(id=name, verdicts=tuple(run.get(name) for run in cells))
            for name in dict.fromkeys(name for run in cells for name in run)
        ),
        prices=tuple(
            PriceTrend(
                id=name,
                ratios=tuple(run[name].ratio if name in run else None for run in prices),
                floors=tuple(run[name].floor if name in run else None for run in prices),
            )
            for name in dict.fromkeys(name for run in prices for name in run)
        ),
    )


def price_text(ratio: Interval | None) -> str:
    return "not measured" if ratio is None else ratio_text(ratio)
