"""What a replay may claim: FIXED needs evidence and the recorded path, and a target that ends the process is a finding.

Invariants:
- Lines come from real runs of one seed; what is changed about them is done in the test.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest

from kvcheck.commands.main import run
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.schedule import Plan, parse_line
from kvcheck.core.stress.strategies import ReplayStrategy, decode_choices, encode_choices
from kvcheck.core.targets.builtin import BuiltinTarget
from kvcheck.core.targets.mutants import mutant, mutant_target
from kvcheck.core.targets.parts import TargetParts

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
    assert (code, printed) == (0, " FIXED  retract-resume/glm-5.1-tiny: 1 of 1 run clean\n exit 0\n")


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
    assert printed == (
        " UNKNOWN  retract-resume/llama-3-tiny: no request was resumed into pages that another had used; "
        "use more requests\n exit 4\n"
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"choices": "AAAA"}, "choices: expected strategy=replay or flip beside them, got strategy=portfolio"),
        (
            {"choices": "AAAA", "strategy": "lazy"},
            "choices: expected strategy=replay or flip beside them, got strategy=lazy",
        ),
        ({"strategy": "replay"}, "strategy=replay: expected choices=..., got none"),
        ({"strategy": "flip"}, "strategy=flip: expected choices=..., got none"),
        ({"strategy": "flip", "choices": "AAAA"}, "strategy=flip: expected choices=NUMBER.NAME~NUMBER.NAME, the lower"),
        ({"strategy": "flip", "choices": "7.b~7.c"}, "the lower number first, got '7.b~7.c'; copy the whole line"),
        (
            {"strategy": "flip", "choices": "7.b~8.c", "backend": "eager"},
            "choices: expected backend=simulated, which alone takes them, got backend=eager",
        ),
        (
            {"choices": encode_choices(b"\1"), "strategy": "replay", "backend": "eager"},
            "choices: expected backend=simulated, which alone takes them, got backend=eager",
        ),
        ({"expect": "KVnope"}, "expect: expected a finding code, got 'KVnope'"),
        ({"expect": ""}, "expect: expected a finding code, got ''"),
    ],
)
def test_a_line_that_would_mean_something_else_is_refused(
    change: dict[str, str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", dataclasses.replace(PLAN, **change).line()]) == 2  # type: ignore[arg-type]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert complaint in printed.err
