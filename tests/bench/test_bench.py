"""Benchmarks: rounds, refusals, interruptions, the command, and one round of every case with its outputs checked."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.cut_rounds import QuickClock, cut_rounds, point
from rigs.schemas import check_fits

from kvcheck.commands.main import run
from kvcheck.core.base.errors import UsageError, WrongOutput
from kvcheck.core.base.record import BenchRow, Verdict, read_record
from kvcheck.core.bench import CASES, case_offload
from kvcheck.core.bench import run as running
from kvcheck.core.bench.arms import Arm, ArmComparison, BenchSetting, Point, same
from kvcheck.core.bench.clock import CpuClock, nothing
from kvcheck.core.bench.measure import Samples
from kvcheck.core.bench.memory import FreshMemory, memcpy
from kvcheck.core.bench.run import BenchPlan, run_bench
from kvcheck.core.cache.pools.buffers import BufferSet
from kvcheck.core.stress.workload.shapes import shape as shape_named

MIB = 1 << 20
BENCH = ["bench", "guarded-read", "--shape", "llama-3-tiny", "--seed", "1"]


class ToldClock(CpuClock):
    """A clock that believes what calls return: nanoseconds."""

    def batch(
        self, calls: list[Callable[[], object]], count: int, kind: str, join: Callable[[], None] = nothing
    ) -> Callable[[], int]:
        (call,) = calls
        return lambda: sum(int(str(call())) for _ in range(count))


def told(memory: FreshMemory, ns: int) -> Arm:
    buffer = memory.words(8)
    return Arm(call=lambda: ns + int(memory.random.integers(100)), check=lambda: same("buffer", buffer, buffer))


def plan(**changed: object) -> BenchPlan:
    values: dict[str, object] = {"cases": ("guarded-read",), "shape": "llama-3-tiny", "device": "cpu", "seed": 1}
    return BenchPlan(**{**values, "max_time_s": 60.0, "rounds_max": 3, "rounds_min": 1, **changed})  # type: ignore[arg-type]


def serve(monkeypatch: pytest.MonkeyPatch, *points: Point) -> None:
    monkeypatch.setattr(running.CASES, "load", lambda name: lambda setting: points)
    monkeypatch.setattr(running, "clock_for", lambda device: ToldClock())


def test_rows_come_from_the_ratios_of_rounds() -> None:
    samples = Samples(point(slow=lambda m: told(m, 300_000), fast=lambda m: told(m, 150_000)), ToldClock())
    random = np.random.default_rng(1)
    for _ in range(15):
        samples.add_round(random)
    (row,) = samples.rows()
    assert (row.arm, row.baseline, len(row.ratios), row.status) == ("fast", "slow", 15, "ok")
    assert row.ratio.est == pytest.approx(0.5, rel=0.01) and row.us.est == pytest.approx(150, rel=0.01)
    assert row.ratio.lo is not None and row.ratio.hi is not None and row.ratio.lo <= row.ratio.est <= row.ratio.hi
    assert row.floor < 0.01 and samples.is_precise(0.03) and not samples.is_precise(1e-9)


def test_work_on_top_of_the_baseline_is_added_to_it_and_carries_little_of_its_noise() -> None:
    compared = (
        ArmComparison(arm="extra", baseline="base"),
        ArmComparison(arm="extra", baseline="base", name="plus-extra"),
    )
    made = point(base=lambda m: told(m, 300_000), extra=lambda m: told(m, 3_000))
    samples = Samples(replace(made, comparisons=compared), ToldClock())
    random = np.random.default_rng(1)
    for _ in range(15):
        samples.add_round(random)
    instead, plus = samples.rows()
    assert instead.ratio.est == pytest.approx(0.01, rel=0.05) and plus.ratio.est == pytest.approx(1.01, rel=0.001)
    assert plus.us == instead.us and 0 < plus.floor < 0.02 * instead.floor
    assert plus.ratios == pytest.approx([1 + each for each in instead.ratios])


def test_a_reference_in_host_memory_is_the_copy_of_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own copy takes half as long again for a large block, so that an offload reached 137 % of it."""
    memory = FreshMemory(np.random.default_rng(1), "cpu")
    source, target = memory.words(3, 5), memory.words(3, 5)
    with monkeypatch.context() as without:
        without.setattr(torch.Tensor, "copy_", None)
        memcpy(target, source)()
    same("copy", target, source)


def test_every_arm_of_every_round_has_memory_of_its_own() -> None:
    seen: list[tuple[int, bytes]] = []
    kept = []

    def maker(memory: FreshMemory) -> Arm:
        words = memory.words(1000)
        kept.append(words)
        seen.append((words.data_ptr(), words.numpy().tobytes()))
        return Arm(call=lambda: 200_000, check=lambda: None)

    samples = Samples(point(a=maker, b=maker), ToldClock())
    random = np.random.default_rng(1)
    for _ in range(4):
        samples.add_round(random)
    assert len(seen) == 12 and len({address for address, _ in seen}) == 12  # A, A' and B, four times
    assert len({address % 4096 for address, _ in seen}) > 3 and all(any(text) for _, text in seen)


def test_nothing_is_collected_while_arms_are_timed() -> None:
    states = []

    def maker(memory: FreshMemory) -> Arm:
        return Arm(call=lambda: states.append(gc.isenabled()) or 200_000, check=lambda: None)

    Samples(point(a=maker, b=maker), ToldClock()).add_round(np.random.default_rng(1))
    assert states and not any(states) and gc.isenabled()


def test_a_wrong_arm_is_refused_and_the_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(memory: FreshMemory) -> Arm:
        source, target = memory.words(64), memory.words(64)
        return Arm(call=lambda: 200_000, check=lambda: same("copy", target, source))

    good = point(a=lambda m: told(m, 200_000), b=lambda m: told(m, 200_000))
    serve(monkeypatch, good, point(a=lambda m: told(m, 200_000), b=wrong))
    rows: list[BenchRow] = []
    with pytest.raises(WrongOutput, match=r"^made-up/one arm b: copy: 64 of 64 values are wrong"):
        run_bench(plan(), rows.append)
    assert [row.arm for row in rows] == ["b"] and len(rows[0].ratios) == 1


def test_rounds_go_on_until_they_are_precise_or_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(memory: FreshMemory) -> Arm:
        ns = int(memory.random.integers(100_000, 400_000))
        return Arm(call=lambda: ns, check=lambda: None)

    calm = point(a=lambda m: told(m, 200_000), b=lambda m: told(m, 210_000))
    serve(monkeypatch, calm, point(a=noisy, b=noisy))
    found = run_bench(plan(rounds_min=6, rounds_max=9), lambda row: None)
    assert [len(row.ratios) for row in found] == [6, 9] and [row.status for row in found] == ["ok", "noisy"]


def test_the_rows_of_a_case_are_told_before_the_next_case_and_a_slow_case_leaves_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = point(a=lambda m: told(m, 200_000), b=lambda m: told(m, 200_000))
    cases = {name: replace(quick, case=name) for name in ("first", "last")}
    cases |= {"slow": replace(point(a=slow, b=slow), case="slow")}
    monkeypatch.setattr(running.CASES, "load", lambda name: lambda setting: [cases[name]])
    monkeypatch.setattr(running.CASES, "require", lambda name: None)
    monkeypatch.setattr(running, "clock_for", lambda device: ToldClock())
    events: list[str] = []
    late: list[str] = []
    run_bench(
        plan(cases=("first", "slow", "last"), max_time_s=2.0),
        lambda row: events.append(row.case),
        progress=lambda text: events.append(text.split(",")[0] + " runs"),
        late=lambda case, sizes: late.append(case),
    )
    assert events.index("first") < events.index("slow runs") < events.index("last runs") and events[-1] == "last"
    assert late == ["slow"]


def slow(memory: FreshMemory) -> Arm:
    """An arm whose calls take a tenth of a second each."""

    def call() -> int:
        time.sleep(0.1)
        return 200_000

    return Arm(call=call, check=lambda: None)


def test_time_that_is_up_ends_a_round_and_names_the_points_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = point(a=lambda m: told(m, 200_000), b=lambda m: told(m, 200_000))
    serve(monkeypatch, quick, replace(point(a=slow, b=slow), size="large"), replace(quick, size="last"))
    late: list[tuple[str, tuple[str, ...]]] = []
    began = time.monotonic()
    (row,) = run_bench(plan(max_time_s=1.0, rounds_max=5), lambda row: None, late=lambda *each: late.append(each))
    assert time.monotonic() - began < 10, "one round of the slow arms takes a minute"
    assert len(row.ratios) == 1 and row.ratio.lo is None and row.us.lo is None
    assert late == [(quick.case, ("large", "last"))]


def test_a_case_that_takes_too_long_to_make_ready_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Callable[[BenchSetting], tuple[Point, ...]]:
        return lambda setting: time.sleep(60) or ()  # type: ignore[func-returns-value]

    monkeypatch.setattr(running.CASES, "load", load)
    late: list[tuple[str, tuple[str, ...]]] = []
    assert run_bench(plan(max_time_s=0.2), lambda row: None, late=lambda *each: late.append(each)) == ()
    assert late == [("guarded-read", ())]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"cases": ()}, "case"),
        ({"cases": ("nope",)}, "nope"),
        ({"shape": "nope"}, "nope"),
        ({"device": "tpu"}, "tpu"),
        ({"precision": float("nan")}, "--precision"),
        ({"max_time_s": 0.0}, "--max-time"),
        ({"rounds_min": 4}, "--rounds"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_a_plan_refuses_what_cannot_be_met(changed: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        plan(**changed)


@pytest.mark.parametrize("case", CASES.names())
@pytest.mark.parametrize("shape", ["glm-5.1-tiny", "qwen3-next-tiny"])
def test_every_case_checks_its_arms(case: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_offload, "TARGET_BYTES", (MIB // 16, MIB // 4))
    points = CASES.load(case)(BenchSetting(shape=shape_named(shape), device="cpu"))
    assert points and len({each.size for each in points}) == len(points)
    ids = []
    for each in points:
        samples = Samples(each, QuickClock())
        samples.add_round(np.random.default_rng(3))
        ids += [row.id for row in samples.rows()]
    assert len(set(ids)) == len(ids)


def test_the_command_writes_a_record_that_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_rounds(monkeypatch, lambda samples: samples.rounds == 2)
    assert run([*BENCH, "--out", str(tmp_path)]) == 4
    (folder,) = tmp_path.iterdir()
    record = read_record(folder)
    (case,) = record.scenarios
    assert case.reason is not None and "none of its rows has a price" in case.reason
    assert len(record.warnings) == 1 and record.warnings[0].startswith("0 of 4 rows with a price")
    check_fits(json.loads((folder / "run.json").read_text(encoding="utf-8")))
    assert record.complete and [row.case for row in record.bench] == ["guarded-read"] * 4
    assert record.environment["noise_before"] and record.environment["noise_after"]
    shown = capsys.readouterr().out
    assert "none of its rows has a price" in shown and "use a larger --max-time" in shown
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<td>guarded-behind-load</td>") == 3  # once in short, and at every size
    assert len((folder / "bench.csv").read_text(encoding="utf-8").splitlines()) == 5


@pytest.mark.parametrize(("arguments", "word"), [(["nope"], "nope"), (["guarded-read", "--rounds", "5"], "--rounds")])
def test_the_command_refuses_in_one_line(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert word in line and not any(tmp_path.iterdir())


def test_a_device_that_is_not_there_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = torch.cuda.device_count()
    assert run(["bench", "guarded-read", "--device", f"cuda:{number}", "--out", str(tmp_path)]) == 4
    assert "CUDA devices; see `kvcheck doctor`" in capsys.readouterr().err


def test_some_prices_are_a_pass_that_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = point(a=lambda m: told(m, 200_000), b=lambda m: told(m, 200_000))
    points = [replace(quick, case="guarded-read", size=size) for size in ("small", "large")]
    serve(monkeypatch, *points)
    cut_rounds(monkeypatch, lambda samples: samples.rounds == 5 and samples.point.size == "large")
    assert run(["bench", "guarded-read", "--shape", "llama-3-tiny", "--rounds", "9", "--out", str(tmp_path)]) == 0
    assert "1 of 2 rows with a price" in capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    assert read_record(folder).verdict is Verdict.PASS


def test_an_interrupted_run_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Samples, random: np.random.Generator) -> None:
        if self.rounds == 1:
            raise KeyboardInterrupt
        measure(self, random)

    measure = Samples.add_round
    monkeypatch.setattr(Samples, "add_round", interrupted)
    assert run([*BENCH, "--out", str(tmp_path)]) == 130
    (folder,) = tmp_path.iterdir()
    record = read_record(folder)
    assert not record.complete and record.exit_code == 130 and len(record.bench) == 4
    check_fits(json.loads((folder / "run.json").read_text(encoding="utf-8")))


def test_a_wrong_output_is_a_finding_and_never_a_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BufferSet, "read_view", lambda self, name, *_: torch.zeros_like(self.write_view(name)))
    assert run([*BENCH, "--out", str(tmp_path)]) == 1
    (folder,) = tmp_path.iterdir()
    record = read_record(folder)
    assert not record.bench and [finding.code for finding in record.findings] == ["KV105"]
    assert "guarded: rows of the last layer: " in record.findings[0].message
