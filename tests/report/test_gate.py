"""The gate's judgement on overhead: literal rounds, then noise as busy machines make it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rigs.gate import STEPS, bench_row, gated, judged, noisy_row

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.report.gate.judge import Overhead, Rules, StoredRow, decide, fault

OK, INCONCLUSIVE, SLOWER = Overhead.OK, Overhead.INCONCLUSIVE, Overhead.SLOWER
SLOW, FAST = bench_row(1.2), bench_row(0.9)
WIDE = tuple(step / 40 for step in range(-7, 8))
UNSURE = bench_row(1.05, rounds=WIDE)


@pytest.mark.parametrize(
    ("looks", "verdict"),
    [
        ((FAST,), OK),
        ((bench_row(1.02),), OK),
        ((SLOW, SLOW), SLOWER),
        ((SLOW, FAST), INCONCLUSIVE),
        ((SLOW, UNSURE, SLOW), SLOWER),
        ((SLOW, UNSURE, FAST), INCONCLUSIVE),
        ((SLOW, UNSURE, UNSURE), INCONCLUSIVE),
        ((UNSURE, FAST), OK),
        ((UNSURE, UNSURE), INCONCLUSIVE),
        ((UNSURE, SLOW, SLOW), SLOWER),
        ((UNSURE, SLOW, FAST), INCONCLUSIVE),
        ((UNSURE, SLOW, UNSURE), INCONCLUSIVE),
        ((SLOW, "no such row any more"), INCONCLUSIVE),
        ((SLOW, replace(SLOW, status="unknown")), INCONCLUSIVE),
    ],
)
def test_slower_takes_two_measurements_and_no_other_word(looks: tuple[BenchRow | str, ...], verdict: Overhead) -> None:
    assert judged(*looks)[0] is verdict


@pytest.mark.parametrize(
    ("row", "rules", "verdict"),
    [
        (bench_row(1.09), Rules(), OK),
        (bench_row(1.11), Rules(), SLOWER),
        (bench_row(1.11), Rules(fail_over=0.2), OK),
        (bench_row(1.04), Rules(tol=0, fail_over=0.02), SLOWER),
        (bench_row(1.11), Rules(tol=0.107, fail_over=0.107), INCONCLUSIVE),
        (bench_row(1.09, floor=0.05), Rules(), INCONCLUSIVE),
        (bench_row(1.2, floor=0.21), Rules(), INCONCLUSIVE),
        (bench_row(1.3, floor=0.21), Rules(), SLOWER),
        (bench_row(0.7, floor=0.21), Rules(), OK),
        (bench_row(1.5, rounds=STEPS[:5]), Rules(), INCONCLUSIVE),
        (bench_row(1.5, rounds=STEPS[:6]), Rules(), SLOWER),
        (bench_row(0.5, rounds=STEPS[:5]), Rules(), INCONCLUSIVE),
    ],
)
def test_one_look_is_judged_by_interval_tolerance_and_floor(row: BenchRow, rules: Rules, verdict: Overhead) -> None:
    found, _ = decide([gated(row)], rules, lambda rows: ["not measured" for _ in rows])
    assert found[0].measurements[0].verdict is verdict


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.85, OK), (0.75, OK), (0.735, INCONCLUSIVE), (0.6, SLOWER), (0.79, OK)]
)
def test_a_share_of_a_limit_is_judged_by_its_interval(share: float, verdict: Overhead) -> None:
    row = bench_row(limit="memcpy", limit_ratio=Interval(share, share * 0.98, share * 1.02))
    found, _ = decide([gated(row, 0.8, "min_limit_ratio")], Rules(), lambda rows: [each.row for each in rows])
    assert found[0].verdict is verdict
    assert found[0].measurements[0].p is None


def test_what_is_ok_is_not_measured_again_and_the_rest_at_most_twice() -> None:
    asked: list[list[str]] = []

    def measure(rows: object) -> list[BenchRow]:
        assert isinstance(rows, list)
        asked.append([each.row.case for each in rows])
        return [replace(UNSURE if len(asked) == 1 else SLOW, case=each.row.case) for each in rows]

    rows = [replace(FAST, case="fast"), replace(SLOW, case="slow"), replace(UNSURE, case="unsure")]
    found, is_complete = decide([gated(row) for row in rows], Rules(), measure)
    assert asked == [["slow", "unsure"], ["slow"]]
    assert [row.verdict for row in found] == [OK, SLOWER, INCONCLUSIVE]
    assert is_complete


def test_fresh_rounds_have_to_pass_holms_correction_over_all_gated_rows() -> None:
    marginal = bench_row(1.0, rounds=(*([0.2] * 12), *([0.0] * 3)))  # 12 of 15 rounds above: p = 0.018
    alone, _ = decide([gated(marginal)], Rules(), lambda rows: [each.row for each in rows])
    assert alone[0].verdict is SLOWER
    others = [gated(replace(FAST, case=str(number))) for number in range(7)]
    among, _ = decide([gated(marginal), *others], Rules(), lambda rows: [each.row for each in rows])
    assert among[0].verdict is INCONCLUSIVE
    assert among[0].last.p == pytest.approx(8 * 576 / 32768)
    sure, _ = decide([gated(SLOW), *others], Rules(), lambda rows: [each.row for each in rows])
    assert sure[0].verdict is SLOWER


@pytest.mark.parametrize("looks", [(bench_row(1.06),), (bench_row(1.06), SLOW, SLOW)])
@pytest.mark.parametrize("tol", [0.0, 0.03, 0.1])
def test_what_is_over_its_budget_says_so_whatever_is_tolerated(looks: tuple[BenchRow, ...], tol: float) -> None:
    found, _ = decide([gated(looks[0])], Rules(tol=tol), lambda rows: [SLOW])
    assert any("6.0% over its budget, within --fail-over" in note for note in found[0].notes)


def test_an_interruption_keeps_what_was_judged() -> None:
    def interrupted(rows: object) -> list[BenchRow]:
        raise KeyboardInterrupt

    found, is_complete = decide([gated(FAST), gated(SLOW)], Rules(), interrupted)
    assert ([row.verdict for row in found], is_complete) == ([OK, INCONCLUSIVE], False)


@pytest.mark.parametrize(
    ("row", "bound", "reason"),
    [
        (bench_row(), "max_ratio", ""),
        (bench_row(status="noisy", floor=0.3), "max_ratio", ""),
        (bench_row(status="unknown", note="no device"), "max_ratio", "no device"),
        (bench_row(ratios=()), "max_ratio", "no rounds"),
        (bench_row(ratios=(1.0, 0.0)), "max_ratio", "above 0, got 0"),
        (bench_row(ratios=(5e-324,) * 6), "max_ratio", "above 0"),
        (bench_row(floor=-0.1), "max_ratio", "at least 0, got -0.1"),
        (bench_row(), "min_limit_ratio", "no physical limit"),
        (bench_row(limit_ratio=Interval(0.5)), "min_limit_ratio", ""),
        (bench_row(limit_ratio=Interval(0.5, 0.0, 0.6)), "min_limit_ratio", "above 0, got 0"),
        (bench_row(limit_ratio=Interval(0.01, 0.5, 0.9)), "min_limit_ratio", "inside its interval"),
    ],
)
def test_a_row_that_cannot_be_judged_says_why(row: BenchRow, bound: str, reason: str) -> None:
    found = fault(row, bound) or ""
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize(
    ("tol", "fail_over"), [(-0.1, 0.1), (0.2, 0.1), (float("nan"), 0.1), (0.03, float("inf")), (0.0, 11.0)]
)
def test_rules_that_make_no_sense_are_refused(tol: float, fail_over: float) -> None:
    with pytest.raises(UsageError, match="--tol and --fail-over: expected 0 <= tol <= fail-over"):
        Rules(tol, fail_over)


def rates(ratio: float | None, *, sd: float, kind: str, runs: int = 200, rows: int = 1) -> tuple[float, float]:
    """Of so many runs of the gate, the shares with a SLOWER and with an OK first row.

    ratio: of the first row; None: what that row's record says from where on it would be called slower.
    """
    random = np.random.default_rng(7)
    said = []
    for _ in range(runs):
        planted = ratio
        if planted is None:
            (row,), _ = decide([gated(noisy_row(random, 0.5, rounds=15, sd=sd, kind=kind))], Rules(), _refuse)
            assert row.slower_from is not None
            planted = row.slower_from
        recorded = [noisy_row(random, planted if at == 0 else 0.9, rounds=15, sd=sd, kind=kind) for at in range(rows)]

        def measure(wanted: object, planted: float = planted) -> list[BenchRow]:
            assert isinstance(wanted, list)
            return [
                replace(noisy_row(random, planted if at == 0 else 0.9, rounds=25, sd=sd, kind=kind), case=each.row.case)
                for at, each in enumerate(wanted)
            ]

        found, _ = decide([gated(row) for row in recorded], Rules(), measure)
        said.append([row.verdict for row in found])
    return sum(SLOWER in each for each in said) / runs, sum(each[0] is OK for each in said) / runs


def _refuse(rows: object) -> list[str]:
    assert isinstance(rows, list)
    return ["not asked for" for _ in rows]


NOISE = ("quiet", "heavy tails", "drift", "off")


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("sd", [0.01, 0.05, 0.15])
def test_an_arm_beside_itself_is_not_called_slower(kind: str, sd: float) -> None:
    slower, passed = rates(1.0, sd=sd, kind=kind, rows=2)
    assert slower <= 0.01
    assert passed >= (0.95 if sd == 0.01 else 0.0)


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("sd", [0.01, 0.04])
def test_a_fifth_more_time_is_caught(kind: str, sd: float) -> None:
    slower, passed = rates(1.2, sd=sd, kind=kind)
    assert slower >= 0.95
    assert passed == 0


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("sd", [0.01, 0.03, 0.1])
def test_what_the_gate_says_it_sees_it_sees(kind: str, sd: float) -> None:
    slower, _ = rates(None, sd=sd, kind=kind)
    assert slower >= 0.85


def test_sees_is_in_the_units_of_the_bound() -> None:
    (row,), _ = decide([gated(bench_row(0.25), 0.5)], Rules(), _refuse)
    assert row.slower_from == pytest.approx(0.55, rel=0.02)
    assert row.slower_from_change == pytest.approx(1.2, rel=0.02)
    share = bench_row(limit_ratio=Interval(0.9, 0.89, 0.91))
    (row,), _ = decide([gated(share, 0.8, "min_limit_ratio")], Rules(), _refuse)
    assert row.slower_from == pytest.approx(0.8 / 1.1, rel=0.02)
    assert row.slower_from_change == pytest.approx(0.9 / 0.8 * 1.1 - 1, rel=0.1)


def test_rows_are_found_again_by_their_place() -> None:
    seen: list[StoredRow] = []

    def measure(rows: object) -> list[BenchRow]:
        assert isinstance(rows, list)
        seen.extend(rows)
        return [SLOW, FAST]

    found, _ = decide([gated(SLOW), gated(SLOW, 1.05)], Rules(), measure)
    assert [row.verdict for row in found] == [SLOWER, INCONCLUSIVE]
    assert [each.row for each in seen] == [SLOW, SLOW]
