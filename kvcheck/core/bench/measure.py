"""Samples: measures the rounds of a point and makes rows of them.

A round gives every arm fresh memory, in a random order, runs a few uncounted batches, and then blocks: each block runs
the arms in a random order and then backwards (with two arms: ABBA or BAAB). A batch takes 100 to 500 microseconds. The
value of an arm in a round is the median of its batches. Ratios are formed within a round.

Invariants:
- No garbage is collected between the first batch and the last. On a CPU one thread on one core does the work.
- Each arm's output is checked after its last batch, once its lanes are joined. A wrong arm has no price.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvcheck.core.base.errors import WrongOutput
from kvcheck.core.base.record import BenchRow
from kvcheck.core.base.rounds import NOISY_FLOOR, floor_of, half_width, interval, ratio_interval
from kvcheck.core.bench.arms import CONTROL, Arm, ArmComparison, Point
from kvcheck.core.bench.clock import Batch, Clock
from kvcheck.core.bench.memory import FreshMemory

BATCH_NS = 250_000
BATCH_NS_LEAST = 100_000
CALLS_MOST = 1 << 16
BLOCKS = 10
BLOCKS_LEAST = 4
ROUND_NS = 100_000_000
"""Time of an arm in a round, above which its blocks become fewer."""

WARM_BATCHES = 3
PRESSURE_FILE = Path("/proc/pressure/cpu")
CPU_FILE = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Samples:
    """The rounds of one point. is_told: its rows have been reported."""

    def __init__(self, point: Point, clock: Clock) -> None:
        self.point = point
        self.is_told = False
        self._clock = clock
        self._calls: dict[str, int] = {}
        self._rounds: list[dict[str, float]] = []  # nanoseconds a call of each arm; a round is added whole

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    def add_round(self, random: np.random.Generator) -> None:
        makers = {**self.point.makers, CONTROL: self.point.makers[self.point.baseline]}
        sets = self._clock.sets(self.point.bytes)
        memories = {name: [FreshMemory(random, self._clock.name) for _ in range(sets)] for name in makers}
        arms: dict[str, list[Arm]] = {}
        try:
            for name in random.permutation(list(makers)).tolist():
                arms[name] = [makers[name](memory) for memory in memories[name]]
            with _undisturbed(self._clock.name):
                batches = {name: self._batch(name, arms[name], memories[name]) for name in makers}
                medians = run_blocks(batches, random)
            for name, made in arms.items():
                _join(memories[name])
                for arm in made:
                    self._check(name, arm)
        finally:
            for made in arms.values():
                for arm in made:
                    arm.close()
            for held in memories.values():
                for memory in held:
                    memory.close()
        self._rounds.append({name: value / self._calls[name] for name, value in medians.items()})

    def is_precise(self, precision: float) -> bool:
        if self._clock.no_price is not None:
            return True
        widths = [half_width(ratio_interval(self._compared(row))) for row in self.point.comparisons]
        return all(width is not None and width <= precision for width in widths)

    def rows(self) -> list[BenchRow]:
        floor = floor_of(self._logs(CONTROL, self.point.baseline))
        return [self._row(row, floor) for row in self.point.comparisons]

    def _check(self, name: str, arm: Arm) -> None:
        """The earlier rounds of a wrong point are not reported either."""
        try:
            arm.check()
        except WrongOutput as error:
            self.is_told = True
            raise WrongOutput(f"{self.point.case}/{self.point.size} arm {name}: {error}") from error

    def _row(self, row: ArmComparison, floor: float) -> BenchRow:
        logs = self._compared(row)
        if row.is_extra:  # the baseline's noise is in the divisor alone
            floor = math.expm1(math.log1p(floor) * math.expm1(statistics.median(logs)))
        return BenchRow(
            case=self.point.case,
            arm=row.name or row.arm,
            baseline=row.baseline,
            size=self.point.size,
            shape=self.point.shape,
            device=self._clock.name,
            bytes=self.point.bytes,
            us=interval([each[row.arm] / 1e3 for each in self._rounds]),
            baseline_us=interval([each[row.baseline] / 1e3 for each in self._rounds]),
            ratio=ratio_interval(logs),
            floor=floor,
            ratios=tuple(math.exp(each) for each in logs),
            limit=row.limit,
            limit_ratio=None if row.limit is None else ratio_interval(self._logs(row.limit, row.arm)),
            status=self._status(floor),
            note="; ".join(each for each in (self._clock.no_price, self.point.note) if each) or None,
        )

    def _status(self, floor: float) -> str:
        if self._clock.no_price is not None:
            return "unknown"
        return "noisy" if floor > NOISY_FLOOR else "ok"

    def _compared(self, row: ArmComparison) -> list[float]:
        logs = self._logs(row.arm, row.baseline)
        return [math.log1p(math.exp(each)) for each in logs] if row.is_extra else logs

    def _logs(self, arm: str, baseline: str) -> list[float]:
        return [math.log(each[arm] / each[baseline]) for each in self._rounds]

    def _batch(self, name: str, arms: list[Arm], memories: list[FreshMemory]) -> Batch:
        calls = [arm.call for arm in arms]

        def timed(count: int) -> Batch:
            return self._clock.batch(calls, count, arms[0].clock, lambda: _join(memories))

        if name not in self._calls:
            # Both runs of the baseline have the same number of calls, so they do the same work.
            twin = self.point.baseline if name == CONTROL else CONTROL if name == self.point.baseline else name
            self._calls[name] = self._calls.get(twin) or _calibrated(timed)
        batch = timed(self._calls[name])
        for _ in range(WARM_BATCHES if batch() < ROUND_NS // BLOCKS else 0):
            batch()
        return batch


def _join(memories: list[FreshMemory]) -> None:
    for memory in memories:
        memory.join()


def _calibrated(timed: Callable[[int], Batch]) -> int:
    count = 1
    while True:
        batch = timed(count)
        taken = min(batch() for _ in range(3)) if count > 1 else batch()
        if taken >= BATCH_NS_LEAST or count >= CALLS_MOST:
            return max(1, min(CALLS_MOST, round(count * BATCH_NS / max(1, taken)))) if count > 1 else _again(batch)
        count = min(CALLS_MOST, max(count * 2, math.ceil(count * BATCH_NS / max(1, taken))))


def _again(batch: Batch) -> int:
    taken = max(1, min(batch() for _ in range(2)))
    return 1 if taken >= BATCH_NS_LEAST else max(1, round(BATCH_NS / taken))


def run_blocks(batches: dict[str, Batch], random: np.random.Generator) -> dict[str, float]:
    taken: dict[str, list[int]] = {name: [] for name in batches}
    most = max(batch() for batch in batches.values())
    count = min(BLOCKS, max(BLOCKS_LEAST, ROUND_NS // max(1, most)))
    for _ in range(count // 2):
        order = random.permutation(list(batches)).tolist()
        for name in (*order, *reversed(order)):
            taken[name].append(batches[name]())
    return {name: statistics.median(values) for name, values in taken.items()}


@contextmanager
def _undisturbed(device: str) -> Iterator[None]:
    was_enabled = gc.isenabled()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    gc.disable()
    try:
        if cores is not None and device == "cpu":
            os.sched_setaffinity(0, {min(cores)})
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        if was_enabled:
            gc.enable()


def noise() -> dict[str, object]:
    return {
        "pressure_some_avg10_percent": _pressure(),
        "load_average": list(os.getloadavg()),
        "involuntary_switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
    }


def machine() -> dict[str, object]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"cpu_model": _cpu_model(), "cores_allowed": cores, "caches": _caches(), "threads": 1}


def _pressure() -> float | None:
    text = _text(PRESSURE_FILE)
    for part in text.split() if text is not None else ():
        if part.startswith("avg10="):
            return float(part.removeprefix("avg10="))
    return None


def _cpu_model() -> str | None:
    for line in (_text(CPU_FILE) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _caches() -> dict[str, str] | None:
    found = {}
    for folder in sorted(CACHES.glob("index*")):
        level, kind, size = (_text(folder / name) for name in ("level", "type", "size"))
        if level and kind and size:
            found[f"L{level.strip()} {kind.strip().lower()}"] = size.strip()
    return found or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
