"""Which delays are tried on a device before a mutant is said not to serve wrong bytes there, and in which order."""

from __future__ import annotations

import dataclasses

import pytest

from kvcheck.core.cache.backend.delays import Delay, DelayCount, DelayReport, DelaySite
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress import delayed
from kvcheck.core.stress.delayed import UNREAD, Rates, Try, may_show, whole_names
from kvcheck.core.stress.mutant_trials import HELD_MOST, _likely_first, judge
from kvcheck.core.stress.runner import ScheduleRunner, Workloads
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant

PLAN = Plan(scenario="pd-transfer", shape="llama-3-tiny", seed=1, mutant="timeout-counts-as-drain")
SHOWS, HIDES = "1.wire.kv~2.decode.write", f"1.wire.kv~2.{UNREAD[0]}"


def on_device(plan: Plan, choices: str) -> Plan:
    return dataclasses.replace(plan, backend="threads", device="threads", strategy="delay", choices=choices)


def tried(monkeypatch: pytest.MonkeyPatch, found: dict[int, tuple[str, ...]], schedules: int) -> list[tuple[int, str]]:
    """(schedules used, delay) of each plan, in the order in which they are tried."""
    monkeypatch.setattr(
        delayed,
        "device_plans",
        lambda runner, plan, device: tuple(on_device(plan, each) for each in found.get(plan.schedule, ())),
    )
    runner = ScheduleRunner(BuiltinTarget())
    made = [*_likely_first(runner, PLAN, schedules, "threads")]
    assert all(each.schedule == used - 1 for used, plans in made for each in plans)
    return [(used, str(each.choices)) for used, plans in made for each in plans]


def test_a_delay_until_what_is_read_comes_before_others_and_all_of_a_name_last(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {0: (HIDES, "wire.kv"), 2: (SHOWS, "wire.kv", "wire")}
    assert tried(monkeypatch, found, 4) == [
        *((3, SHOWS), (3, "wire.kv"), (3, "wire")),
        *((1, HIDES), (1, "wire.kv")),
        *((number, "wire.kv") for number in (1, 2, 3, 4)),
    ]


def test_so_many_schedules_have_delays_between_two_operations_and_each_has_wider_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedules = HELD_MOST + 3
    found = dict.fromkeys(range(schedules), (SHOWS, "wire.aux"))
    made = tried(monkeypatch, found, schedules)
    assert [used for used, choices in made if choices == SHOWS] == [*range(1, HELD_MOST + 1)]
    assert made[2 * HELD_MOST :] == [(number + 1, "wire.aux") for number in range(schedules)]


def test_without_an_unordered_pair_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, {}, 5) == []


def test_what_may_show_is_a_delay_until_content_is_written_or_read() -> None:
    for choices, shows in ((SHOWS, True), (HIDES, False), ("wire.kv", False), ("wire", False)):
        assert may_show(on_device(PLAN, choices)) == shows
    assert may_show(on_device(PLAN, "1.wire.aux~3.metadata.clear")), "a slot is looked at when it changes hands"
    plans = [on_device(PLAN, each) for each in (SHOWS, "wire.kv", "wire", "wire.kv", "seal.make")]
    assert [each.choices for each in whole_names(plans)] == ["wire.kv", "seal.make"]


def test_what_all_tries_came_to_is_told_of_a_mutant_that_does_not_reproduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last try alone says little: its schedule may lack the operation that its delay names."""
    met = DelayCount(delay=Delay(held=DelaySite(operation="wire.kv")), met=3, overtaken=2)
    unmet = dataclasses.replace(met, met=0, overtaken=0)

    def tried(runner: ScheduleRunner, plans: list[Plan]) -> list[Try]:
        (plan,) = plans
        counts = DelayReport((unmet if plan.schedule == 2 else met,))
        return [Try(plan=plan, rates=Rates(free_runs=1, held_runs=1, report=counts), wrong=None)]

    def told() -> str:
        name = mutant("timeout-counts-as-drain")
        found = judge(PLAN, name, 3, lambda plan: BuiltinTarget(), device="threads", workloads=Workloads())
        assert (found.outcome, found.schedules) == ("not-reproduced", 3)
        return found.message or ""

    found: tuple[str, ...] = ()
    monkeypatch.setattr(
        delayed, "device_plans", lambda runner, plan, device: tuple(on_device(plan, each) for each in found)
    )
    monkeypatch.setattr(delayed, "tries", tried)
    assert told().endswith("; next: a larger --schedules"), "no schedule has an operation to delay"
    found = (SHOWS, "wire.kv")
    assert told().endswith("wrong bytes in 0 of 9 runs without delays, 0 of 9 with")
