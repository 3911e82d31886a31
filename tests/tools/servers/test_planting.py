"""Servers that load faults, and pages that a planted fault falls on: four tokens each, a block number for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.servers import sglang_cpu, vllm_cpu
from tools.servers.faults.planting import LOG, ORDERS, Held, Order, Planter, Row, events


@pytest.fixture
def planter(tmp_path: Path) -> Planter:
    return Planter(tmp_path / "order.json", tmp_path / "log", page_size=4)


def row(request: str, computed: int, length: int, *blocks: int) -> Row:
    return Row(request=request, computed=computed, length=length, blocks=blocks)


def test_pages_that_a_step_fills_are_those_it_writes_from_the_first_token_to_the_last() -> None:
    assert [*row("a", 0, 11, 1, 2, 3).filled(4)] == [0, 1]
    assert [*row("a", 4, 12, 1, 2, 3).filled(4)] == [1, 2], "page 0 was a hit"
    assert [*row("a", 6, 12, 1, 2, 3).filled(4)] == [2], "page 1 was begun in an earlier chunk"
    assert [*row("a", 3, 4, 1).filled(4)] == [], "a decode fills no page alone"


def test_an_order_is_done_once_and_a_new_one_begins_again(planter: Planter) -> None:
    assert planter.order() is None
    batch = [row("a", 0, 12, 1, 2, 3), row("b", 0, 3, 4), row("c", 8, 16, 1, 2, 5, 6)]
    order = Order(kind="foreign", layer=2, page=-1, same=1)
    order.give(planter.orders)
    assert planter.order() == order
    assert [(each.request, page) for each, page in planter.candidates(order, batch)] == [("a", 2), ("c", 3)]
    planter.planted(order, batch[2], 3, None)
    assert planter.order() is None, "one page was ordered"
    Order(kind="stale", layer=1, page=0).give(planter.orders)
    assert planter.order() == Order(kind="stale", layer=1, page=0)
    planter.orders.unlink()
    assert planter.order() is None


def test_a_foreign_page_comes_from_another_request_the_latest_first(planter: Planter) -> None:
    planter.wrote(0, [row("a", 0, 8, 1, 2), row("b", 0, 8, 3, 4)])
    planter.wrote(0, [row("c", 0, 4, 1), row("b", 8, 9, 3, 4, 2)])
    held = planter.sources(row("b", 0, 8, 3, 4))
    assert held == [(1, Held("c", 0))], "block 2 is being written for b; 1 was a's once"
    assert planter.sources(row("c", 0, 4, 1)) == [(4, Held("b", 1)), (3, Held("b", 0))]
    assert planter.sources(row("c", 0, 4, 1), 0)[0] == (3, Held("b", 0)), "the same place comes before all others"


def test_the_log_has_who_reads_a_damaged_page_until_it_is_written_again(planter: Planter) -> None:
    order = Order(kind="foreign", layer=1, page=1)
    first = row("a", 0, 8, 7, 8)
    planter.wrote(1, [first])
    planter.planted(order, first, 1, (5, Held("z", 3)))
    steps = [row("a", 8, 9, 7, 8, 9)], [row("b", 8, 12, 7, 8, 6)], [row("b", 12, 13, 7, 8, 6, 4)], [row("c", 0, 4, 8)]
    for batch in steps:
        planter.wrote(0, batch)
        planter.wrote(1, batch)
    assert events(planter.log) == [
        {
            "event": "planted",
            "kind": "foreign",
            "layer": 1,
            "page": 1,
            "block": 8,
            "request": "a",
            "positions": [4, 7],
            "source": {"block": 5, "request": "z", "page": 3},
        },
        {"event": "reads", "layer": 1, "page": 1, "block": 8, "request": "b"},
        {"event": "gone", "layer": 1, "block": 8},
    ]


def test_faults_are_loaded_where_they_are_asked_for_and_by_the_prefill_server_of_a_pair_alone(tmp_path: Path) -> None:
    places, flag = (Path("envs"), Path("m4")), "--worker-extension-cls"
    pair = sglang_cpu.commands(*places, folder=tmp_path, variant="pair", has_faults=True)
    assert [each.words[each.words.index("--disaggregation-mode") + 1] for each in pair] == ["prefill", "decode"]
    assert [{ORDERS, LOG} & set(each.variables) for each in pair] == [{ORDERS, LOG}, set()]
    (faulty,) = vllm_cpu.commands(*places, folder=tmp_path, has_faults=True)
    module, _, name = faulty.words[faulty.words.index(flag) + 1].partition(".")
    assert f"class {name}:" in (vllm_cpu.FAULTS / f"{module}.py").read_text() and {ORDERS, LOG} <= set(faulty.variables)
    for clean in (*sglang_cpu.commands(*places, folder=tmp_path), *vllm_cpu.commands(*places, folder=tmp_path)):
        assert ORDERS not in clean.variables and flag not in clean.words
