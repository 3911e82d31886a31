"""The page of the published tables says what the tables say, and the tables what is documented of the model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from live.damage_summary import TESTS, Table, markdown
from live.margin_table import summary

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "known-answers"
PAGE = (PUBLISHED / "README.md").read_text(encoding="utf-8")
DAMAGE = Table(PUBLISHED / "damage.csv")
WITH_A_LATENT = Table(PUBLISHED / "damage-deepseek-v3.csv")
WITH_AN_INDEXER = Table(PUBLISHED / "damage-deepseek-v32.csv")
ORDER_ONLY = {"pages_swapped"}  # attention does not depend on the order of its keys
NOT_READ = {"rotary_part_twice"}  # the indexer picks none of the marks that such a page would win
BY_CHANCE = "index_row_of_one_token_stale"  # 5 of 61 places are picked beside the one that is looked up
SAME_EVERYWHERE = "foreign_rotary_part"  # it is that of its position


def test_the_page_has_the_rows_of_all_tables() -> None:
    with (PUBLISHED / "margins.csv").open(newline="", encoding="utf-8") as stream:
        margins = summary(list(csv.DictReader(stream)))
    missing = [
        line
        for line in (*markdown(DAMAGE), *markdown(WITH_A_LATENT), *markdown(WITH_AN_INDEXER), *margins)
        if line not in PAGE.splitlines()
    ]
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


def test_no_margin_is_lost() -> None:
    with (PUBLISHED / "margins.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert all(int(row["wrong"]) == 0 and float(row["margin"]) > 15.9 for row in rows)
    assert {row["layers"] for row in rows if row["length"] == "32768"} >= {"8", "32"}
