"""The caching oracle on literal histories: evictions that go on for nothing.

Invariants:
- Each bad history differs from a good one in one event.
"""

from __future__ import annotations

import pytest
from rigs.cache_histories import Events, backs_up, computes, evicts, gains, rules

from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.caching import CachingOracle
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.workload.tier_events import RoomWanted

A_THEN_B = (*computes("a"), *computes("b"))

GOOD: dict[str, Events] = {
    "as many go as were asked for": (
        rules(),
        *A_THEN_B,
        RoomWanted("device", "full", 2),
        *evicts("device", "a"),
        *evicts("device", "b"),
    ),
    "a victim may be larger than what was asked for": (
        rules(),
        *computes("ab"),
        *computes("c"),
        RoomWanted("device", "full", 1),
        *evicts("device", "ab"),
        RoomWanted("device", "full", 1),
        *evicts("device", "c"),
    ),
    "what a tier frees is no room on the other": (
        rules(host=9),
        *computes("a"),
        *backs_up("a"),
        RoomWanted("host", "full", 1),
        *evicts("device", "a"),
        *evicts("host", "a"),
    ),
    "nobody says how much is wanted": (rules(), *A_THEN_B, *evicts("device", "a"), *evicts("device", "b")),
}

BAD: dict[str, tuple[Events, str, tuple[str, ...]]] = {
    "one more goes than was asked for": (
        (rules(), *A_THEN_B, RoomWanted("device", "full", 1), *evicts("device", "a"), *evicts("device", "b")),
        "KV705",
        ("device full", "room for 1 was asked for, and 1 were freed before"),
    ),
    "the host gives up more than was asked for": (
        (
            rules(host=9),
            *gains("host", "a"),
            *gains("host", "b"),
            RoomWanted("host", "full", 1),
            *evicts("host", "a"),
            *evicts("host", "b"),
        ),
        "KV705",
        ("host full",),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_has_no_findings(name: str) -> None:
    assert [each.message for each in judge(CachingOracle(), History.of(*GOOD[name]))] == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_has_this_one_finding(name: str) -> None:
    events, code, words = BAD[name]
    (finding,) = judge(CachingOracle(), History.of(*events))
    assert (finding.code, finding.oracle) == (code, "caching")
    assert all(each in finding.message for each in words), finding.message
