"""The caching oracle on literal histories: victims, refusals, copies that were due, and hits that were lost.

Invariants:
- Each bad history differs from a good one in one event.
"""

from __future__ import annotations

import pytest
from rigs.cache_histories import (
    Events,
    backs_up,
    chain,
    check_bad,
    computes,
    evicts,
    finds,
    gains,
    hosts,
    later,
    loses,
    rules,
)

from kvcheck.core.cache.events import Chosen, Computed, Locked, Refused, Stored, StoreQueried, TierChanged
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.caching import SOON, CachingOracle
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.workload.events import Aborted, Counted, Declared, Finished, Forward, Modelled, Transferred

STATES = Modelled(page_size=2, window=0, has_state=True)
WINDOW = Modelled(page_size=2, window=4, has_state=False)
PAGES = Modelled(page_size=2, window=0, has_state=False)
FETCHING: Events = (rules(host=9), Stored("full", chain("ab"), True), StoreQueried(7, chain("abc"), True))
A_THEN_B = (*computes("a"), *computes("b"))

GOOD: dict[str, Events] = {
    "nothing is declared": (*A_THEN_B, *evicts("device", "b"), *loses("device", "a")),
    "the least recently used goes first": (rules(), *A_THEN_B, *evicts("device", "a"), *evicts("device", "b")),
    "a lookup makes it younger": (rules(), *A_THEN_B, finds("a", 1), *evicts("device", "b")),
    "an offer may count as a use": (rules(), *A_THEN_B, Computed(7, chain("a"), 0), *evicts("device", "b")),
    "an offer need not count as a use": (rules(), *A_THEN_B, Computed(7, chain("a"), 0), *evicts("device", "a")),
    "the least often used goes first": (rules("lfu"), *A_THEN_B, finds("a", 1), finds("a", 1), *evicts("device", "b")),
    "of equal uses either goes": (rules("lfu"), *A_THEN_B, *evicts("device", "b")),
    "the lowest priority goes first": (
        rules("priority"),
        *computes("a", priority=2),
        *computes("b", priority=1),
        *evicts("device", "b"),
    ),
    "a lookup raises the priority": (
        rules("priority"),
        *A_THEN_B,
        finds("b", 1, priority=2),
        *evicts("device", "a"),
        *evicts("device", "b"),
    ),
    "what is locked, or was passed over, stays": (
        rules(),
        *A_THEN_B,
        *computes("c"),
        Locked("device", b"a", True),
        *evicts("device", "c", passed=(b"b",)),
        Locked("device", b"a", False),
        *evicts("device", "a"),
    ),
    "a lock holds all that lies before it": (
        rules(),
        *computes("ab"),
        *computes("c"),
        Locked("device", b"ab", True),
        *evicts("device", "c"),
    ),
    "no order is declared": (Declared(1, (), (("full", 9),)), *A_THEN_B, *evicts("device", "b")),
    "a prefix goes from its end": (rules(), *computes("ab"), *computes("c"), *evicts("device", "ab", start=1)),
    "the host gives up what the device does not hold": (
        rules(host=9),
        *computes("a"),
        *backs_up("a"),
        *computes("b"),
        *backs_up("b"),
        *evicts("device", "b", start=0, passed=(b"a",)),
        *evicts("host", "b"),
    ),
    "with its prefix goes what the host holds behind it": (
        rules(host=9, uses=2),
        *computes("a"),
        *computes("ab", start=1),
        *gains("host", "ab", start=1),
        *evicts("device", "ab", start=1),
        Chosen("device", "full", chain("a")),
        *loses("host", "ab", start=1),
        *loses("device", "a"),
    ),
    "backups that are due": (
        rules(host=9),
        *computes("a"),
        *backs_up("a"),
        *computes("ab", start=1),
        *backs_up("ab", start=1),
        *later(2 * SOON),
    ),
    "a backup takes its time": (rules(host=9), *computes("a"), *later(SOON), *backs_up("a"), *later(SOON)),
    "a page that is due leaves before its backup, and others are backed up": (
        rules(host=9),
        *computes("a"),
        *evicts("device", "a"),
        *computes("b"),
        *backs_up("b"),
        *later(SOON),
    ),
    "too few uses for a backup": (rules(host=9, uses=2), *computes("a"), *later(2 * SOON)),
    "no backup under a prefix that has none": (
        rules(host=1),
        *hosts("x"),
        Locked("host", b"x", True),
        *computes("a"),
        Refused("backup", 7, "full", chain("a")),
        *computes("ab", start=1),
        *later(2 * SOON),
    ),
    "no host, no backup": (rules(), *computes("a"), *later(2 * SOON)),
    "write-back": (rules(uses=None, host=9), *computes("a"), *backs_up("a"), *evicts("device", "a")),
    "write-back without room": (
        rules(uses=None, host=1),
        *hosts("x"),
        Locked("host", b"x", True),
        *computes("a"),
        Chosen("device", "full", chain("a")),
        Refused("backup", 7, "full", chain("a")),
        *loses("device", "a"),
    ),
    "a backup is refused while the host is locked": (
        rules(host=2),
        *computes("x"),
        *backs_up("x"),
        *computes("ab"),
        Refused("backup", 7, "full", chain("ab")),
    ),
    "a load is refused while the device is locked": (
        rules(device=2, host=9),
        *computes("a"),
        *backs_up("a"),
        *evicts("device", "a"),
        *computes("bc"),
        *backs_up("bc"),
        Locked("device", b"bc", True),
        finds("a", 1),
        finds("a", 0, device_only=True),
    ),
    "the pages of the prompt itself make no room for its load": (
        rules(device=1, host=9),
        *computes("a"),
        *backs_up("a"),
        *hosts("ab", start=1),
        finds("ab", 2),
        finds("ab", 1, device_only=True),
    ),
    "a state slot stays for every request that can be opened": (
        STATES,
        rules(device=9, host=9, state=2, rows=2),
        *hosts("a"),
        *gains("host", "a", space="state"),
        finds("a", 1),
        finds("a", 0, device_only=True),
    ),
    "what the store holds is fetched": (
        rules(host=9),
        Stored("full", chain("ab"), True),
        StoreQueried(7, chain("abc"), True),
        *gains("host", "ab"),
        Transferred("prefetch", 7, 2, True, chain("ab")),
        finds("abc", 2),
    ),
    "of what is fetched, a page does not come": (
        *FETCHING,
        Stored("full", (b"ab",), False),
        *gains("host", "a"),
        Transferred("prefetch", 7, 1, True, chain("a")),
    ),
    "a page that did not come is stored again meanwhile": (
        *FETCHING,
        Stored("full", (b"a",), False),
        Stored("full", (b"a",), True),
        Transferred("prefetch", 7, 0, True, ()),
    ),
    "what is fetched is computed meanwhile": (*FETCHING, *computes("a"), Transferred("prefetch", 7, 0, True, ())),
    "nobody wants it any more": (*FETCHING, Aborted(7), Transferred("prefetch", 7, 0, True, ())),
    "another request fetches it already": (
        rules(host=9),
        Stored("full", chain("ab"), True),
        StoreQueried(7, chain("abc"), True),
        StoreQueried(8, chain("abd"), False),
    ),
    "the store has lost it": (
        rules(host=9),
        Stored("full", chain("ab"), True),
        Stored("full", chain("a"), False),
        StoreQueried(7, chain("abc"), False),
    ),
    "the store lacks its state": (
        STATES,
        rules(host=9),
        Stored("full", chain("ab"), True),
        StoreQueried(7, chain("abc"), False),
    ),
    "the host lacks the page before it": (
        rules(uses=2, host=9),
        *computes("a"),
        Stored("full", chain("ab"), True),
        StoreQueried(7, chain("ab"), False),
    ),
    "there is no room for what the store holds": (
        rules(host=1),
        Stored("full", chain("ab"), True),
        Refused("prefetch", 7, "full", chain("ab")),
        StoreQueried(7, chain("abc"), False),
    ),
    "a prompt starts behind what was found": (
        PAGES,
        rules(),
        *computes("ab"),
        finds("abc", 2),
        Forward(7, 4, 6),
        *computes("abc", start=2),
        Finished(7, (1,)),
    ),
    "pages that are not whole are not offered": (PAGES, rules(), finds("a", 0), Forward(7, 0, 1), Finished(7, (1,))),
    "a prefix ends where a state was kept": (STATES, rules(), finds("a", 0), Forward(7, 0, 4), Finished(7, (1,))),
    "everything is given back at the end": (rules(), *A_THEN_B, Counted("full", 7, 2, 9), *loses("device", "a")),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_has_no_findings(name: str) -> None:
    oracle = CachingOracle()
    assert [each.message for each in judge(oracle, History.of(*GOOD[name]))] == []


def test_a_cache_that_declares_nothing_is_not_judged() -> None:
    oracle = CachingOracle()
    assert judge(oracle, History.of(*GOOD["nothing is declared"], finds("a", 0, device_only=True))) == ()
    assert oracle.judged == 0


BAD: dict[str, tuple[Events, str, tuple[str, ...]]] = {
    "the most recently used goes first": (
        (rules(), *A_THEN_B, *evicts("device", "b")),
        "KV701",
        ("by lru", "last use is 2 or higher", "last use is 1"),
    ),
    "the most often used goes first": (
        (rules("lfu"), *A_THEN_B, finds("a", 1), finds("a", 1), *evicts("device", "a")),
        "KV701",
        ("by lfu", "count of uses is 3 or higher"),
    ),
    "the higher priority goes first": (
        (rules("priority"), *computes("a", priority=2), *computes("b", priority=1), *evicts("device", "a")),
        "KV701",
        ("by priority", "priority is 2 or higher"),
    ),
    "the host gives up what was used last": (
        (rules(host=9), *hosts("a"), finds("?", 0), *hosts("b"), *evicts("host", "b")),
        "KV701",
        ("host full", "by lru"),
    ),
    "a state that was used last": (
        (
            STATES,
            rules(),
            *computes("a"),
            *gains("device", "a", space="state"),
            *computes("b"),
            *gains("device", "b", space="state"),
            *evicts("device", "b", space="state"),
        ),
        "KV701",
        ("device state",),
    ),
    "the middle of a prefix": (
        (rules(), *computes("ab"), *evicts("device", "a")),
        "KV701",
        ("has more of its prefix behind it",),
    ),
    "what is locked": (
        (rules(), *computes("a"), Locked("device", b"a", True), *evicts("device", "a")),
        "KV701",
        ("is locked",),
    ),
    "what the device still holds": (
        (rules(host=9), *computes("a"), *backs_up("a"), *evicts("host", "a")),
        "KV701",
        ("is in use on the device",),
    ),
    "a page is kept under a hash that no prompt has": (
        (
            rules(host=9),
            *computes("abc"),
            StoreQueried(8, chain("abcd"), True),
            TierChanged("host", "full", (b"ad",), (3,), True),
        ),
        "KV703",
        ("host full 3", b"ad".hex(), "no page of a prompt"),
    ),
    "a companion is kept under a hash that no prompt has": (
        (STATES, rules(host=9), *computes("ab"), TierChanged("host", "state", (b"b",), (3,), True)),
        "KV703",
        ("host state 3", b"b".hex()),
    ),
    "a backup is refused though the host has room": (
        (rules(host=2), *computes("ab"), Refused("backup", 7, "full", chain("ab"))),
        "KV702",
        ("a backup of 2 full for request 7", "for 2"),
    ),
    "a backup is refused though the host could make room": (
        (rules(host=2), *hosts("xy"), *computes("ab"), Refused("backup", 7, "full", chain("ab"))),
        "KV702",
        ("for 2",),
    ),
    "a companion is refused though the host has room": (
        (rules(host=2), *computes("a"), Refused("backup", 7, "window", chain("a"))),
        "KV702",
        ("a backup of 1 window",),
    ),
    "a load is refused though the device has room": (
        (rules(device=2, host=9), *hosts("ab"), finds("ab", 2), finds("ab", 0, device_only=True)),
        "KV702",
        ("was served 0 of the 2 pages", "2 full were not loaded back"),
    ),
    "a load is refused though the device could make room": (
        (rules(device=1, host=9), *hosts("a"), *computes("x"), *backs_up("x"), finds("a", 0, device_only=True)),
        "KV702",
        ("has room, free or evictable, for 1 full",),
    ),
    "a window is refused though the device has room": (
        (
            WINDOW,
            Declared(1, (), (("full", 9), ("window", 2), ("host.full", 9), ("host.window", 9))),
            *computes("abc"),
            *backs_up("abc"),
            *gains("host", "abc", start=1, space="window"),
            finds("abc", 3),
            finds("abc", 0, device_only=True),
        ),
        "KV702",
        ("2 window were not loaded back",),
    ),
    "a state is refused though there is a slot": (
        (
            STATES,
            rules(device=9, host=9, state=3, rows=2),
            *hosts("a"),
            *gains("host", "a", space="state"),
            finds("a", 0, device_only=True),
        ),
        "KV702",
        ("1 full and 1 state were not loaded back",),
    ),
    "a prefetch is refused though the host has room": (
        (
            rules(host=2),
            Stored("full", chain("ab"), True),
            Refused("prefetch", 7, "full", chain("ab")),
            StoreQueried(7, chain("abc"), False),
        ),
        "KV702",
        ("a prefetch of 2 full",),
    ),
    "what the store holds is not fetched": (
        (rules(host=9), Stored("full", chain("ab"), True), StoreQueried(7, chain("abc"), False)),
        "KV704",
        ("pages 0 to 1 of the prompt of request 7",),
    ),
    "what the store holds behind the host's is not fetched": (
        (
            rules(host=9),
            *computes("a"),
            *backs_up("a"),
            Stored("full", chain("abc"), True),
            StoreQueried(7, chain("abcd"), False),
        ),
        "KV704",
        ("pages 1 to 2",),
    ),
    "what is fetched whole is thrown away": (
        (*FETCHING, Transferred("prefetch", 7, 0, True, ())),
        "KV703",
        ("2 pages that the tiers lacked came whole from the store; 0 were kept",),
    ),
    "half of what is fetched whole is thrown away": (
        (*FETCHING, *gains("host", "a"), Transferred("prefetch", 7, 1, True, chain("a"))),
        "KV703",
        ("1 were kept",),
    ),
    "a backup that is due does not start": (
        (rules(host=9), *computes("a"), *later(SOON + 1)),
        "KV704",
        ("is not backed up",),
    ),
    "a backup does not start at the second use": (
        (rules(host=9, uses=2), *computes("a"), finds("a", 1), *later(SOON + 1)),
        "KV704",
        ("is not backed up",),
    ),
    "the end of a prefix is not backed up": (
        (rules(host=9), *computes("a"), *backs_up("a"), *computes("ab", start=1), *later(SOON + 1)),
        "KV704",
        ("is not backed up",),
    ),
    "nothing is ever backed up, and it leaves the device before that is missed": (
        (rules(host=9), *computes("a"), *evicts("device", "a"), *later(SOON + 1)),
        "KV704",
        ("backups of 1 pages", "none was started or refused"),
    ),
    "write-back without a backup": (
        (rules(uses=None, host=9), *computes("a"), *evicts("device", "a")),
        "KV704",
        ("under write-back",),
    ),
    "pages leave without an eviction": (
        (rules(), *A_THEN_B, *evicts("device", "a"), *loses("device", "b")),
        "KV703",
        ("neither it nor a prefix of it was chosen",),
    ),
    "the host's copy goes with the device's": (
        (rules(host=9), *computes("a"), *backs_up("a"), *evicts("device", "a"), *loses("host", "a")),
        "KV703",
        ("host full",),
    ),
    "a window is given back for the pages": (
        (
            rules(),
            *computes("a"),
            *gains("device", "a", space="window"),
            *evicts("device", "a", space="window"),
            *loses("device", "a"),
        ),
        "KV703",
        ("device full",),
    ),
    "what was found is computed again": (
        (PAGES, rules(), *computes("ab"), finds("abc", 2), Forward(7, 2, 6)),
        "KV703",
        ("from token 2 on", "first 4 tokens"),
    ),
    "what was computed is not offered": (
        (PAGES, rules(), finds("ab", 0), Forward(7, 0, 4), *computes("a"), Finished(7, (1,))),
        "KV703",
        ("with 2 whole pages, of which 1",),
    ),
    "what was offered is not cached": (
        (rules(), Computed(7, chain("ab"), 0), *gains("device", "a"), finds("ab", 1)),
        "KV703",
        ("is not cached on the device",),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_has_this_one_finding(name: str) -> None:
    check_bad(*BAD[name])


def test_a_page_that_came_back_has_no_uses_of_its_former_life() -> None:
    history = (*computes("a"), finds("a", 1), finds("a", 1), *evicts("device", "a"), *computes("a"), *computes("b"))
    assert judge(CachingOracle(), History.of(rules("lfu"), *history, *evicts("device", "a"))) == ()


def test_a_lookup_that_was_cut_back_to_the_device_counts_once_for_what_it_served_and_may_for_the_rest() -> None:
    refused = (finds("ab", 2), finds("ab", 1, device_only=True))
    before = (rules("lfu", device=1, host=2), *computes("a"), *gains("host", "ab"), *refused)
    oracle = CachingOracle()
    judge(oracle, History.of(*before))
    pages = oracle._cache.pages
    assert (pages[b"a"].least[1], pages[b"a"].most[1]) == (2, 3)
    assert (pages[b"ab"].least[1], pages[b"ab"].most[1]) == (0, 1)


def test_findings_have_an_end() -> None:
    oracle = CachingOracle()
    refusal = Refused("backup", 7, "full", chain("a"))
    assert len(judge(oracle, History.of(rules(host=2), *[refusal] * 50))) == MAX_FINDINGS
    assert oracle.judged == 50
