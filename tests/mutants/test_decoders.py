"""The published table of decoders says what the mutants of attention do, and its page has the table's lines."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from mutants.decoder_table import COLUMNS, SCHEDULES, SEED, SHAPES, cells, found_by, markdown

from kvcheck.core.stress.runner import ScheduleRunner, Workloads, schedules
from kvcheck.core.stress.schedule import Plan
from kvcheck.core.targets.builtin import BuiltinTarget
from kvcheck.core.targets.mutants import MUTANTS, mutant, mutant_target
from kvcheck.core.targets.mutants.attention import ATTENTION

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "cpu"
with (PUBLISHED / "decoders" / "decoders.csv").open(newline="", encoding="utf-8") as _stream:
    ROWS = list(csv.DictReader(_stream))
KNOWN = {(row["mutant"], row["shape"], row["decoder"]): row for row in ROWS}


def test_the_page_has_the_lines_of_the_table() -> None:
    assert tuple(ROWS[0]) == COLUMNS
    page = (PUBLISHED / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in markdown(ROWS) if line not in page] == []


def test_every_mutant_of_attention_is_tried_with_both_decoders() -> None:
    assert [*SHAPES] == [each.name for each in ATTENTION]
    assert [*KNOWN] == [(name, plan.shape, plan.decoder) for name, plan in cells()]


def test_a_mutant_has_known_answers_on_its_card_where_words_do_not_find_it_and_nowhere_else() -> None:
    unseen = {row["mutant"] for row in ROWS if row["decoder"] == "words" and row["found"] == "-"}
    assert unseen == {name for name, each in MUTANTS.items() if each.decoder != "words"}
    for name in unseen:
        by_words = [row for row in ROWS if (row["mutant"], row["decoder"]) == (name, "words")]
        assert {(row["found"], row["schedules"]) for row in by_words} == {("-", str(SCHEDULES))}
        bug = mutant(name)
        assert KNOWN[name, bug.shape, bug.decoder]["found"] == f"{bug.killed_by} {bug.code}"


def test_the_fixed_build_passes_what_a_mutant_was_found_with() -> None:
    assert {row["fixed"] for row in ROWS} == {"0"}


@pytest.fixture(scope="module")
def workloads() -> Workloads:
    return Workloads()


@pytest.mark.schedules
@pytest.mark.parametrize(("name", "first"), list(cells()), ids=lambda each: getattr(each, "cell", each))
def test_the_table_is_what_this_build_does(name: str, first: Plan, workloads: Workloads) -> None:
    row = KNOWN[name, first.shape, first.decoder]
    tried = 3 if row["found"] == "-" else int(row["schedules"])
    broken = ScheduleRunner(mutant_target(name), workloads=workloads)
    fixed = ScheduleRunner(BuiltinTarget(), workloads=workloads)
    for number, plan in enumerate(schedules(first, tried), start=1):
        assert found_by(broken.run(plan)) == (row["found"] if number == int(row["schedules"]) else "-")
        assert fixed.run(plan).findings == ()


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("name", "shape", "schedule", "found"),
    [
        ("key-forgets-rank", "llama-answers", 1, "output KV501"),
        ("index-key-reader-without-wait", "deepseek-v3.2-answers", 1, "ordering KV201"),
        ("index-scale-reader-without-wait", "deepseek-v3.2-answers", 1, "ordering KV201"),
        ("index-pair-reader-without-wait", "deepseek-v3.2-answers", 1, "ordering KV201"),
    ],
)
def test_mutants_of_the_host_tier_show_with_known_answers_too(
    name: str, shape: str, schedule: int, found: str, workloads: Workloads
) -> None:
    plan = Plan(scenario="hicache", shape=shape, decoder="known-answer", seed=SEED, schedule=schedule)
    assert found_by(ScheduleRunner(mutant_target(name), workloads=workloads).run(plan)) == found
    assert ScheduleRunner(BuiltinTarget(), workloads=workloads).run(plan).findings == ()
