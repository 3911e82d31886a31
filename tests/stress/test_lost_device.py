"""What a process that has lost its device leaves, and that it goes on in a new one, on a stand-in for torch.cuda."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import cuda_worker
from fakes.cuda import installed
from rigs.losing import CRASH, HELD, Losing

from kvcheck.commands import replay, run_cells, selftest
from kvcheck.commands.main import run
from kvcheck.core.base.errors import HardwareError, InternalError
from kvcheck.core.base.record import Evidence, to_plain
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.turns import CellTask, Limit, Report, take_turns
from kvcheck.core.run.workers import CellsChild
from kvcheck.core.stress import mutant_trials
from kvcheck.core.stress.mutant_trials import MutantTask
from kvcheck.core.stress.targets.builtin import BuiltinTarget


def tasks(*schedules: int) -> list[tuple[int, CellTask]]:
    names = ("hicache", "retract-resume", "pd-transfer")
    return [
        (at, CellTask(plan=replace(HELD, scenario=name), schedules=count, floor=count))
        for at, (name, count) in enumerate(zip(names, schedules, strict=False))
    ]


def test_a_process_that_has_lost_its_device_ends_its_share_and_leaves_what_has_schedules_to_run() -> None:
    runner = Losing(lost_in=5)
    reports = [*take_turns(tasks(2, 3, 9), Limit(cpu_s=1e6), _no_target, runner)]
    assert runner.ran == [
        *("hicache 0", "hicache 1"),  # the first micro cell runs up to its floor
        *("retract-resume 0", "pd-transfer 0", "retract-resume 1"),
    ]
    lost, *ends = reports[-4:]
    assert lost.is_device_lost and lost.cell == 1 and lost.findings == (CRASH,)
    assert lost.left_cpu_s is not None and 0 < lost.left_cpu_s <= 1e6
    assert [(end.cell, end.is_left, end.note) for end in ends] == [
        (1, False, "the rates"),
        (0, False, "the rates"),  # all its schedules have run, and this process alone knows what they gave
        (2, True, "the rates, before another cell lost the device"),
    ]
    assert sum(each.evidence is not None for each in reports) == len(runner.ran)


def test_an_error_of_the_hardware_ends_its_cell_as_unknown_and_leaves_the_others_to_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(self: Losing, plan: Plan) -> None:
        raise HardwareError("the hardware of cuda reported an error")

    monkeypatch.setattr(Losing, "run", run)
    end, left = take_turns(tasks(2, 3), Limit(cpu_s=1e6), _no_target, Losing(lost_in=0))
    assert (end.cell, end.findings, end.evidence, end.cut) == (0, (), None, "the hardware of cuda reported an error")
    assert end.is_device_lost and end.left_cpu_s is not None and (left.cell, left.is_left) == (1, True)
    made = child(0)
    for report in (end, left):
        assert [*made.takes(report.line())] == [report]
    assert [*made.ends()] == [] and [*made.cells] == [1] and made.left.cpu_s == end.left_cpu_s


def test_a_cell_ends_with_its_device_also_where_its_finding_would_not_end_it() -> None:
    """So each new process has fewer cells than the one before it."""
    runner = Losing(lost_in=1, finding=replace(CRASH, condition="the pool is small"))
    reports = [*take_turns(tasks(3), Limit(), _no_target, runner)]
    assert runner.ran == ["hicache 0"] and [each.is_left for each in reports] == [False, False]
    assert reports[-1].evidence is None


@pytest.mark.parametrize(("until", "note"), [(0.0, None), (None, "the rates")])
def test_a_cell_that_had_no_time_for_a_schedule_tells_no_rates(until: float | None, note: str | None) -> None:
    *_, end = take_turns(tasks(1), Limit(until=until), _no_target, Losing(lost_in=0))
    assert end.evidence is None and (end.note, end.is_note_told) == (note, note is not None)


@pytest.mark.parametrize(("is_exercised", "reason"), [(False, "nothing was held"), (True, None)])
def test_a_cell_that_has_exercised_all_in_a_lost_process_passes_in_the_next(
    is_exercised: bool, reason: str | None
) -> None:
    task = replace(tasks(2)[0][1], before=Evidence(schedules=1), is_exercised=is_exercised)
    runner = Losing(lost_in=0, missing="nothing was held")
    *_, last = take_turns([(0, task)], Limit(), _no_target, runner)
    assert runner.ran[:1] == ["hicache 1"] and last.reason == reason


def _no_target(plan: Plan) -> BuiltinTarget:
    raise AssertionError("the runner is given")


def child(status: int) -> CellsChild:
    """A process that has ended so, and the two cells that it was given."""
    ended = SimpleNamespace(wait=lambda: status, has_begun=True)
    return CellsChild(ended, dict(tasks(2, 3)), Limit(cpu_s=9.0))  # type: ignore[arg-type]


JUDGED = Report(cell=1, schedule=0, evidence=Evidence(schedules=1, retractions=4))
LAST = Report(cell=0, findings=(CRASH,), evidence=Evidence(schedules=1), is_device_lost=True, left_cpu_s=7.0)


@pytest.mark.parametrize("reason", [None, "nothing was held"])
def test_what_a_lost_process_leaves_goes_on_behind_what_it_has_judged(reason: str | None) -> None:
    made = child(0)
    for report in (JUDGED, LAST, Report(cell=0), Report(cell=1, is_left=True, reason=reason)):
        assert [*made.takes(report.line())] == [report]
    assert [*made.ends()] == [] and made.left.cpu_s == 7.0
    (task,) = made.cells.values()
    assert task.plan.scenario == "retract-resume" and task.before == JUDGED.evidence
    assert task.is_exercised == (reason is None)


def test_a_process_that_dies_of_its_lost_device_accuses_no_cell_that_it_leaves() -> None:
    made = child(-6)
    for report in (JUDGED, LAST):
        assert [*made.takes(report.line())] == [report]
    assert [*made.ends()] == [Report(cell=0)], "the cell that has lost the device ends, and its finding is told"
    assert [*made.cells] == [1] and not made.cells[1].is_exercised


def test_a_process_that_dies_accuses_the_cell_that_it_ran_and_leaves_the_others() -> None:
    made = child(-11)
    assert [*made.takes(json.dumps({"cell": 0, "begins": "hicache:seed=1"}))] == []
    assert [*made.takes(replace(JUDGED, cell=0, duration_s=2.0).line())]
    assert [*made.takes(json.dumps({"cell": 1, "begins": "retract-resume:seed=1"}))] == []
    (end,) = made.ends()
    assert (end.cell, end.exit_code, end.ran) == (1, 1, "retract-resume:seed=1") and "status -11" in str(end.error)
    assert [*made.cells] == [0] and made.cells[0].before == JUDGED.evidence and made.left.cpu_s == 7.0


def test_a_last_line_of_a_process_is_about_the_cell_that_it_ran() -> None:
    made = child(4)
    assert [*made.takes(json.dumps({"cell": 1, "begins": "retract-resume:seed=1"}))] == []
    assert [each.cell for each in made.takes(Report(error="short of memory", exit_code=4).line())] == [1]
    assert [*made.ends()] == [] and [*made.cells] == [0]


def test_a_process_that_dies_between_schedules_accuses_its_cells() -> None:
    made = child(-6)
    assert [*made.takes(JUDGED.line())] == [JUDGED]
    assert [(each.cell, each.exit_code) for each in made.ends()] == [(0, 1), (1, 1)] and not made.cells


def test_a_lost_process_that_says_that_kvcheck_failed_ends_the_run() -> None:
    made = child(70)
    assert [*made.takes(LAST.line())] == [LAST]
    with pytest.raises(InternalError, match="a bug"):
        [*made.takes(Report(error="a bug", exit_code=70).line())]


Diary = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Diary:
    """The commands start processes with the stand-in; called, it gives (process, line) of each run, in order."""
    for command in (run_cells, selftest):
        monkeypatch.setattr(command, "worker", cuda_worker)
    monkeypatch.setattr(replay, "WORKER", cuda_worker.__name__)
    monkeypatch.setenv("CUDA_DIARY", str(tmp_path / "diary"))
    rows = (tmp_path / "diary").read_text
    return lambda: [(pid, line) for pid, line in (row.split(" ", 1) for row in rows().splitlines())]


@pytest.mark.schedules
@pytest.mark.processes
def test_stress_goes_on_in_a_new_process_and_judges_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, diary: Diary
) -> None:
    """The device is lost under the delays of schedule 1 of retract-resume; hicache has run one schedule by then."""
    monkeypatch.setenv("CUDA_LOST_IN", "retract-resume schedule=1 strategy=delay")
    given = ["--device", "cuda", "--strategy", "delay", "--schedules", "3", "--seed", "1", "--no-reports"]
    cells = ["retract-resume", "hicache", "--shape", "llama-3-tiny"]
    with installed(1):
        assert run(["stress", *cells, *given, "--out", str(tmp_path / "runs")]) == 1
    told = capsys.readouterr().out
    record = json.loads(next(tmp_path.glob("runs/*/run.json")).read_text())
    lines = diary()
    by_cell = {name: [(pid, parse_line(line)) for pid, line in lines if line.startswith(name)] for name in cells[:2]}
    first, second = dict.fromkeys(pid for pid, _ in lines)
    assert {pid for pid, _ in by_cell["retract-resume"]} == {first}
    assert [(pid, plan.schedule) for pid, plan in by_cell["hicache"] if plan.strategy == "delay"] == [
        (first, 0),
        (second, 1),
        (second, 2),
    ]
    assert "in 0 of 1 run without delays, 0 of 1 with, before another cell lost the device" in told
    assert max(Counter(line for _, line in lines).values()) == 1
    (finding,) = record["findings"]
    assert finding["code"] == "KV902" and "the context of cuda is lost" in finding["message"]
    assert "schedule=1," in finding["schedule"]
    rows = {row["id"].partition("/")[0]: row for row in record["scenarios"]}
    assert (rows["retract-resume"]["verdict"], rows["retract-resume"]["schedules"]) == ("fail", 2)
    assert (rows["hicache"]["verdict"], rows["hicache"]["schedules"]) == ("pass", 3)


def test_a_mutant_that_meets_broken_hardware_is_lost_and_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(*given: object, **more: object) -> None:
        raise HardwareError("the hardware of cuda reported an error")

    monkeypatch.setattr(mutant_trials, "judge_in_time", judged)
    task = MutantTask(schedules=1, device="cuda", mutant="load-without-pin", line=HELD.line(), max_time_s=0.0)
    said = json.loads(mutant_trials.answered(json.dumps(to_plain(task)), BuiltinTarget))  # type: ignore[arg-type]
    assert said["goes_on"] is False and said["result"]["outcome"] == "lost"
    assert said["result"]["message"].startswith("the hardware of cuda reported an error; next: ")


@pytest.mark.schedules
@pytest.mark.processes
def test_selftest_judges_behind_a_mutant_that_loses_its_device_and_one_that_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diary: Diary
) -> None:
    names = ["replay-without-whole-wait", "ring-rearmed-early", "gate-waits-on-load-lane"]
    monkeypatch.setenv("CUDA_LOST_IN", f"mutant={names[0]} strategy=delay")
    monkeypatch.setenv("CUDA_DIES_IN", f"mutant={names[1]}")
    with installed(1):
        given = ["--device", "cuda", "--seed", "1", "--no-reports", "--out", str(tmp_path / "runs")]
        assert run(["selftest", *names, *given]) == 4
    record = json.loads(next(tmp_path.glob("runs/*/run.json")).read_text())
    lost, dead, judged = record["mutants"]
    assert [each["name"] for each in record["mutants"]] == names
    assert (lost["outcome"], lost["verdict"]) == (dead["outcome"], dead["verdict"]) == ("lost", "unknown")
    assert "the context of cuda is lost" in lost["message"] and "strategy=delay" in lost["replay"]
    assert "ended with status 3; next: kvcheck selftest ring-rearmed-early --device cuda" in dead["message"]
    assert (judged["outcome"], judged["verdict"]) == ("reproduced", "pass")
    by_mutant = {name: {pid for pid, line in diary() if f"mutant={name}," in line} for name in names}
    assert [len(each) for each in by_mutant.values()] == [1, 1, 1] and len(set.union(*by_mutant.values())) == 3


@pytest.mark.schedules
@pytest.mark.processes
def test_each_replay_of_a_line_that_loses_the_device_has_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, diary: Diary
) -> None:
    monkeypatch.setenv("CUDA_LOST_IN", "strategy=delay")
    with installed(1):
        assert run(["replay", replace(HELD, expect="KV902").line(), "--times", "2"]) == 1
        told = capsys.readouterr().out
        assert "STILL FAILS 2/2" in told and "the context of cuda is lost: an operation was given an id" in told
        monkeypatch.setenv("CUDA_DIES_IN", "strategy=delay")
        assert run(["replay", HELD.line()]) == 4
        assert "UNKNOWN  hicache/llama-3-micro: the process that ran it ended with status 3" in capsys.readouterr().out
    assert list(Counter(pid for pid, _ in diary()).values()) == [2, 2, 2], (
        "each process made one free run and one under delays"
    )


@pytest.mark.schedules
@pytest.mark.processes
def test_each_line_of_a_cpu_is_replayed_over_a_device_that_the_one_before_it_has_not_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, diary: Diary
) -> None:
    """The first line loses the context, the second ends its process, and the last two share one."""
    names = ["gate-waits-wrong-entry", "replay-without-whole-wait", "gate-waits-on-load-lane", "load-without-pin"]
    lines = [Plan(scenario="hicache", shape="llama-3-micro", mutant=name).line() for name in names]
    monkeypatch.setenv("CUDA_LOST_IN", f"mutant={names[0]} strategy=delay")
    monkeypatch.setenv("CUDA_DIES_IN", f"mutant={names[1]}")
    with installed(1) as machine:
        assert run(["replay", *lines, "--device", "cuda"]) == 1
    told = capsys.readouterr().out.splitlines()
    lost, dead, *shown = [line for line in told if line.startswith((" NOT", " UNK", " STILL"))]
    assert lost.startswith(" NOT REPRODUCED  hicache/llama-3-micro: RuntimeError: the context of cuda is lost: ")
    assert dead == " UNKNOWN  hicache/llama-3-micro: the process that judged it ended with status 3"
    assert len(shown) == 2 and all(line.startswith(" STILL FAILS  hicache/llama-3-micro: KV10") for line in shown)
    pids = [{pid for pid, line in diary() if f"mutant={name}," in line} for name in names]
    assert [len(each) for each in pids] == [1] * 4 and pids[2] == pids[3] and len(set.union(*pids)) == 3
    assert sum("wrong bytes in 0 of 1 run without delays, 0 of 1 with" in line for line in told) == 1
    assert machine.lost is None and str(os.getpid()) not in set.union(*pids)
