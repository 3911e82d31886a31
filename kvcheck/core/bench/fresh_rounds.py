"""Fresh rounds: the gate measures uncertain rows again, with the build and on the machine that they were recorded with.

The rounds exceed a benchmark's minimum and have another seed. No recorded round is used again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcheck.core.base.errors import UnknownVerdict, UsageError, WrongOutput
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow, RunRecord
from kvcheck.core.base.server_facts import SERVE, SERVE_CASES
from kvcheck.core.bench.measure import machine
from kvcheck.core.report.gate.judge import MEASURED_AGAIN, StoredRow

if TYPE_CHECKING:  # torch is imported when something is measured
    from kvcheck.core.bench.arms import Point

ROUNDS_MIN, ROUNDS_MAX = 25, 50
PRECISION = 0.03


class FreshRounds:
    """Measures recorded rows again, at most MEASURED_AGAIN times and within max_time_s in all.

    build: name, version and environment of this kvcheck, under the keys of a record. say: receives a line for each
    measurement.
    """

    def __init__(
        self,
        records: Sequence[RunRecord],
        *,
        seed: int,
        max_time_s: float,
        build: Mapping[str, object],
        say: Callable[[str], None] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.wrong_outputs: list[str] = []
        self._records = {record.run_id: record for record in records}
        self._seed, self._build = seed, build
        self._say, self._progress = say, progress
        self._left_s, self._calls = max_time_s, 0

    def __call__(self, wanted: Sequence[StoredRow]) -> list[BenchRow | str]:
        started = time.monotonic()
        limit_s = self._left_s / max(1, MEASURED_AGAIN - self._calls)
        self._calls += 1
        if self._say is not None:
            self._say(f"measuring {counted(len(wanted), 'row')} again, for {limit_s:.0f} s or less")
        answers: dict[int, BenchRow | str] = {}
        groups: dict[tuple[str, str], list[int]] = {}
        for at, each in enumerate(wanted):
            record = self._records[each.run_id]
            if reason := _of_server(each.row) or _elsewhere(record, self._build):
                answers[at] = reason
            else:
                groups.setdefault((_shape(record, each.row), each.row.device), []).append(at)
        for (shape, device), members in groups.items():
            found = self._measured(shape, device, [wanted[at].row for at in members], limit_s / len(groups))
            answers.update(zip(members, found, strict=True))
        self._left_s = max(1.0, self._left_s - (time.monotonic() - started))
        return [answers[at] for at in range(len(wanted))]

    def chosen(self, points: list[Point], rows: Sequence[BenchRow]) -> list[Point]:
        from kvcheck.core.bench.run import key, only

        return only(points, [key(row) for row in rows])

    def _measured(self, shape: str, device: str, rows: list[BenchRow], limit_s: float) -> list[BenchRow | str]:
        from kvcheck.core.bench.run import BenchPlan, key, run_bench

        late: list[str] = []
        try:
            plan = BenchPlan(
                cases=tuple(dict.fromkeys(row.case for row in rows)),
                shape=shape,
                device=device,
                seed=self._seed + self._calls,
                precision=PRECISION,
                max_time_s=limit_s,
                rounds_min=ROUNDS_MIN,
                rounds_max=ROUNDS_MAX,
            )
            fresh = run_bench(
                plan,
                lambda row: None,
                late=lambda case, sizes: late.append(case),
                choose=lambda points: self.chosen(points, rows),
                progress=self._progress,
            )
        except WrongOutput as error:
            self.wrong_outputs.append(f"measured again: {error}")
            return [f"wrong output: {error}" for _ in rows]
        except (UsageError, UnknownVerdict) as error:
            return [str(error) for _ in rows]
        found = {key(row): row for row in fresh}
        missing = "this version measures no such row"
        if late:
            missing = f"its time, {limit_s:.3g} s, was up before a round; use a larger --max-time"
        return [found.get(key(row), missing) for row in rows]


def _shape(record: RunRecord, row: BenchRow) -> str:
    """Rows without a shape do not name the run's shape."""
    asked = record.plan.get("shape")
    return asked if isinstance(asked, str) else row.shape or ""


def _of_server(row: BenchRow) -> str | None:
    return f"it needs its servers: run kvcheck bench {SERVE} again" if row.case in SERVE_CASES else None


def _elsewhere(record: RunRecord, build: Mapping[str, object]) -> str | None:
    here: dict[str, object] = {**build, "hardware": machine()}
    there: dict[str, object] = {**record.environment, **record.tool}
    for name, value in here.items():
        if there.get(name) != value:
            return f"it was recorded elsewhere (another {name}): run kvcheck bench here"
    return None
