"""Which decoder shows which mutant of attention, in which schedule; the fixed build passes the same schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner, Workloads, schedules
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import MUTANTS, mutant, mutant_target
from tools.tables.decoder_table import SEED, SHAPES, cells, found_by

SHOWN_BY_WORDS = {
    ("resume-shifts-positions", "llama-answers"): "content KV301",
    ("resume-shifts-positions", "deepseek-answers"): "content KV301",
    ("resume-takes-older-state", "qwen3-next-answers"): "content KV101",
}
SHOWN_BY_ANSWERS = "output KV501"
"""What each of them shows with known answers. All that is found is found in the first schedule."""
TRIED = 3
"""Schedules that find nothing where a mutant is not found. The published table has 24."""


def test_a_mutant_has_known_answers_on_its_card_where_words_do_not_find_it_and_nowhere_else() -> None:
    seen = {name for name, _ in SHOWN_BY_WORDS}
    assert {*SHAPES} - seen == {name for name, each in MUTANTS.items() if each.decoder != "words"}
    for name in {*SHAPES} - seen:
        bug = mutant(name)
        assert f"{bug.killed_by} {bug.code}" == SHOWN_BY_ANSWERS and bug.shape in SHAPES[name]


@pytest.fixture(scope="module")
def workloads() -> Workloads:
    return Workloads()


@pytest.fixture(scope="module")
def fixed(workloads: Workloads) -> Callable[[Plan], Outcome]:
    """The fixed build, which runs a plan once, however many mutants have it."""
    return cache(ScheduleRunner(BuiltinTarget(), workloads=workloads).run)


@pytest.mark.schedules
@pytest.mark.parametrize(("name", "first"), list(cells()), ids=lambda each: getattr(each, "cell", each))
def test_the_table_is_what_this_build_does(
    name: str, first: Plan, workloads: Workloads, fixed: Callable[[Plan], Outcome]
) -> None:
    shown = SHOWN_BY_WORDS.get((name, first.shape), "-") if first.decoder == "words" else SHOWN_BY_ANSWERS
    broken = ScheduleRunner(mutant_target(name), workloads=workloads)
    for plan in schedules(first, TRIED if shown == "-" else 1):
        assert found_by(broken.run(plan)) == shown
        assert fixed(replace(plan, mutant=None)).findings == ()


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("name", "shape", "schedule", "found"),
    [
        ("key-forgets-rank", "llama-answers", 1, "output KV501"),
        ("index-key-reader-without-wait", "deepseek-v3.2-answers", 1, "ordering KV201"),
    ],
)
def test_mutants_of_the_host_tier_show_with_known_answers_too(
    name: str, shape: str, schedule: int, found: str, workloads: Workloads
) -> None:
    plan = Plan(scenario="hicache", shape=shape, decoder="known-answer", seed=SEED, schedule=schedule)
    assert found_by(ScheduleRunner(mutant_target(name), workloads=workloads).run(plan)) == found
    assert ScheduleRunner(BuiltinTarget(), workloads=workloads).run(plan).findings == ()
