"""What a trial of real servers plants, and when it counts as found and as named; without a server."""

from __future__ import annotations

import dataclasses

import pytest
from rigs.live_record import LIVE

from kvcheck.core.base.record import Finding, RunRecord
from tools.servers.faults.planting import RULES
from tools.servers.real_servers import BROKEN_RULES, CASES, KINDS, LAYERS, TRIALS, judge_trial, planted_order

PAGE = {"event": "planted", "kind": "stale", "layer": 2, "page": 1}
RULE = {"event": "planted", "kind": "sink-lost", "layer": 2}


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
