"""Flips: an operation runs after a later one that is not behind it, and races then serve wrong bytes."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.commands.main import run
from kvcheck.commands.targets import target_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence, Finding, read_record
from kvcheck.core.cache.backend.backend import Operation
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.turns import CellTask, Limit
from kvcheck.core.run.workers import tasks_text, work
from kvcheck.core.stress.flip import MAX_FLIPS, confirm, confirmed, pair_of, wrong_bytes
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.strategies import FlipStrategy, Pair, Recorder, parse_pair
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant, mutant_target

RACES = {
    "gate-waits-neighbour-layer": (1, 0),
    "index-key-reader-without-wait": (1, 4),
    "backup-before-forward": (1, 7),
    "load-without-pin": (3, 0),
    "ring-rearmed-early": (2, 8),
}
"""By race, one of each kind: seed and schedule that show it."""
DECIDE_OTHERWISE = {"ring-rearmed-early"}
"""Bugs in what the host decides, not in what a lane waits for: the fixed build is another run before the pair comes."""
SEEN_AT_ONCE = ("write-back-without-pin", (1, 7))
"""Wrong bytes already in the eager run: a backup is seen to finish when its pages have long been reused."""
RACE = "gate-waits-wrong-entry"
REQUESTS = 24
"""Fewer than a command runs."""
NAMES = st.from_regex(r"[^~]{1,80}", fullmatch=True)


@cache
def fixed() -> ScheduleRunner:
    """The unbroken build; it keeps its last workload."""
    return ScheduleRunner(BuiltinTarget())


def cell(name: str, seed: int = 1, schedule: int = 0, requests: int | None = REQUESTS) -> Plan:
    bug = mutant(name)
    plan = Plan(scenario=bug.scenario, shape=bug.shape, mutant=name, seed=seed, schedule=schedule, requests=requests)
    return dataclasses.replace(plan, backend="simulated", strategy="eager")


# Pairs as text


@given(st.integers(1, 10**9), NAMES, st.integers(1, 10**9), NAMES)
def test_a_pair_survives_as_text_and_in_a_line(held: int, one: str, distance: int, other: str) -> None:
    pair = Pair(held=held, held_name=one, until=held + distance, until_name=other)
    assert parse_pair(pair.text()) == pair
    plan = Plan(scenario="x", shape="a", strategy="flip", choices=pair.text())
    assert parse_line(plan.line()) == plan


@pytest.mark.parametrize(
    "text",
    [
        *("", "~", "1.a", "1.a~", "1.a~2", "1.a~2.", "a~b", "0.a~2.b", "01.a~2.b", "2.a~1.b", "2.a~2.b", "1.a~2.b~3.c"),
        *("1.a~2.b ~", "-1.a~2.b", "²1.a~22.b", f"1.{'a' * 81}~2.b", f"1.a~{'9' * 13}.b"),
    ],
)
def test_a_damaged_pair_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected choices=NUMBER\.NAME~NUMBER\.NAME") as caught:
        parse_pair(text)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


# The strategy


def ran(chooser: FlipStrategy, *, waits: bool = False) -> list[str]:
    """What ran, in order: a copy #1, its lane's next #2, and a reader #3 of two chunks that is behind neither."""
    backend = SimulatedBackend(chooser)
    order: list[str] = []
    load, forward = backend.lane("load"), backend.lane("forward")

    def operation(name: str, chunks: int = 1) -> Operation:
        return Operation(name, tuple((lambda at=at: order.append(f"{name}{at}")) for at in range(chunks)))

    first = backend.submit(operation("copy"), lane=load)
    backend.submit(operation("next"), lane=load)
    order.append("host")
    if waits:
        backend.wait(first)
        order.append("joined")
    backend.submit(operation("read", 2), lane=forward)
    order.append("host")
    backend.drain()
    return order


def test_the_held_operation_runs_when_the_last_part_of_the_other_has() -> None:
    flip = FlipStrategy(parse_pair("1.copy~3.read"))
    assert ran(flip) == ["host", "read0", "read1", "copy0", "next0", "host"]
    assert flip.divergence() is None


def test_the_held_operation_runs_when_the_host_waits_for_it_and_is_then_in_order() -> None:
    flip = FlipStrategy(parse_pair("1.copy~3.read"))
    assert ran(flip, waits=True) == ["host", "copy0", "joined", "next0", "read0", "read1", "host"]
    assert flip.divergence() is None, "a pair that stays in order is what a fix gives"


def test_what_the_other_one_needs_is_not_held() -> None:
    flip = FlipStrategy(parse_pair("2.next~3.read"))
    assert ran(flip) == ["copy0", "host", "read0", "read1", "next0", "host"]


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("1.load~3.read", "#1 was copy, not load"),
        ("1.copy~3.write", "#3 was read, not write"),
        ("1.copy~4.read", "#4 never ran"),
        ("8.copy~9.read", "#8 never ran and #9 never ran"),
    ],
)
def test_a_pair_of_another_run_says_so_and_everything_runs(pair: str, words: str) -> None:
    flip = FlipStrategy(parse_pair(pair))
    assert sorted(ran(flip)) == sorted(["host", "host", "copy0", "next0", "read0", "read1"])
    assert flip.divergence() == f"of the two operations of the pair: {words}"
    assert Recorder(flip).divergence() == flip.divergence()


# Races become wrong bytes


@pytest.mark.schedules
@pytest.mark.parametrize("name", RACES)
def test_a_race_serves_wrong_bytes_in_the_other_order_and_the_fixed_build_does_not(name: str) -> None:
    engine, plan = ScheduleRunner(mutant_target(name)), cell(name, *RACES[name])
    eager = engine.run(plan)
    assert wrong_bytes(eager) is None, "an eager run that reads wrong bytes needs no flip"
    tried = ((finding, confirm(engine, plan, finding)) for finding in eager.findings)
    finding, other = next((finding, made) for finding, made in tried if made is not None)
    wrong = wrong_bytes(other, near=finding)
    assert wrong is not None and wrong.oracle == "content"
    if finding.code == "KV201" and finding.message.startswith("decode.read"):
        same = ("tier", "buffer", "layer", "page", "request")
        assert [getattr(wrong, what) for what in same] == [getattr(finding, what) for what in same]
    clean = fixed().run(dataclasses.replace(other.plan, mutant=None))
    assert (clean.findings, clean.broken_oracles) == ((), ())
    assert (clean.divergence is not None) == (name in DECIDE_OTHERWISE), clean.divergence


@pytest.mark.schedules
def test_a_race_that_an_eager_run_shows_needs_no_flip() -> None:
    name, (seed, schedule) = SEEN_AT_ONCE
    engine = ScheduleRunner(mutant_target(name))
    eager = engine.run(cell(name, seed, schedule, requests=None))
    assert {"content", "ordering"} <= {each.oracle for each in eager.findings}
    assert confirmed(engine, eager) == eager.findings


# Any pair of the product


# What the user is told


@pytest.mark.schedules
def test_a_flip_whose_pair_is_not_in_the_run_is_not_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(scenario="retract-resume", shape="llama-3-tiny", strategy="flip", choices="3.no.such~9.name")
    assert run(["replay", plan.line()]) == 4
    printed = capsys.readouterr().out
    assert "NOT REPRODUCED" in printed and "of the two operations of the pair: #3 was " in printed


class Scripted(ScheduleRunner):
    """Gives the outcome it was made with, and remembers what it was asked."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.asked: list[Plan] = []

    def run(self, plan: Plan) -> Outcome:
        self.asked.append(plan)
        return dataclasses.replace(self.outcome, plan=plan)


def unordered(first: int, *, oracle: str = "ordering") -> Finding:
    """A finding about operation `first` and the one ten later."""
    named = {which: {"ordinal": n, "operation": which, "lane": "x"} for which, n in (("earlier", first), ("later", 99))}
    return Finding(code="KV201", oracle=oracle, buffer=f"b{first}", message="", minimal={**named})


def outcome_of(*findings: Finding, strategy: str = "eager", backend: str = "simulated") -> Outcome:
    plan = Plan(scenario="x", shape="a", strategy=strategy, backend=backend, expect="KV201")
    return Outcome(plan=plan, findings=findings, evidence=Evidence(), broken_oracles=(), digest=0, judged={})


@pytest.mark.parametrize(("strategy", "backend"), [("eager", "simulated"), ("lazy", "simulated"), ("random", "eager")])
def test_reruns_are_few_and_of_different_pairs(strategy: str, backend: str) -> None:
    many = outcome_of(*(unordered(n) for n in (1, 1, 2, 2, 3, 4, 5)), strategy=strategy, backend=backend)
    engine = Scripted(many)
    assert confirmed(engine, many) == many.findings
    eager = [plan for plan in engine.asked if plan.strategy == "eager"]
    flips = [plan.choices for plan in engine.asked if plan.strategy == "flip"]
    assert len(eager) == (strategy == "lazy")
    assert flips == ["1.earlier~99.later", "2.earlier~99.later"] and MAX_FLIPS == 2
    assert {(plan.backend, plan.expect) for plan in engine.asked} == {("simulated", None)}


def test_nothing_is_run_where_it_could_tell_nothing() -> None:
    wrong = Finding(code="KV102", oracle="content", message="")
    for outcome in (
        outcome_of(),
        outcome_of(unordered(1), wrong),
        outcome_of(unordered(1, oracle="audit")),
        outcome_of(unordered(1), backend="cuda"),
        outcome_of(dataclasses.replace(unordered(1), minimal=None)),
        outcome_of(unordered(100)),
    ):
        engine = Scripted(outcome)
        assert confirmed(engine, outcome) == outcome.findings
        assert engine.asked == []
    late = Scripted(outcome_of(unordered(1)))
    assert confirmed(late, late.outcome, lambda: False) == late.outcome.findings
    assert late.asked == []


def test_a_run_that_was_another_one_confirms_nothing() -> None:
    wrong = Finding(code="KV102", oracle="content", message="")
    strayed = dataclasses.replace(outcome_of(wrong), divergence="#1 never ran")
    assert confirm(Scripted(strayed), strayed.plan, unordered(1)) is None
    assert confirm(Scripted(outcome_of(wrong)), strayed.plan, unordered(1)) is not None
    assert pair_of(unordered(1)) == parse_pair("1.earlier~99.later")


@pytest.mark.schedules
def test_stress_prints_the_proof_and_its_line_which_is_fixed_without_the_bug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["stress", "--mutant", RACE, "--seed", "1", "--out", str(tmp_path), "--no-reports"]) == 1
    printed = capsys.readouterr().out
    assert "\n    proof     in the other order request " in printed
    assert re.search(r"\n    shown     kvcheck replay \S+#1:proof --out ", printed)
    (path,) = tmp_path.glob("*/run.json")
    proofs = [each.minimal for each in read_record(path).findings if each.minimal and "replay" in each.minimal]
    (proof,) = proofs
    assert {*proof} >= {"earlier", "later", "confirmed", "replay"} and "'s bytes" in str(proof["confirmed"])
    line = str(proof["replay"]).removeprefix("kvcheck replay ")
    assert run(["replay", line, "--times", "2"]) == 1
    printed = capsys.readouterr().out
    assert "STILL FAILS 2/2" in printed and "identical each time" in printed and ",strategy=flip," in line
    assert run(["replay", dataclasses.replace(parse_line(line), mutant=None).line()]) == 0
    assert capsys.readouterr().out.startswith(" FIXED  hicache/llama-3-tiny: ")
    assert run(["stress", "--strategy", "flip", "--out", str(tmp_path)]) == 2
    assert "--strategy flip: use kvcheck replay with the line" in capsys.readouterr().err


@pytest.mark.schedules
@pytest.mark.parametrize("confirms", [True, False])
def test_a_worker_confirms_when_its_task_says_so(confirms: bool) -> None:
    begun: list[str] = []
    task = CellTask(plan=cell(RACE, 1), schedules=1, confirms=confirms)
    reports = [json.loads(line) for line in work(tasks_text([(0, task)], Limit()), target_of, begun.append)]
    told = [each for each in reports[0]["findings"] if "confirmed" in each["minimal"]]
    assert len(told) == confirms
    assert [json.loads(line)["begins"] for line in begun] == [task.plan.line()]
