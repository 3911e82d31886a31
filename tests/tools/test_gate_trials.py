"""tools/gate_trials.py: the gate on an arm beside itself, on literal rows in the place of measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace

import pytest
from rigs.gate import bench_row

from kvcheck.core.base.record import BenchRow
from kvcheck.core.bench.arms import Arm, ArmComparison, Point
from kvcheck.core.bench.run import BenchPlan
from kvcheck.core.report.gate.judge import Overhead
from tools import gate_trials
from tools.gate_trials import AGAIN, ARMS, beside_itself, main, most_share, slowed


def measured(monkeypatch: pytest.MonkeyPatch, *ratios: float | BaseException) -> list[BenchPlan]:
    """Measuring gives these ratios, one a time; the plans that were asked for."""
    plans: list[BenchPlan] = []

    def fake(plan: BenchPlan, tell: object, **ignored: object) -> tuple[BenchRow, ...]:
        plans.append(plan)
        ratio = ratios[len(plans) - 1]
        if isinstance(ratio, BaseException):
            raise ratio
        return (bench_row(ratio, case="metadata-read"),)

    monkeypatch.setattr("kvcheck.core.bench.run.run_bench", fake)
    return plans


def test_a_trial_goes_the_way_of_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = measured(monkeypatch, 1.0, 1.2, 0.9, 1.2, 1.2)
    made = [*gate_trials.run_trials(3, 0.0, 4)]
    assert [trial.verdict for trial in made] == [Overhead.OK, Overhead.INCONCLUSIVE, Overhead.SLOWER]
    assert [len(trial.ratios) for trial in made] == [1, 2, 2]
    assert len({plan.seed for plan in plans}) == len(plans)
    assert [plan.cases for plan in plans[:2]] == [(case,) for case, _, _ in ARMS]


@pytest.mark.parametrize(
    ("options", "ratios", "exit_code", "line"),
    [
        ([], (1.0,), 0, "0 of 1, 0.0%, at most 95.0%"),
        ([], (1.2, 1.2), 4, "1 of 1, 100.0%, at most 100.0%"),
        (["--planted", "20"], (1.2, 1.2), 0, "1 of 1, 100.0%, at least 5.0%"),
        (["--planted", "20"], (1.0,), 4, "0 of 1, 0.0%, at least 0.0%"),
    ],
)
def test_trials_are_counted_with_their_limit(
    options: Sequence[str],
    ratios: tuple[float, ...],
    exit_code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured(monkeypatch, *ratios)
    assert main(["1", *options, "--seed", "1"]) == exit_code
    printed = capsys.readouterr().out
    assert line in printed and printed.endswith(f"seed 1, exit {exit_code}\n")


def test_limits_of_a_share_are_those_of_clopper_and_pearson() -> None:
    assert most_share(10, 100, tail=0.025) == pytest.approx(0.17622, abs=1e-5)
    assert 1 - most_share(90, 100, tail=0.025) == pytest.approx(0.04900, abs=1e-5)
    assert most_share(0, 200) == pytest.approx(1 - 0.05 ** (1 / 200))
    assert (most_share(5, 5), most_share(1000, 1000)) == (1.0, 1.0) and most_share(500, 1000) < 0.53


def _arm(memory: object) -> Arm:
    return Arm(call=lambda: None, check=lambda: None)


def test_an_arm_beside_itself_is_the_same_maker() -> None:
    rows = (ArmComparison(arm="b", baseline="a"),)
    points = [Point(case="x", size="1", shape=None, bytes=None, makers={"a": _arm, "b": _arm}, comparisons=rows)]
    (point,) = beside_itself(points, "b", 0)
    assert point.makers["b"] is point.makers[AGAIN] is _arm
    assert (point.baseline, point.comparisons) == ("b", (ArmComparison(arm=AGAIN, baseline="b"),))
    (point,) = beside_itself(points, "b", 20)
    assert _arm not in point.makers.values()  # both carry the clock


def slowed_waits(
    monkeypatch: pytest.MonkeyPatch, percent: float, *, call_ns: int, calls: int, step_ns: int
) -> list[int]:
    """What each call of a slowed arm waits, by a clock that goes on by a step whenever it is read."""
    now = [0]

    def reading() -> int:
        now[0] += step_ns
        return now[0]

    def work() -> None:
        now[0] += call_ns

    monkeypatch.setattr("tools.gate_trials.time.perf_counter_ns", reading)
    call = slowed(lambda memory: Arm(call=work, check=lambda: None), percent)(None).call  # type: ignore[arg-type]
    waits = []
    for _ in range(calls):
        before = now[0]
        call()
        waits.append(now[0] - before - call_ns - 2 * step_ns)
    return waits


@pytest.mark.parametrize(
    ("percent", "call_ns", "waits"),
    [
        (20, 1_000_000, [200_000, 200_000, 200_000]),
        (20, 10_000, [0, 0, 6_000, 0, 0, 6_000]),
        (20, 0, [0, 0, 0]),
        (0, 1_000_000, [0, 0]),
    ],
)
def test_a_planted_slow_down_waits_for_a_part_of_what_the_calls_took(
    percent: float, call_ns: int, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = slowed_waits(monkeypatch, percent, call_ns=call_ns, calls=len(waits), step_ns=1)
    assert found == pytest.approx(waits, abs=5)


def test_a_slow_down_by_a_coarse_clock_is_not_more_than_was_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = sum(slowed_waits(monkeypatch, 20, call_ns=10_000, calls=60, step_ns=4_000))
    assert waited == pytest.approx(60 * 14_000 * 0.2, abs=5_000)


def test_more_trials_than_a_process_makes_run_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    made = gate_trials.Trial(case="x", verdict=Overhead.OK, ratios=())
    monkeypatch.setattr(gate_trials, "_trial", lambda *arm, planted, seed: (seeds.append(seed), made)[1])
    processes = SimpleNamespace(Pool=lambda count, maxtasksperchild: ThreadPool(count))
    monkeypatch.setattr(gate_trials, "get_context", lambda kind: processes)
    assert [*gate_trials.run_trials(11, 0.0, 1)] == [made] * 11
    assert seeds == [100 * (1 + number) for number in range(11)]
