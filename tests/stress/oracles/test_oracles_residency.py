"""The residency oracle on literal histories. Each bad history differs from a good one in one step."""

from __future__ import annotations

import pytest
from rigs.cache_histories import history

from kvcheck.core.cache.events import LookedUp, TierChanged
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.oracles.residency import ResidencyOracle
from kvcheck.core.stress.workload.events import Transferred

STATES, WINDOW = "model 2 states", "model 2 window=4"
"""Of a window of four tokens, the token behind three pages sees the second and the third."""
TWO = "gains device ab ids=1,2"
HOSTED = "gains host ab ids=11,12"

GOOD: dict[str, str] = {
    "empty": "finds ab 0; finds - 0",
    "device": "gains device ab; finds abc 2; finds ax 1; finds xab 0",
    "down and back": (
        "gains device ab; gains host ab; loses device a|b; finds ab 2 device=1; finds ab 1 device; loses device a; "
        "finds abc 2 device=0; gains device ab; finds abc 2; loses host ab; finds abc 2"
    ),
    "an id again": f"{TWO}; loses device ab ids=1,2; gains device xy ids=2,1; loses device xy ids=2,1; finds ab 0",
    "one id on two tiers and in two spaces": (
        "gains device a; gains host a; gains device a window; loses device a window; loses host a; finds a 1"
    ),
    "a prefix ends at a state, on either tier": (
        f"{STATES}; gains device abc; finds abc 0; gains device ab|c state; finds abc 3; finds abx 0; gains host ab; "
        "gains host a|b state; loses device ab|c state; finds abc 2; finds abc 0 device"
    ),
    "a prefix has the pages that its next position sees through the window": (
        f"{WINDOW}; gains device abcd; gains device a|bc window; finds abcd 3; finds abxy 0; gains host abcd; "
        "gains host abc|d window; finds abcd 4; finds abcd 3 device; loses device ab|c window; finds abcd 0"
    ),
    "unchanged index values": "acked backup 2; acked load 2",
}

Where = tuple[str, str | None, int | None, int | None]
LOOKUP: Where = ("KV301", None, None, 7)
BAD: dict[str, tuple[Where, str]] = {  # code, tier, page and request, and the history
    "given back under another id": (("KV303", "host", 13, None), f"{HOSTED}; loses host ab ids=11,13"),
    "given back twice": (
        ("KV303", "device", 1, None),
        "gains device a ids=1; loses device a ids=1; loses device a ids=1",
    ),
    "given back by the other tier": (("KV303", "host", 1, None), "gains device a ids=1; loses host a ids=1"),
    "given back in another space": (("KV303", "device", 1, None), "gains device a ids=1; loses device a window ids=1"),
    "one page for two prefixes": (("KV305", "host", 12, None), f"{HOSTED}; gains host x ids=12"),
    "one page twice in a prefix": (("KV305", "host", 11, None), "gains host ab ids=11,11"),
    "found more than there is": (LOOKUP, f"{TWO}; finds abc 3 device=2"),
    "found less than there is": (LOOKUP, f"{TWO}; finds abc 1"),
    "found past a gap": (LOOKUP, "gains device abc; loses device a|b; finds abc 2"),
    "found on the host and called device": (LOOKUP, f"{HOSTED}; finds ab 2"),
    "found on the device and called host": (LOOKUP, f"{TWO}; finds ab 2 device=1"),
    "host pages where only the device may": (LOOKUP, f"{HOSTED}; finds ab 2 device device=0"),
    "less than to the deepest state": (LOOKUP, f"{STATES}; {TWO}; gains device a|b state; finds abc 0"),
    "past the deepest state": (LOOKUP, f"{STATES}; {TWO}; gains device a state; finds ab 2"),
    "a window page short": (LOOKUP, f"{WINDOW}; gains device abc; gains device ab|c window; finds abc 3"),
    "less than the window allows": (LOOKUP, f"{WINDOW}; gains device abc; gains device a|bc window; finds abc 2"),
    "changed index values": (("KV303", "host", None, 7), "changes load"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_has_no_findings_and_every_event_is_judged(name: str) -> None:
    oracle, events = ResidencyOracle(), history(GOOD[name])
    assert judge(oracle, History.of(*events)) == ()
    changed = sum(len(each.ids) for each in events if isinstance(each, TierChanged))
    assert oracle.judged == changed + sum(isinstance(each, (LookedUp, Transferred)) for each in events)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_has_this_one_finding(name: str) -> None:
    expected, steps = BAD[name]
    (finding,) = judge(ResidencyOracle(), History.of(*history(steps)))
    assert (finding.code, finding.tier, finding.page, finding.request) == expected
    assert finding.oracle == "residency"


def test_a_message_names_the_page_and_the_counts() -> None:
    found = judge(ResidencyOracle(), History.of(*history(f"{HOSTED}; loses host ab ids=11,13; finds ab 2 device=0")))
    for finding, words in zip(found, (("host full page 13", "id 12"), ("served 2 pages", "serves 0")), strict=True):
        assert all(each in finding.message for each in words), finding.message


@pytest.mark.parametrize("step", ["loses device a", "finds a 1", "changes load"])
def test_findings_have_an_end(step: str) -> None:
    oracle = ResidencyOracle()
    assert len(judge(oracle, History.of(*history(step) * 50))) == MAX_FINDINGS
    assert oracle.judged == 50
