"""A subject that kvcheck does not know is a folder and a row: its cells run to a verdict and into a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcheck.commands.terminal import Terminal
from kvcheck.core.base.record import Verdict, read_record
from kvcheck.core.base.registry import Registry
from kvcheck.core.run import runners
from kvcheck.core.run.cell import STOPPED, ScheduleCell, floor_of
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.runners import RUNNERS, RunnerRow, row_of
from kvcheck.core.run.session import Session
from kvcheck.core.run.turns import CellTask, Limit, take_turns
from kvcheck.core.run.workers import tasks_text, work


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> RunnerRow:
    """The table of subjects has one row more, before the others."""
    table = Registry[RunnerRow]("runner", {"dial": "run.toy.row:DIAL", **dict(RUNNERS.targets())})
    monkeypatch.setattr(runners, "RUNNERS", table)
    return table.load("dial")


def no_target(plan: Plan) -> None:
    raise AssertionError("a dial has no target")


def cells(row: RunnerRow) -> list[ScheduleCell]:
    plans = row.cells(Plan(scenario="", target="dials"), (), ())
    return [ScheduleCell(plan=each, wanted=4, floor=floor_of(each, wanted=4)) for each in plans]


def test_a_plan_finds_its_row_and_others_keep_theirs(row: RunnerRow) -> None:
    plan = parse_line("turn:shape=round,target=dials")
    assert row_of(plan) is row and plan.cell == "turn/round" and parse_line(plan.line()) == plan
    assert row_of(Plan(scenario="hicache", shape="llama-3-tiny")).is_small(plan) is False
    assert row_of(Plan(scenario="hicache", shape="llama-3-tiny")) is not row


def test_its_cells_run_to_verdicts_and_into_a_record(row: RunnerRow, tmp_path: Path) -> None:
    session = Session(
        argv=[], repro="kvcheck dial", seed=1, plan={"cells": []}, out=tmp_path, teller=Terminal(is_quiet=True)
    )
    made = cells(row)
    session.cells = {each.id: each for each in made}
    assert {each.result().reason for each in made} == {STOPPED}
    tasks = [*enumerate(CellTask(plan=each.plan, schedules=each.wanted, floor=each.floor) for each in made)]
    for report in take_turns(tasks, Limit(), no_target):
        session.take(made[report.cell], report)
    record = session.save(complete=True)
    assert read_record(tmp_path / record.run_id / "run.json") == record
    rows = {each.id: each for each in record.scenarios}
    assert (rows["turn/round"].verdict, rows["turn/stuck"].verdict) == (Verdict.PASS, Verdict.FAIL)
    assert (record.verdict, record.exit_code) == (Verdict.FAIL, 1)
    assert rows["turn/round"].coverage.tried == ("right", "left") and rows["turn/round"].schedules == 4
    (finding,) = record.findings
    assert (finding.cell, finding.schedule) == (
        "turn/stuck",
        "turn:shape=stuck,target=dials,seed=1,schedule=2,expect=KV105",
    )


def test_a_worker_runs_it_like_any_other(row: RunnerRow) -> None:
    (cell, _) = cells(row)
    begun: list[str] = []
    text = tasks_text([(0, CellTask(plan=cell.plan, schedules=2, floor=2))], Limit())
    lines = [json.loads(line) for line in work(text, no_target, begun.append)]
    assert [each["schedule"] for each in lines if each["evidence"]] == [0, 1]
    assert parse_line(json.loads(begun[0])["begins"]) == cell.plan
