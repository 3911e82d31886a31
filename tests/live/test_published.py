"""The page of the published tables says what the tables say, and the tables what is documented of the model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from live.damage_summary import TESTS, Table, markdown
from live.damage_table import FAULTS
from live.margin_table import summary

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "known-answers"
PAGE = (PUBLISHED / "README.md").read_text(encoding="utf-8")
DAMAGE = Table(PUBLISHED / "damage.csv")
WITH_A_LATENT = Table(PUBLISHED / "damage-deepseek-v3.csv")
WITH_WINDOWS = Table(PUBLISHED / "damage-gpt-oss.csv")
WINDOWED = {0, 2}
# A bit that is foreign is the same in half of the cases: no other test reads a windowed layer.
EQUAL_BITS = {"foreign": 90, "foreign_values": 90, "one_token_stale": 40}
OF_WINDOWED_LAYERS = {"pages_swapped", "window_one_larger", "window_one_smaller"}
OF_FULL_LAYERS = {"foreign_keys", "next_position_visible"}
WITH_AN_INDEXER = Table(PUBLISHED / "damage-deepseek-v32.csv")
WITH_STATES = Table(PUBLISHED / "damage-qwen3-next.csv")
# What a walk reads is the same before and after them.
UNSEEN_BY_WALKS = ("one_step_old", "one_step_old_with_window", "updated_twice")
ORDER_ONLY = {"pages_swapped"}  # attention does not depend on the order of its keys
NOT_READ = {"rotary_part_twice"}  # the indexer picks none of the marks that such a page would win
BY_CHANCE = "index_row_of_one_token_stale"  # 5 of 61 places are picked beside the one that is looked up
SAME_EVERYWHERE = "foreign_rotary_part"  # it is that of its position


def test_the_page_has_the_rows_of_all_tables() -> None:
    with (PUBLISHED / "margins.csv").open(newline="", encoding="utf-8") as stream:
        margins = summary(list(csv.DictReader(stream)))
    tables = (DAMAGE, WITH_A_LATENT, WITH_WINDOWS, WITH_AN_INDEXER, WITH_STATES)
    rows = [line for table in tables for line in markdown(table)]
    missing = [line for line in (*rows, *margins) if line not in PAGE.splitlines()]
    assert not missing


@pytest.mark.parametrize(
    ("table", "silent"),
    [(DAMAGE, ORDER_ONLY), (WITH_A_LATENT, ORDER_ONLY), (WITH_AN_INDEXER, ORDER_ONLY | NOT_READ)],
    ids=["llama", "deepseek-v3", "deepseek-v32"],
)
def test_one_test_or_the_other_finds_all_damage_that_changes_an_answer(table: Table, silent: set[str]) -> None:
    for damage in table.damage:
        if not any(table.sums(damage, test)["trials"] for test in TESTS):
            assert damage == SAME_EVERYWHERE
            continue
        shares = [table.share(damage, test, layer, "found") for layer in table.layers for test in TESTS]
        most = [max(shares[i] or 0, shares[i + 1] or 0) for i in range(0, len(shares), 2)]
        assert set(most) == ({0} if damage in silent else {100}) or (damage == BY_CHANCE and min(most) >= 75), damage


@pytest.mark.parametrize(
    ("table", "heads"),
    [(DAMAGE, 5), (WITH_A_LATENT, 1), (WITH_AN_INDEXER, 1)],
    ids=["llama", "deepseek-v3", "deepseek-v32"],
)
def test_each_damage_was_tried_twenty_times_a_place(table: Table, heads: int) -> None:
    assert all(own["trials"] in (0, 20 * heads) for own in table.counts.values())
    untried = {damage for damage in table.damage if not table.sums(damage, "walk")["trials"]}
    assert untried == (set() if table is DAMAGE else {SAME_EVERYWHERE})


@pytest.mark.parametrize("layer", range(4))
def test_with_windows_all_damage_is_found_that_changes_what_a_layer_reads(layer: int) -> None:
    unseen = OF_FULL_LAYERS if layer in WINDOWED else OF_WINDOWED_LAYERS
    for damage in WITH_WINDOWS.damage:
        most = max(WITH_WINDOWS.share(damage, test, layer, "found") or 0 for test in TESTS)
        if damage in unseen:
            assert most == 0, damage
        else:
            assert most >= (EQUAL_BITS.get(damage, 100) if layer in WINDOWED else 100), damage


def test_a_window_or_a_sink_that_is_wrong_was_tried_in_twenty_requests_and_names_its_layer() -> None:
    assert WITH_WINDOWS.damage[-5:] == [fault.__name__ for fault in FAULTS]
    for damage, test, layer in WITH_WINDOWS.counts:
        own = WITH_WINDOWS.counts[damage, test, layer]
        is_fault = damage in WITH_WINDOWS.damage[-5:]
        assert own["trials"] in ((0, 20) if is_fault else (0, 100))
        if is_fault and not (damage == "sink_twice" and layer not in WINDOWED):
            assert own["named"] == own["found"]


@pytest.mark.parametrize("damage", WITH_STATES.damage)
def test_the_position_test_finds_all_damage_of_states_and_the_walk_what_it_reads(damage: str) -> None:
    is_unseen = damage.removeprefix("state_") in UNSEEN_BY_WALKS or "state_window" in damage
    for layer in WITH_STATES.layers:
        assert WITH_STATES.counts[damage, "position", layer]["trials"] == 20
        assert WITH_STATES.share(damage, "position", layer, "found") == 100
        assert (WITH_STATES.share(damage, "walk", layer, "found") or 0) == (0 if is_unseen else 100)


def test_no_margin_is_lost() -> None:
    with (PUBLISHED / "margins.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert all(int(row["wrong"]) == 0 and float(row["margin"]) > 15.9 for row in rows)
    assert {row["layers"] for row in rows if row["length"] == "32768"} >= {"8", "32"}
