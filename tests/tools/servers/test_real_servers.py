"""Programs that start real servers, and the tables that are made of their runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from rigs.live_record import LIVE

from kvcheck.core.base.record import Finding, RunRecord
from tools.servers.faults.planting import RULES
from tools.servers.llama_gguf import neighbouring_pairs
from tools.servers.published_tables import NOT_PLANTED, NUMBERS, equal, own, reuse
from tools.servers.real_servers import BROKEN_RULES, CASES, KINDS, LAYERS, TRIALS, judge_trial, planted_order

PAGE = {"event": "planted", "kind": "stale", "layer": 2, "page": 1}
RULE = {"event": "planted", "kind": "sink-lost", "layer": 2}
PRICE = {"run_id": "a", "ratio": "0.5", "lo": "0.4", "hi": "0.6", "floor": "0.1", "verdict": "faster"}


def record(*places: tuple[int | None, int | None]) -> RunRecord:
    """A run with a finding at each (layer, page), each of another request."""
    findings = tuple(
        Finding(code="KV801", oracle="live", request=number, layer=layer, page=page, message="a wrong token")
        for number, (layer, page) in enumerate(places)
    )
    return dataclasses.replace(LIVE, findings=findings)


def test_each_layer_two_pages_and_each_rule_take_turns() -> None:
    for kind in KINDS:
        orders = [planted_order(kind, trial) for trial in range(TRIALS)]
        assert {(order.layer, order.page) for order in orders} == {(x, y) for x in range(LAYERS) for y in (1, 2)}
    planted = [planted_order(name, trial) for name in BROKEN_RULES for trial in range(TRIALS)]
    assert {order.kind for order in planted} == {*RULES}
    assert {order.layer for order in planted if order.kind.startswith("window")} == {0, 2}
    assert {order.layer for order in planted if order.kind.startswith("sink")} == {*range(LAYERS)}
    assert {case.faults for case in CASES if case.faults} == {*KINDS, *BROKEN_RULES}


@pytest.mark.parametrize(
    ("event", "places", "is_found", "is_named"),
    [
        (PAGE, [(2, 1), (2, 1), (0, 0)], True, True),
        (PAGE, [(2, 0), (2, 0), (2, 1)], True, False),
        (PAGE, [(None, None)], True, False),
        (PAGE, [], False, False),
        (RULE, [(2, 0), (2, 0), (1, 1)], True, True),
        (RULE, [(1, 0), (1, 0), (2, 1)], True, False),
        ({"event": "gone", "layer": 2, "block": 3}, [(2, 1)], False, False),
    ],
)
def test_what_was_planted_is_found_and_named(
    event: dict[str, object], places: list[tuple[int | None, int | None]], is_found: bool, is_named: bool
) -> None:
    assert judge_trial(record(*places), [event]) == (is_found, is_named)


PRICE |= {"arm": "reuse", "baseline": "fresh", "rounds": "15", "tokens_judged": "4000", "exit_code": "0"}
TRIAL = {"case": "vllm-stale", "requests": "49", "noise": "again=0 control=0.05 treated=2", "codes": "KV810"}
TRIAL |= {"exit_code": "1", "is_found": "1", "beside": "0", "seconds": "60", "note": ""}


def test_a_run_with_reuse_has_its_ratio_or_that_a_number_is_no_measurement() -> None:
    rows = [PRICE | {"case": "x-reuse", "number": NUMBERS[0]}, PRICE | {"case": "x-equal", "number": NUMBERS[0]}]
    price = "0.5 [0.4, 0.6], floor 10%: faster"
    no = "not a measurement"
    assert reuse(rows) == [f"| `x-reuse` | reuse to fresh | 15 | {price} | {no} | {no} | 4,000 | 0 |"]


def test_equal_servers_are_counted_by_run() -> None:
    near = {"ratio": "1.1", "verdict": "not told apart"}
    rows = [PRICE | near | {"case": "x-equal", "number": number} for number in NUMBERS]
    rows += [each | {"run_id": "b", "ratio": "0.9", "exit_code": "1"} for each in rows]
    rows[-1]["verdict"] = "slower"
    ratios = "0.90 to 1.10, floor 10%"
    assert equal(rows) == [f"| `x-equal` | 1 of 2 | {ratios} | {ratios} | {ratios} | 8,000 | 1 |"]


def test_a_trial_without_a_planted_page_is_not_one_that_was_missed() -> None:
    unplanted = {"is_found": "0", "note": NOT_PLANTED, "exit_code": "0", "codes": ""}
    missed = TRIAL | {"is_found": "0", "exit_code": "4", "codes": ""}
    (row,) = own([TRIAL, missed, TRIAL | unplanted])
    found = "1 of 2 found; 0 with KV809, 1 with KV810; 0 of 1 without a page accused"
    assert row == f"| `vllm-stale` | 49 | {found} | 1 | 0.05 | 2 to 2 | 60 |"
    (accused,) = own([TRIAL | {"case": "vllm-equal", "is_found": ""}])
    assert "1 of 1 runs accused" in accused


def test_scores_are_the_same_under_either_rotation() -> None:
    generator = torch.Generator().manual_seed(1)
    dim, heads = 8, 3
    query, key = (torch.randn(heads * dim, 5, generator=generator) for _ in range(2))
    seen = torch.randn(5, 2, generator=generator)  # the input at two positions
    angles = torch.tensor([1.0, 0.3, 0.1, 0.02])

    def score(rotate: Any, *, paired: bool) -> torch.Tensor:
        rows = [neighbouring_pairs(each, head_dim=dim) if paired else each for each in (query, key)]
        first, second = (
            rotate((each @ seen[:, at]).view(heads, dim), position)
            for each, at, position in ((rows[0], 0, 7), (rows[1], 1, 3))
        )
        return (first * second).sum(-1)

    def halves(x: torch.Tensor, position: int) -> torch.Tensor:
        a, b, (cos, sin) = x[:, :4], x[:, 4:], ((position * angles).cos(), (position * angles).sin())
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def neighbours(x: torch.Tensor, position: int) -> torch.Tensor:
        a, b, (cos, sin) = x[:, 0::2], x[:, 1::2], ((position * angles).cos(), (position * angles).sin())
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(1)

    expected = score(halves, paired=False)
    assert torch.allclose(score(neighbours, paired=True), expected, rtol=1e-5)
    assert not torch.allclose(score(neighbours, paired=False), expected, rtol=1e-2)
