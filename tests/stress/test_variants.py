"""Settings come in pairs: every pair of values is in a row of the array, most of them early, over all cells."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from math import gcd, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.errors import UsageError
from kvcheck.core.run.cell import tried_by
from kvcheck.core.run.plan import FLOOR, Plan
from kvcheck.core.stress.audit import AUDIT
from kvcheck.core.stress.rows import SCHEDULE
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.variants import STRIDE, covering_array
from kvcheck.core.stress.strategies import FIRST

CELLS = SCHEDULE.cells(Plan(scenario=""), (), ())
"""Those of a run of which nothing is asked."""


def first(plan: Plan, count: int) -> list[Plan]:
    return [replace(plan, schedule=number) for number in range(count)]


def settings_in(plans: list[Plan]) -> list[tuple[str, ...]]:
    return [tried_by(plan)[1:] for plan in plans]


@given(st.lists(st.integers(min_value=1, max_value=5), max_size=6))
def test_every_pair_of_values_is_in_a_row(sizes: list[int]) -> None:
    rows = covering_array(tuple(sizes))
    assert all(
        len(row) == len(sizes) and all(0 <= at < size for at, size in zip(row, sizes, strict=True)) for row in rows
    )
    for one, other in combinations(range(len(sizes)), 2):
        assert len({(row[one], row[other]) for row in rows}) == sizes[one] * sizes[other]
    assert gcd(len(rows), STRIDE) == 1
    assert len(rows) <= max(2, prod(sizes) + 1)


@pytest.mark.parametrize("scenario", SCENARIOS.names())
def test_a_table_needs_few_rows(scenario: str) -> None:
    table = SCENARIOS.load(scenario)().table
    sizes = sorted((len(values) for _, values in table.kinds), reverse=True)
    rows = covering_array(tuple(len(values) for _, values in table.kinds))
    assert sizes[0] * sizes[1] <= len(rows) <= sizes[0] * sizes[1] * 1.5 + 10
    assert len(table.names) == len({*table.names}) == sum(sizes)


@pytest.mark.parametrize(("scenario", "share"), [("pd-transfer", 0.85), ("nvlink-aux", 0.85), ("hicache", 0.85)])
def test_the_floor_of_all_cells_tries_most_pairs(scenario: str, share: float) -> None:
    """Before, all cells went through the same few settings in step."""
    plans = [each for cell in CELLS if cell.scenario == scenario for each in first(cell, FLOOR)]
    tried = {pair for names in settings_in(plans) for pair in combinations(names, 2)}
    kinds = SCENARIOS.load(scenario)().table.kinds
    assert len(tried) >= share * sum(len(one) * len(other) for (_, one), (_, other) in combinations(kinds, 2))


def test_no_setting_is_tied_to_the_number_of_the_schedule() -> None:
    """Once all transfer cells ran 1x1 and then 2x2, and every run with a store was an odd schedule."""
    transfer = [cell for cell in CELLS if cell.scenario in ("pd-transfer", "nvlink-aux")]
    for number in range(2):
        ranks = {tried_by(replace(cell, schedule=number))[1] for cell in transfer}
        assert len(ranks) >= 5, ranks
    for cell in CELLS:
        assert {tried_by(plan)[0] for plan in first(cell, FLOOR)} == {*FIRST}, "a random order comes early"
    stores: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for cell in (cell for cell in CELLS if cell.scenario == "hicache"):
        for plan in first(cell, 24):
            stores[bool(plan.schedule % 2)] += Counter(name for name in tried_by(plan) if name.startswith("store:"))
    assert {*stores[False]} == {*stores[True]} == {"store:none", "store:memory", "store:files"}


@pytest.mark.parametrize("scenario", SCENARIOS.names())
def test_over_seeds_each_order_meets_each_setting(scenario: str) -> None:
    cells = [replace(cell, seed=seed) for cell in CELLS if cell.scenario == scenario for seed in range(1, 31)]
    met = {
        (order, name)
        for cell in cells
        for plan in first(cell, FLOOR)
        for order, *names in [tried_by(plan)]
        for name in names
    }
    names = {*SCENARIOS.load(scenario)().table.names, AUDIT}
    assert met == {(order, name) for order in FIRST for name in names}


def test_seeds_go_on_where_the_floor_of_the_seed_before_ends() -> None:
    plan = Plan(scenario="pd-transfer", shape="llama-3-tiny", seed=1)
    assert settings_in([replace(plan, schedule=FLOOR)]) == settings_in([replace(plan, seed=2)])
    assert settings_in([replace(plan, seed=-5)]), "every seed has variants"


def test_named_ranks_are_the_only_ones() -> None:
    plan = Plan(scenario="pd-transfer", shape="llama-3-tiny", ranks="2x1")
    assert {names[0] for names in settings_in(first(plan, 24))} == {"rank layout:2x1"}


@pytest.mark.parametrize(
    ("shape", "ranks"), [("llama-3-tiny", "3x1"), ("qwen3-next-tiny", "1x3"), ("gpt-oss-tiny", "5x5")]
)
def test_ranks_that_do_not_suit_the_heads_are_refused(shape: str, ranks: str) -> None:
    """They were a finding KV301 before."""
    base = Plan(scenario="", ranks=ranks)
    with pytest.raises(UsageError, match=f"--ranks {ranks}: {shape} cannot be dealt out to them: .* must divide"):
        SCHEDULE.cells(base, ("pd-transfer",), (shape,))
    assert SCHEDULE.cells(base, ("pd-transfer",), ("glm-5.1-tiny",)), "latents are whole on every rank"
