"""The project's central claim: every mutant is killed by the oracle it names, on a plan that the fixed build passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rigs.literal_record import FAILED

from kvcheck.commands.main import run
from kvcheck.core.base.causes import bugs
from kvcheck.core.base.record import Verdict
from kvcheck.core.report.screen import cause_lines
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.stress.runner import ScheduleRunner, Workloads, schedules
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import MUTANTS, mutant, mutant_target

SCHEDULES = 16
SEED = 1
TOLD_WITHIN = 4
"""Schedules of a command that is to tell of a mutant, behind those that LATER names: a run goes on after a finding."""
SHOWN_BY = {
    "ring-rearmed-early": 3,
    "fetch-replaces-computed": 2,
    "abort-said-once": 4,
    "admits-whole-batches": 3,
    "split-forgets-load": 4,
    "asked-load-leaves-ring": 3,
}
"""Seed of the workloads that show a mutant which those of SEED show late."""
MOST_CAUSES = dict.fromkeys(
    (
        *("ack-by-kv-alone", "write-back-without-pin", "abort-keeps-saved-copy", "aborted-fetch-forgotten"),
        *("late-backup-loses-pins", "stuck-backup-loses-pins", "drain-waits-one-round", "offload-value-aliases-pool"),
    ),
    2,
) | {"wait-looks-twice": 3}
"""Causes of a mutant's schedule, where not one: what is broken shows in backups and in loads, on both tiers, in a value
and in its pages, or in a race and in a page that is lost."""
LATER = {
    "abort-frees-what-is-sent": 3,
    "align-trims-one-side": 3,
    "offload-saves-wrong-pages": 1,
    "ring-rearmed-early": 6,
    "seal-without-kv": 3,
    "seal-without-state": 3,
    "align-broadcasts": 7,
    "aux-stride-of-the-sender": 3,
    "align-trims-tail": 13,
    "arrived-room-freed-alone": 3,
    "backup-before-forward": 7,
    "backup-of-every-second-node": 5,
    "load-without-pin": 6,
    "move-changes-indices": 3,
    "seal-without-aux": 7,
    "split-forgets-load": 14,
    "timeout-counts-as-drain": 9,
    "write-back-without-pin": 5,
}
"""The first schedule that shows a mutant, where those before it take long and do not."""

REPLAYED = {(mutant(name).killed_by, mutant(name).scenario): name for name in MUTANTS}.values()
"""A mutant for each oracle and scenario, whose line is run again."""


@pytest.fixture(scope="module")
def workloads() -> Workloads:
    """Mutants that follow one another mostly have one cell."""
    return Workloads()


@pytest.fixture(scope="module")
def fixed(workloads: Workloads) -> Callable[[Plan], Outcome]:
    """The fixed build, which runs a plan once, however many mutants are shown by it."""
    return cache(ScheduleRunner(BuiltinTarget(), workloads=workloads).run)


@pytest.mark.schedules
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed_by_its_oracle_where_the_fixed_build_passes(
    name: str, workloads: Workloads, fixed: Callable[[Plan], Outcome]
) -> None:
    bug, broken = mutant(name), ScheduleRunner(mutant_target(name), workloads=workloads)
    seed, at = SHOWN_BY.get(name, SEED), LATER.get(name, 0)
    first = Plan(scenario=bug.scenario, shape=bug.shape, decoder=bug.decoder, mutant=name, seed=seed, schedule=at)
    first = replace(first, strategy=bug.strategy)
    for plan in schedules(first, SCHEDULES - first.schedule):
        outcome = broken.run(plan)
        found = [each for each in outcome.findings if (each.oracle, each.code) == (bug.killed_by, bug.code)]
        if found:
            break
    assert found, outcome.findings
    shown = bugs(outcome.findings)
    assert shown[0].cause.code == bug.code, [(each.cause.code, each.cause.message) for each in shown]
    assert len(shown) <= MOST_CAUSES.get(name, 1), [(each.cause.code, each.cause.message) for each in shown]
    screen = cause_lines(replace(FAILED, findings=outcome.findings), 120, {}, is_kept=False)
    assert screen[0].startswith(f" ✘ 1  {bug.code} "), "it begins with the cause"
    healthy = fixed(replace(plan, mutant=None))
    assert healthy.verdict is Verdict.PASS and healthy.judged[bug.killed_by], healthy.findings
    assert found[0].replay == f"kvcheck replay {found[0].schedule}"
    if name not in REPLAYED:
        return
    again = ScheduleRunner(mutant_target(name), workloads=workloads).run(parse_line(found[0].schedule))
    assert (again.digest, again.divergence) == (outcome.digest, None), "the line is the run"


@pytest.mark.usefixtures("as_found")
@pytest.mark.schedules
@pytest.mark.parametrize("name", sorted({mutant(name).bug: name for name in MUTANTS}.values()))
def test_a_mutant_is_told_of_by_its_command_and_its_line_replays(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, most = SHOWN_BY.get(name, SEED), LATER.get(name, 0) + TOLD_WITHIN
    command = ["stress", "--mutant", name, "--seed", f"{seed}", "--schedules", f"{most}", "--no-reports"]
    command += ["--jobs", "1"]
    assert run([*command, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    bug = mutant(name)
    assert printed.splitlines()[-1] == " exit 1"
    assert f" ✘ 1  {bug.code} " in printed
    (path,) = tmp_path.glob("*/run.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    finding = next(row for row in record["findings"] if row["code"] == bug.code)
    assert finding["oracle"] == bug.killed_by
    number = finding["id"].rpartition(".")[2]
    short = f"kvcheck replay {record['run_id']}#{number} --out {tmp_path}"
    assert f"    again     {min(finding['replay'], short, key=len)}\n" in printed
    assert run(["replay", finding["schedule"], "--times", "3"]) == 1
    again = capsys.readouterr().out
    assert "STILL FAILS 3/3" in again and bug.code in again and "identical each time" in again


@pytest.mark.schedules
def test_runs_that_share_a_workload_are_those_that_make_their_own() -> None:
    """Whoever runs first, and whether it is broken."""
    workloads, plan = Workloads(), Plan(scenario="pd-transfer", shape="llama-3-tiny", seed=1)
    broken = mutant_target("failed-overwritten")
    for target in (broken, BuiltinTarget(), broken):
        shared, own = (ScheduleRunner(target, workloads=each).run(plan) for each in (workloads, None))
        assert (shared.digest, shared.judged) == (own.digest, own.judged)


def test_a_workload_is_made_once_for_its_plans_and_cannot_be_written() -> None:
    workloads, plan = Workloads(), Plan(scenario="pd-transfer", shape="llama-3-tiny", seed=1)
    load, reference = workloads.of(plan)
    for same in (replace(plan, mutant="failed-overwritten"), replace(plan, strategy="eager")):
        assert all(one is other for one, other in zip(workloads.of(same), (load, reference), strict=True))
    with pytest.raises(TypeError):
        reference[1] = ()  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        load.jobs = ()  # type: ignore[misc]
    for other in (replace(plan, schedule=1), replace(plan, seed=2), replace(plan, requests=3)):
        assert workloads.of(other)[0].jobs != load.jobs
