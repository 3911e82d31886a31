"""The residency oracle on literal histories: what tiers were told to hold, and what lookups found.

Invariants:
- Each bad history differs from a good one in one event.
"""

from __future__ import annotations

import pytest

from kvcheck.core.base.record import Finding
from kvcheck.core.cache.events import Event, LookedUp, TierChanged
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.oracles.residency import ResidencyOracle
from kvcheck.core.stress.workload.events import Modelled, Transferred


def chain(text: str) -> tuple[bytes, ...]:
    """A hash for each letter, which says what lies before it."""
    return tuple(text[: at + 1].encode() for at in range(len(text)))


def gains(tier: str, text: str, ids: tuple[int, ...], *, space: str = "full", start: int = 0) -> TierChanged:
    return TierChanged(tier, space, chain(text)[start:], ids, True)


def loses(tier: str, text: str, ids: tuple[int, ...], *, space: str = "full", start: int = 0) -> TierChanged:
    return TierChanged(tier, space, chain(text)[start:], ids, False)


def finds(text: str, pages: int, device: int, *, device_only: bool = False) -> LookedUp:
    return LookedUp(7, chain(text), pages, device, device_only)


STATES = Modelled(page_size=2, window=0, has_state=True)
WINDOW = Modelled(page_size=2, window=4, has_state=False)
"""Three pages are six tokens; the seventh sees tokens 3 to 6: the second and third page."""


def where(finding: Finding) -> tuple[str, str | None, int | None, int | None]:
    """Code, tier, page, request."""
    return (finding.code, finding.tier, finding.page, finding.request)


GOOD: dict[str, tuple[Event, ...]] = {
    "empty": (finds("ab", 0, 0), finds("", 0, 0)),
    "device": (gains("device", "ab", (1, 2)), finds("abc", 2, 2), finds("ax", 1, 1), finds("xab", 0, 0)),
    "down and back": (
        gains("device", "ab", (1, 2)),
        gains("host", "ab", (11, 12)),
        loses("device", "ab", (2,), start=1),
        finds("ab", 2, 1),
        finds("ab", 1, 1, device_only=True),
        loses("device", "a", (1,)),
        finds("abc", 2, 0),
        gains("device", "ab", (5, 6)),
        finds("abc", 2, 2),
        loses("host", "ab", (11, 12)),
        finds("abc", 2, 2),
    ),
    "an id is used again": (
        gains("device", "ab", (1, 2)),
        loses("device", "ab", (1, 2)),
        gains("device", "xy", (2, 1)),
        loses("device", "xy", (2, 1)),
        finds("ab", 0, 0),
    ),
    "one id on two tiers and in two spaces": (
        gains("device", "a", (1,)),
        gains("host", "a", (1,)),
        gains("device", "a", (1,), space="window"),
        loses("device", "a", (1,), space="window"),
        loses("host", "a", (1,)),
        finds("a", 1, 1),
    ),
    "a prefix ends at a state, on either tier": (
        STATES,
        gains("device", "abc", (1, 2, 3)),
        finds("abc", 0, 0),
        gains("device", "abc", (4,), space="state", start=2),
        finds("abc", 3, 3),
        finds("abx", 0, 0),
        gains("host", "ab", (1, 2)),
        gains("host", "ab", (9,), space="state", start=1),
        loses("device", "abc", (4,), space="state", start=2),
        finds("abc", 2, 2),
        finds("abc", 0, 0, device_only=True),
    ),
    "a prefix has the pages that its next position sees through the window": (
        WINDOW,
        gains("device", "abcd", (1, 2, 3, 4)),
        gains("device", "abc", (7, 8), space="window", start=1),
        finds("abcd", 3, 3),
        finds("abxy", 0, 0),
        gains("host", "abcd", (5, 6, 7, 8)),
        gains("host", "abcd", (6,), space="window", start=3),
        finds("abcd", 4, 4),
        finds("abcd", 3, 3, device_only=True),
        loses("device", "abc", (8,), space="window", start=2),
        finds("abcd", 0, 0),
    ),
    "frozen": (Transferred("backup", 7, 2, True), Transferred("load", 7, 2, True)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_has_no_findings_and_every_event_is_judged(name: str) -> None:
    oracle = ResidencyOracle()
    assert judge(oracle, History.of(*GOOD[name])) == ()
    told = [each for each in GOOD[name] if not isinstance(each, Modelled)]
    assert oracle.judged == sum(len(each.ids) if isinstance(each, TierChanged) else 1 for each in told)


BAD: dict[str, tuple[tuple[Event, ...], tuple[str, str | None, int | None, int | None]]] = {
    "given back under another id": (
        (gains("host", "ab", (11, 12)), loses("host", "ab", (11, 13))),
        ("KV303", "host", 13, None),
    ),
    "given back twice": (
        (gains("device", "a", (1,)), loses("device", "a", (1,)), loses("device", "a", (1,))),
        ("KV303", "device", 1, None),
    ),
    "given back by the other tier": (
        (gains("device", "a", (1,)), loses("host", "a", (1,))),
        ("KV303", "host", 1, None),
    ),
    "given back in another space": (
        (gains("device", "a", (1,)), loses("device", "a", (1,), space="window")),
        ("KV303", "device", 1, None),
    ),
    "one page for two prefixes": (
        (gains("host", "ab", (11, 12)), gains("host", "x", (12,))),
        ("KV305", "host", 12, None),
    ),
    "one page twice in a prefix": (
        (gains("host", "ab", (11, 11)),),
        ("KV305", "host", 11, None),
    ),
    "found more than there is": ((gains("device", "ab", (1, 2)), finds("abc", 3, 2)), ("KV301", None, None, 7)),
    "found less than there is": ((gains("device", "ab", (1, 2)), finds("abc", 1, 1)), ("KV301", None, None, 7)),
    "found past a gap": (
        (gains("device", "abc", (1, 2, 3)), loses("device", "ab", (2,), start=1), finds("abc", 2, 2)),
        ("KV301", None, None, 7),
    ),
    "found on the host and called device": (
        (gains("host", "ab", (11, 12)), finds("ab", 2, 2)),
        ("KV301", None, None, 7),
    ),
    "found on the device and called host": (
        (gains("device", "ab", (1, 2)), finds("ab", 2, 1)),
        ("KV301", None, None, 7),
    ),
    "host pages served where only the device may": (
        (gains("host", "ab", (11, 12)), finds("ab", 2, 0, device_only=True)),
        ("KV301", None, None, 7),
    ),
    "less than to the deepest state": (
        (
            STATES,
            gains("device", "ab", (1, 2)),
            gains("device", "ab", (4,), space="state", start=1),
            finds("abc", 0, 0),
        ),
        ("KV301", None, None, 7),
    ),
    "past the deepest state": (
        (STATES, gains("device", "ab", (1, 2)), gains("device", "a", (4,), space="state"), finds("ab", 2, 2)),
        ("KV301", None, None, 7),
    ),
    "a window page short": (
        (
            WINDOW,
            gains("device", "abc", (1, 2, 3)),
            gains("device", "abc", (8,), space="window", start=2),
            finds("abc", 3, 3),
        ),
        ("KV301", None, None, 7),
    ),
    "less than the window allows": (
        (
            WINDOW,
            gains("device", "abc", (1, 2, 3)),
            gains("device", "abc", (7, 8), space="window", start=1),
            finds("abc", 2, 2),
        ),
        ("KV301", None, None, 7),
    ),
    "changed index values": ((Transferred("load", 7, 2, False),), ("KV303", "host", None, 7)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_has_this_one_finding(name: str) -> None:
    events, expected = BAD[name]
    (finding,) = judge(ResidencyOracle(), History.of(*events))
    assert where(finding) == expected
    assert finding.oracle == "residency"


def test_a_message_says_which_page_it_was_and_what_was_expected() -> None:
    history = History.of(gains("host", "ab", (11, 12)), loses("host", "ab", (11, 13)), finds("ab", 2, 0))
    first, second = judge(ResidencyOracle(), history)
    assert first.message == "host full page 13 is given back for a cached prefix that came under id 12"
    assert second.message == ("request 7 was served 2 pages by the prefix cache; what was added to the tiers serves 0")


@pytest.mark.parametrize(
    "event", [loses("device", "a", (1,)), finds("a", 1, 1), Transferred("load", 7, 2, False)], ids=repr
)
def test_findings_have_an_end(event: Event) -> None:
    oracle = ResidencyOracle()
    assert len(judge(oracle, History.of(*[event] * 50))) == MAX_FINDINGS
    assert oracle.judged == 50
