"""A run of benchmarks brings the device to its rate and measures the most telling points first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.cut_rounds import QuickClock, cut_rounds, point

from kvcheck.commands.main import run
from kvcheck.core.base.record import Verdict, read_record
from kvcheck.core.bench import run as running
from kvcheck.core.bench.arms import Arm, Point
from kvcheck.core.bench.clock import LIBRARY, nothing, sm_clock_mhz
from kvcheck.core.bench.measure import Samples
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.bench.run import BenchPlan, run_bench


class Nvml:
    """The driver's library. failing: the function that returns an error."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing
        self.asked: list[object] = []

    def nvmlInit_v2(self) -> int:
        return 9 * (self._failing == "nvmlInit_v2")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        self.asked.append(uuid)
        device._obj.value = 77
        return 6 * (self._failing == "nvmlDeviceGetHandleByUUID")

    def nvmlDeviceGetClockInfo(self, device: Any, kind: int, mhz: Any) -> int:
        self.asked += [device.value, kind]
        mhz._obj.value = 1980
        return 3 * (self._failing == "nvmlDeviceGetClockInfo")


def test_the_clock_rate_is_that_of_the_device_with_the_uuid() -> None:
    nvml = Nvml()
    assert sm_clock_mhz("1-2", lambda name: nvml if name == LIBRARY else None) == 1980
    assert nvml.asked == [b"GPU-1-2", 77, 1]


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetClockInfo", LIBRARY])
def test_a_rate_that_nobody_tells_is_unknown_with_the_reason(failing: str) -> None:
    def opened(name: str) -> Nvml:
        if name == failing:
            raise OSError("no such file")
        return Nvml(failing)

    told = sm_clock_mhz("1-2", opened)
    assert isinstance(told, str) and told.startswith(f"UNKNOWN: {failing} ") and "next: nvidia-smi" in told


class SpinningClock(QuickClock):
    """Notes what is done."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self._done = done

    def spin(self) -> dict[str, object]:
        self._done.append("spin")
        return {"sm_clock_mhz": 1980}


def made(case: str, size: str) -> Point:
    def make(fresh: FreshMemory) -> Arm:
        return Arm(call=nothing, check=nothing)

    return point(case, size, a=make, b=make)


POINTS = {"seal": [made("seal", "small"), made("seal", "large")], "nvlink-aux": [made("nvlink-aux", "small")]}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run of "seal" and "nvlink-aux" does, in order."""
    done: list[str] = []
    monkeypatch.setattr(running.CASES, "load", lambda name: lambda setting: POINTS[name])
    monkeypatch.setattr(running, "clock_for", lambda device: SpinningClock(done))
    add_round = Samples.add_round

    def noted(self: Samples, random: np.random.Generator) -> None:
        done.append(f"{self.point.case} {self.point.size}")
        add_round(self, random)

    monkeypatch.setattr(Samples, "add_round", noted)
    return done


def test_the_device_works_first_and_each_case_ends_before_the_next_begins(measured: list[str]) -> None:
    cases = ("seal", "nvlink-aux")
    rounds = {"rounds_max": 2, "rounds_min": 2}
    plan = BenchPlan(cases=cases, shape="llama-3-tiny", device="cpu", seed=1, max_time_s=60, **rounds)
    facts: dict[str, object] = {}
    rows = run_bench(plan, lambda row: None, learn=facts.update)
    assert measured == ["spin", *["seal small", "seal large"] * 2, *["nvlink-aux small"] * 2]
    assert facts == {"sm_clock_mhz": 1980}
    assert [(row.case, row.size) for row in rows] == [("seal", "small"), ("seal", "large"), ("nvlink-aux", "small")]


def test_points_that_the_time_skipped_are_named_with_the_command_that_measures_them(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_rounds(monkeypatch, lambda samples: samples.point.size == "large")
    line = ["bench", "seal", "nvlink-aux", "--shape", "llama-3-tiny", "--max-time", "50", "--seed", "1"]
    assert run([*line, "--out", str(tmp_path)]) == 4
    (folder,) = tmp_path.iterdir()
    record = read_record(folder)
    again = "kvcheck bench seal --shape llama-3-tiny --device cpu --max-time 100"
    text = f"its time was up before a first round: large; next: {again}"
    assert {row.id: row.verdict for row in record.scenarios}["seal"] is Verdict.UNKNOWN
    assert [row.reason for row in record.scenarios if row.id == "seal"] == [text]
    assert text in capsys.readouterr().out
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["environment"]["sm_clock_mhz"] == 1980
