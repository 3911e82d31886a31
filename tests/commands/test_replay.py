"""Claims of a replay: FIXED needs evidence and the recorded path; a target that ends the process is a finding."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.literal_record import FAILED, FOREIGN, STORY

from kvcheck.commands.main import run
from kvcheck.commands.replay import _after_failure, lines_of
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.store import RunStore
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.strategies import ReplayStrategy, decode_choices, encode_choices
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant, mutant_target
from kvcheck.core.stress.targets.target import TargetParts

PLAN = Plan(scenario="retract-resume", shape="llama-3-tiny", seed=1)


class Quitter(DecodeScheduler):
    """Ends the process, politely, in the middle of the run."""

    def step(self) -> object:  # type: ignore[override]
        """Exit as if all were well."""
        sys.exit(0)


@pytest.mark.schedules
def test_a_target_that_exits_has_crashed() -> None:
    outcome = ScheduleRunner(BuiltinTarget(TargetParts(decode_scheduler=Quitter))).run(PLAN)
    assert [(finding.code, finding.oracle) for finding in outcome.findings] == [("KV902", "liveness")]
    assert "SystemExit" in outcome.findings[0].message


@pytest.fixture(scope="module")
def recorded() -> Plan:
    """The line of a finding without its mutant: the fixed build takes the very same path."""
    bug = mutant("offload-value-aliases-pool")
    plan = Plan(scenario=bug.scenario, shape=bug.shape, mutant=bug.name, seed=1)
    outcome = ScheduleRunner(mutant_target(bug.name)).run(plan)
    return dataclasses.replace(parse_line(outcome.findings[0].schedule), mutant=None)


def replayed(plan: Plan, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of `kvcheck replay`."""
    code = run(["replay", plan.line()])
    return code, capsys.readouterr().out


@pytest.mark.schedules
def test_the_recorded_path_without_a_finding_is_fixed(recorded: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = replayed(recorded, capsys)
    cell = "   next    kvcheck stress retract-resume --shape glm-5.1-tiny"
    assert code == 0 and printed.splitlines()[0].startswith(" FIXED  retract-resume/glm-5.1-tiny: 1 of 1 run clean")
    assert printed.splitlines()[1:] == [cell, " exit 0"], "one schedule is no proof"


@pytest.mark.schedules
@pytest.mark.parametrize("change", ["cut", "longer", "bent"])
def test_off_the_recorded_path_nothing_is_fixed(
    change: str, recorded: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = decode_choices(recorded.choices or "")
    changed, reason = {
        "cut": (choices[:-5], "the run went on for 5 choices after their end"),
        "longer": (choices + b"\1\1\1", "3 were left over"),
        "bent": (choices[:-1] + bytes([choices[-1] + 200]), "1 of them did not fit what was offered"),
    }[change]
    code, printed = replayed(dataclasses.replace(recorded, choices=encode_choices(changed)), capsys)
    assert code == 4
    assert printed.startswith(" NOT REPRODUCED  retract-resume/glm-5.1-tiny: no finding, but of ")
    assert f": {reason}\n" in printed and printed.endswith(" exit 4\n") and "FIXED" not in printed
    seeded = dataclasses.replace(recorded, strategy="portfolio", choices=None)
    assert f"next    kvcheck replay {seeded.line()}\n" in printed


def test_a_replay_counts_where_its_choices_did_not_fit() -> None:
    follows = ReplayStrategy([0, 1])
    assert follows.choose([], may_pause=True) is None
    assert follows.divergence() == "of 2 recorded choices: 1 were left over"
    bends = ReplayStrategy([0])
    assert bends.choose([], may_pause=False) == 0, "a pause where the process waits would hang"
    assert bends.divergence() == "of 1 recorded choices: 1 of them did not fit what was offered"


@pytest.mark.schedules
def test_a_replay_without_evidence_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = replayed(dataclasses.replace(PLAN, requests=1), capsys)
    assert code == 4
    why = "0 retractions and 0 resumes; use more requests"
    assert printed == f" UNKNOWN  retract-resume/llama-3-tiny: {why}\n exit 4\n"


SHORT = "retract-resume:shape=glm-5.1-tiny,seed=1"
SECOND = replace(FOREIGN, schedule=f"{SHORT},schedule=1", id=f"{FAILED.run_id}.2")
PROVEN = replace(
    FOREIGN,
    schedule=f"{SHORT},schedule=2",
    id=f"{FAILED.run_id}.3",
    minimal={"confirmed": "wrong bytes", "replay": f"kvcheck replay {SHORT},schedule=3", "line": f"{SHORT},schedule=4"},
)
NO_SCHEDULE = replace(FOREIGN, schedule="", replay="", id=f"{FAILED.run_id}.4")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder of runs with one run of three findings, from the second on."""
    RunStore(tmp_path / "a=b: runs").save(replace(FAILED, findings=(SECOND, PROVEN, NO_SCHEDULE)))
    return tmp_path / "a=b: runs"


def test_a_finding_is_named_by_its_number(stored: Path) -> None:
    folder = stored / FAILED.run_id
    for named in (FAILED.run_id, FAILED.run_id[:9], str(folder), f"{folder}/run.json"):
        assert lines_of(f"{named}#2", stored) == [SECOND.schedule]
        assert lines_of(f"{named}#3", stored) == [PROVEN.schedule]
        assert lines_of(f"{named}#3:proof", stored) == [f"{SHORT},schedule=3"]
        assert lines_of(f"{named}#3:small", stored) == [f"{SHORT},schedule=4"]
        assert lines_of(f"{named}#3", stored, is_smaller_better=True) == [f"{SHORT},schedule=4"]
        assert lines_of(f"{named}#2", stored, is_smaller_better=True) == [SECOND.schedule]
    assert lines_of(f"{FAILED.run_id}.2", stored) == [SECOND.schedule], "the id itself"
    assert lines_of(FAILED.run_id, stored) == [SECOND.schedule, PROVEN.schedule], "a run: all of its causes"


def test_the_step_after_a_failure_is_a_story_that_is_there_or_the_meaning_of_the_code(stored: Path) -> None:
    told = replace(
        FAILED, run_id="20260102-030405-00aa", findings=(replace(SECOND, id="20260102-030405-00aa.1", story=STORY),)
    )
    RunStore(stored).save(told)
    assert (
        _after_failure(f"{FAILED.run_id}#2", stored) == _after_failure(FAILED.run_id, stored) == "kvcheck explain KV102"
    )
    for what in (f"{told.run_id}#1", told.run_id):
        assert _after_failure(what, stored).startswith(f"kvcheck show {what} --out")


def test_a_line_is_no_name_of_a_run(stored: Path) -> None:
    for line in (f"{SHORT},schedule=0", f"{SHORT},trace=a%23b.1", f"{SHORT},trace=a#1"):
        assert lines_of(line, stored) == [line]
    assert parse_line(lines_of(f"{FAILED.run_id}#2", stored)[0]).schedule == 1
