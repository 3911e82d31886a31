"""When a cell has run enough for a pass, and what is said of what it has not tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvcheck.commands.main import run
from kvcheck.core.base.record import Coverage, Verdict, read_record
from kvcheck.core.probes.runner import PROBE_FLOOR
from kvcheck.core.report.wording import coverage_text
from kvcheck.core.run.cell import coverage, floor_of, shortfall, tried_by
from kvcheck.core.run.plan import FLOOR, Plan, parse_line
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.pd_transfer import RANKS

PLAN = Plan(scenario="pd-transfer", shape="llama-3-tiny")
ORDERS = {
    "eager",
    "lazy",
    "random",
    "answers",
    *(f"delay:{group}" for group in ("compute", "d2h", "h2d", "wire", "message", "all")),
}
"""Those of the plan's cell, which has no other lanes."""


@pytest.mark.parametrize(
    ("line", "wanted", "least", "floor"),
    [
        ("pd-transfer:shape=llama-3-tiny", 24, None, FLOOR),
        ("pd-transfer:shape=llama-3-tiny", 1, None, FLOOR),
        ("pd-transfer:shape=llama-3-tiny", 24, 10, 10),
        ("pd-transfer:shape=llama-3-tiny", 24, 1, FLOOR),  # it can only be raised
        ("pd-transfer:shape=llama-3-tiny,trace=sample", 1, None, 1),
        ("pd-transfer:shape=llama-3-tiny,transport=tcp,ranks=2x2", 1, None, 1),
        ("pd-transfer:shape=llama-3-tiny,transport=tcp,ranks=2x2", 4, 4, 4),
        ("pd-transfer:shape=llama-3-tiny,mutant=abort-said-once", 24, None, 24),
        ("retract-resume:shape=retract.nsa,target=sglang", 24, None, PROBE_FLOOR),
    ],
)
def test_floor_of_a_cell(line: str, wanted: int, least: int | None, floor: int) -> None:
    assert floor_of(parse_line(line), wanted=wanted, least=least) == floor


@pytest.mark.parametrize("scenario", SCENARIOS.names())
def test_a_round_tries_everything_that_a_long_run_does(scenario: str) -> None:
    plan = replace(PLAN, scenario=scenario, shape="qwen3-next-tiny" if scenario == "hicache-hybrid" else PLAN.shape)
    whole = coverage(plan, wanted=24, floor=3, ran=range(24))
    longer = coverage(plan, wanted=600, floor=3, ran=range(600))
    assert {*whole.tried} == {*longer.tried} and not whole.not_tried


def test_one_schedule_within_the_floor_audits_footprints() -> None:
    found = coverage(PLAN, wanted=24, floor=FLOOR, ran=range(FLOOR))
    assert "audit of footprints" in found.tried
    assert "audit of footprints" in coverage(PLAN, wanted=24, floor=FLOOR, ran=[0, 1]).not_tried
    eager = coverage(replace(PLAN, backend="eager"), wanted=24, floor=FLOOR, ran=range(24))
    assert "audit of footprints" not in (*eager.tried, *eager.not_tried)


def test_what_was_not_tried_is_named_however_few_were_asked_for() -> None:
    found = coverage(PLAN, wanted=1, floor=3, ran=[0])
    order, ranks = found.tried[:2]
    assert order in ORDERS and ORDERS - {order} <= {*found.not_tried}
    assert {f"rank layout:{each}" for each in RANKS} - {ranks} <= {*found.not_tried}


@pytest.mark.parametrize(
    ("ran", "complaint"),
    [
        ([], "0 of 24 schedules ran, and a pass takes 3"),
        ([0, 1], "2 of 24 schedules ran, and a pass takes 3"),
        ([0, 1, 2], None),
        ([0, 8, 16], None),  # further workloads were tried: the last two orders are not eager
    ],
)
def test_shortfall(ran: list[int], complaint: str | None) -> None:
    found = coverage(PLAN, wanted=24, floor=3, ran=ran)
    assert shortfall(PLAN, found, ran=len(ran)) == complaint


def test_portfolio_that_tried_nothing_late_is_too_little() -> None:
    found = Coverage(wanted=24, floor=3, tried=("eager", "rank layout:1x1"), not_tried=("lazy",))
    assert shortfall(PLAN, found, ran=3) == "3 of 24 schedules ran, and none of them was lazy or delayed"
    assert shortfall(replace(PLAN, strategy="eager"), found, ran=3) is None, "eager alone was asked for"


@pytest.mark.parametrize(
    ("line", "order", "left"),
    [
        ("pd-transfer:shape=llama-3-tiny,strategy=random", "random", "lazy"),
        ("pd-transfer:shape=llama-3-tiny,strategy=eager", "eager", "random"),
        ("pd-transfer:shape=llama-3-tiny,strategy=delay,schedule=1", "delay:d2h", "random"),
        ("pd-transfer:shape=llama-3-tiny,strategy=answers", "answers", "delays"),
        ("pd-transfer:shape=llama-3-tiny,backend=eager", "eager", "delays"),
        ("pd-transfer:shape=llama-3-tiny,transport=tcp,ranks=2x1", "the machine's order", "chosen orders"),
        ("pd-transfer:shape=llama-3-tiny,backend=cuda,device=cuda", "the device's order", ""),
    ],
)
def test_orders_that_a_plan_leaves_out(line: str, order: str, left: str) -> None:
    plan = parse_line(line)
    found = coverage(plan, wanted=1, floor=1, ran=[plan.schedule])
    assert tried_by(plan)[0] == found.tried[0] == order
    assert not left or left in found.not_tried


def test_engines_probes_have_no_orders() -> None:
    plan = parse_line("retract-resume:shape=retract.nsa,target=sglang")
    assert coverage(plan, wanted=24, floor=12, ran=range(24)) == Coverage(wanted=24, floor=12)


def test_coverage_in_words() -> None:
    found = coverage(PLAN, wanted=24, floor=3, ran=[0, 1, 2])
    assert coverage_text(found) == (
        "tried eager, lazy, random, audit of footprints, 3 of 9 rank layouts, 3 of 4 abort stages, 2 of 2 metadata "
        "paths, 2 of 4 prefill chunks, 1 of 3 fault kinds, 2 of 3 faulty legs, 1 of 3 retry delays, 2 of 2 faulty "
        "ranks, 1 of 2 lost messages, 1 of 2 message counts; not tried: any of 6 delays, answers"
    )
    nothing = Coverage(wanted=24, floor=3, not_tried=("eager", "write policy:write_back", "write policy:selective"))
    assert coverage_text(nothing) == "tried nothing; not tried: eager, any of 2 write policies"


SMALL = ["stress", "pd-transfer", "--shape", "llama-3-tiny", "--transport", "loopback", "--seed", "11", "--no-reports"]


@pytest.mark.schedules
def test_pass_below_the_floor_is_unknown_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--schedules", "2", "--out", str(tmp_path)]) == 4
    told = capsys.readouterr().out
    assert "?2" in told and "2 of 2 schedules ran, and a pass takes 3" in told
    (path,) = tmp_path.glob("*/run.json")
    (row,) = read_record(path).scenarios
    assert row.verdict is Verdict.UNKNOWN and row.coverage is not None
    assert (row.coverage.wanted, row.coverage.floor) == (2, 3) and "eager" in row.coverage.not_tried


@pytest.mark.schedules
def test_mutant_whose_time_is_up_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = ["stress", "retract-resume", "--mutant", "offload-skips-index-buffer", "--shape", "llama-3-tiny"]
    assert run([*what, "--seed", "1", "--max-time", "1", "--no-reports", "--out", str(tmp_path)]) == 4
    assert "of 24 schedules ran, and a pass takes 24: " in capsys.readouterr().out


@pytest.mark.schedules
def test_mutant_that_cannot_show_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = ["stress", "retract-resume", "--mutant", "offload-skips-index-buffer", "--shape", "llama-3-tiny"]
    assert run([*what, "--seed", "1", "--schedules", "3", "--no-reports", "--out", str(tmp_path)]) == 4
    (path,) = tmp_path.glob("*/run.json")
    record = read_record(path)
    for told in ("".join(record.warnings), str(record.scenarios[0].reason), capsys.readouterr().out):
        assert "was put back and nothing was found" in told
