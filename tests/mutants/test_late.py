"""Bugs that need answers of "no" show within the bound of their row, and in no schedule with fewer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mutants.bounds import WORKLOADS, exploration_of

from kvcheck.commands.main import run
from kvcheck.commands.targets import unfound_mutant
from kvcheck.core.base.errors import UsageError
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.stress.mutant_trials import timed_mutants
from kvcheck.core.stress.runner import ScheduleRunner, Workloads
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import MUTANTS, mutant, mutant_target
from kvcheck.core.stress.targets.mutants.late import LATE
from kvcheck.core.stress.targets.target import Target
from tools.tables.search_table import explored

NAMES = [each.name for each in LATE]
PAIRS = [name for name in NAMES if len(mutant(name).faults) > 1]
MOST = 200
"""Schedules of an exploration, which ends far below."""


def ran(name: str, target: Target, workloads: Workloads, *, most: int = MOST) -> Iterator[Outcome]:
    for outcome in explored(exploration_of(name), most, ScheduleRunner(target, workloads=workloads).run):
        yield outcome
        if outcome.findings:
            return


@pytest.mark.schedules
@pytest.mark.parametrize("name", NAMES)
def test_it_shows_within_its_bound_and_not_with_fewer_answers(name: str) -> None:
    bug, workloads = mutant(name), Workloads()
    *before, last = ran(name, mutant_target(name), workloads)
    assert {len(each.refused) for each in before} >= {*range(bug.within)}, "all with fewer answers ran"
    assert len(before) < MOST and len(last.refused) == bug.within
    assert (bug.killed_by, bug.code) in {(each.oracle, each.code) for each in last.findings}
    fixed = [*ran(name, BuiltinTarget(), workloads, most=len(before) + 1)]
    assert [each.findings for each in fixed] == [()] * len(fixed)
    same = ScheduleRunner(BuiltinTarget(), workloads=workloads).run(replace(last.plan, mutant=None))
    assert (same.findings, same.broken_oracles) == ((), ())


@pytest.mark.schedules
@pytest.mark.parametrize("name", PAIRS)
def test_of_two_faults_either_alone_does_no_harm_within_the_bound(name: str) -> None:
    workloads = Workloads()
    for parts in mutant(name).faults:
        alone = [*ran(name, BuiltinTarget(parts), workloads)]
        assert len(alone) < MOST, "the exploration came to its end"
        assert [each.findings for each in alone] == [()] * len(alone)


def test_there_are_rows_of_each_kind_and_each_has_its_workload() -> None:
    assert [*WORKLOADS] == NAMES == [name for name, each in MUTANTS.items() if each.within]
    assert PAIRS and {each.within for each in LATE} == {1, 2}
    assert {"hicache", "retract-resume", "pd-transfer"} == {each.scenario for each in LATE}


def test_the_card_names_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "wait-looks-twice"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["bound", "answers within 2"] in rows


@pytest.mark.schedules
def test_selftest_gives_it_the_answers_that_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["selftest", "wait-looks-twice", "--schedules", "4", "--seed", "1", "--no-reports"]
    assert run([*command, "--out", str(tmp_path)]) == 0
    assert "lifetime KV202" in capsys.readouterr().out


def test_a_search_that_did_not_find_it_names_the_command_that_does() -> None:
    (easy,) = unfound_mutant("load-without-pin", is_found=False)
    (harder,) = unfound_mutant("wait-looks-twice", is_found=False)
    assert "selftest" not in easy
    assert harder.endswith("; next: kvcheck selftest wait-looks-twice, which answers by chance")


def test_a_delay_is_no_answer() -> None:
    """On a device nothing tells the process "no"."""
    named = [mutant("backup-before-forward"), mutant("asked-load-leaves-ring")]
    with pytest.raises(UsageError, match="no delay shows asked-load-leaves-ring; expected mutants that ordering kills"):
        timed_mutants(named, "cuda:0", are_named=True)
    assert timed_mutants(named, "cuda:0", are_named=False) == named[:1], "of all of them, those that a delay shows"
    assert timed_mutants(named[:1], "cuda:0", are_named=True) == named[:1]
