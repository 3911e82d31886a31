"""The caching oracle on literal histories. Each bad history differs from a good one in one step."""

from __future__ import annotations

import pytest
from rigs.cache_histories import PERIOD, chain, history

from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.cache_model import PlainCache
from kvcheck.core.stress.oracles.caching import SOON, CachingOracle
from kvcheck.core.stress.oracles.caching_rounds import LOOKS
from kvcheck.core.stress.oracles.caching_store import VAIN
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge

LATE = LOOKS * PERIOD + 2
"""Rounds after which what is due at a look is late."""
TWO_COPIES = "hosted; backup 1; backup 2"
FETCHING = "hosted; stores ab; fetches abc"
STORED = "hosted; stores ab keys=pq"
STATE_COMES = "model 2 states; hosted; stores ab; stores a|b state; fetches abc"
WINDOW_COMES = "model 2 window=4; hosted; stores abc; stores a|bc window; fetches abcd"
WITH_STATE = "model 1 states; hosted; computes abc; gains device ab|c state"
WITH_WINDOW = "model 1 window=3; hosted; computes abc; gains device abc window; gains host abc"

GOOD: dict[str, str] = {
    # Order of eviction
    "nothing is declared": "computes a b; evicts device b; loses device a; finds a 0 device",
    "no order is declared": "rules None; computes a b; evicts device b",
    "the least recently used goes first": "rules; computes a b; evicts device a; evicts device b",
    "a lookup makes it younger": "rules; computes a b; finds a 1; evicts device b",
    "an offer may count as a use": "rules; computes a b; offers a; evicts device b",
    "an offer need not count as a use": "rules; computes a b; offers a; evicts device a",
    "the least often used goes first": "rules lfu; computes a b; finds a 1; finds a 1; evicts device b",
    "of equal uses either goes": "rules lfu; computes a b; evicts device b",
    "it came back": "rules lfu; computes a; finds a 1; finds a 1; evicts device a; computes a b; evicts device a",
    "the lowest priority": "rules priority; computes a priority=2; computes b priority=1; evicts device b",
    "a lookup raises it": "rules priority; computes a b; finds b 1 priority=2; evicts device a; evicts device b",
    "locked or passed over": (
        "rules; computes a b c; locks device a; evicts device c passed=b; unlocks device a; evicts device a"
    ),
    "a lock holds all that lies before it": "rules; computes ab c; locks device ab; evicts device c",
    "a prefix goes from its end": "rules; computes ab c; evicts device a|b",
    "the host, what is not on the device": "hosted; serves a b; evicts device b passed=a; evicts host b",
    "what the host holds behind it goes": (
        "rules uses=2 host=9; computes a a|b; gains host a|b; evicts device a|b; chooses device a; "
        "loses host a|b; loses device a"
    ),
    "everything is given back at the end": "rules; computes a b; counted 7 2; loses device a",
    # How much is given up
    "nobody says how much is wanted": "rules; computes a b; evicts device a; evicts device b",
    "as many go as were asked for": "rules; computes a b; wants device 2; evicts device a; evicts device b",
    "a larger victim": "rules; computes ab c; wants device 1; evicts device ab; wants device 1; evicts device c",
    "a tier frees nothing on the other": "hosted; serves a; wants host 1; evicts device a; evicts host a",
    # Backups
    "backups that are due": f"hosted; serves a a|b; later {2 * SOON}",
    "a backup takes its time": f"hosted; computes a; later {SOON}; backs_up a; later {SOON}",
    "it leaves before its backup": f"hosted; computes a; evicts device a; serves b; later {SOON}",
    "too few uses for a backup": f"rules uses=2 host=9; computes a; later {2 * SOON}",
    "none behind a page without one": (
        f"rules host=1; hosts x; locks host x; computes a; refuses backup a; computes a|b; later {2 * SOON}"
    ),
    "no host, no backup": f"rules; computes a; later {2 * SOON}",
    "write-back": "rules uses=None host=9; serves a; evicts device a",
    "write-back without room": (
        "rules uses=None host=1; hosts x; locks host x; computes a; chooses device a; refuses backup a; loses device a"
    ),
    "the host is locked": "rules host=2; serves x; computes ab; refuses backup ab",
    "a backup at the second look": f"looking; computes a; rounds {LATE - 1}; backs_up a; rounds {LATE}",
    "a backup at its next use": (
        "rules host=1 looks=1; hosts x; locks host x; computes abc; refuses backup a; unlocks host x; evicts host x; "
        f"finds a 1; backs_up a; rounds {LATE}"
    ),
    "a lookup that could not load is no use": (
        "model 2 states; rules uses=2 host=9 state=2 rows=2 looks=1; computes a; gains host a state; finds a 1; "
        f"finds a 0 device; rounds {LATE}"
    ),
    "queued for the store": "hosted; keeps; serves a; puts a; counted 9 0",
    "it came from the store": (
        "hosted; keeps; fetches ab; gains host a; acked prefetch 1 a; acked backup 1 a; counted 9 0"
    ),
    "deleted from the store": "hosted; keeps; serves a; deleted a; counted 9 0",
    "there is no store": "hosted; serves a; counted 9 0",
    "cut short before it was queued": "hosted; keeps; serves a",
    # Companions
    "a backup with its state": f"{WITH_STATE}; gains host abc; gains host ab|c state; acked backup 3 abc",
    "its state a little later": f"{WITH_STATE}; gains host abc; finds ? 0; gains host ab|c state; acked backup 3 abc",
    "its state was refused room": f"{WITH_STATE}; allocates host.state 9; refuses backup ab|c state; backs_up abc",
    "its state was given up": f"{WITH_STATE}; evicts device ab|c state; backs_up abc",
    "its state came after the backup": (
        "model 1 states; hosted; computes abc; gains host abc; gains device ab|c state; acked backup 3 abc"
    ),
    "the window pages that its end sees": f"{WITH_WINDOW}; gains host a|bc window; acked backup 3 abc",
    # Loads
    "the device is locked": (
        "rules device=2 host=9; serves a; evicts device a; serves bc; locks device bc; finds a 1; finds a 0 device"
    ),
    "a prompt's own pages make no room": "rules device=1 host=9; serves a; hosts a|b; finds ab 2; finds ab 1 device",
    "a state slot for every request": (
        "model 2 states; rules host=9 state=2 rows=2; hosts a; gains host a state; finds a 1; finds a 0 device"
    ),
    "no room for a state": (
        "model 1 states; rules host=9 state=1; computes a; gains device a state; locks device a; "
        "refuses snapshot b state"
    ),
    # The store
    "what the store holds is fetched": f"{FETCHING}; gains host ab; acked prefetch 2 ab; finds abc 2",
    "a page does not come": f"{FETCHING}; misses a|b; gains host a; acked prefetch 1 a",
    "it is stored again meanwhile": f"{FETCHING}; misses a; stores a; acked prefetch 0",
    "it is computed meanwhile": f"{FETCHING}; computes a; acked prefetch 0",
    "nobody wants it any more": f"{FETCHING}; aborted; acked prefetch 0",
    "another request fetches it already": f"{FETCHING}; queries abd request=8",
    "a prefix with its state comes": f"{STATE_COMES}; acked prefetch 2 ab",
    "the state does not come": f"{STATE_COMES}; misses a|b state; acked prefetch 0",
    "a prefix with its window comes": f"{WINDOW_COMES}; acked prefetch 3 abc",
    "a page of the window does not come": f"{WINDOW_COMES}; misses a|b window; acked prefetch 0",
    "the store has lost it": "hosted; stores ab; misses a; queries abc",
    "the store lacks its state": "model 2 states; hosted; stores ab; queries abc",
    "the host lacks the page before it": "rules uses=2 host=9; computes a; stores ab; queries ab",
    "no room for what the store holds": "rules host=1; stores ab; refuses prefetch ab; queries abc",
    "it hangs on a page that is kept": "hosted; serves a; stores ab; locks host a; fetches abc",
    "a cache without locks": "hosted; serves a; stores ab; fetches abc",
    "a damaged object is not served": f"keeps; {STORED}; damaged q; misses a|b keys=q",
    "damaged before it was stored": f"keeps; damaged q; {STORED}; misses a|b keys=q",
    "a deleted object is not served": f"keeps; {STORED}; deleted a|b; misses a|b keys=q",
    "a store that may lose what it has": f"{STORED}; misses a|b keys=q",
    "never stored": "keeps; hosted; misses a|b keys=q",
    "a fetch that brought nothing, a few times": f"hosted; vain {VAIN}; finds abc 0",
    "a fetch of several brought something": (
        f"hosted; vain {VAIN - 1}; fetches abc; gains host a; acked prefetch 1 a; vain {VAIN}"
    ),
    "fetches of a request that was sent again": f"hosted; vain {VAIN}; aborted; vain {VAIN}",
    # Prompts
    "a prompt starts behind it": "model 2; rules; computes ab; finds abc 2; forward 4 6; computes ab|c; ended",
    "pages that are not whole": "model 2; rules; finds a 0; forward 0 1; ended",
    "a prefix ends where a state was kept": "model 2 states; rules; finds a 0; forward 0 4; ended",
    "the whole pages before the last token": "model 2; rules; sent 4; finds a 0",
    "a page that ends before the last token": "model 2; rules; sent 5; finds ab 0",
    "nobody says how long a prompt is": "model 2; rules; finds a 0",
    # Acknowledgements
    "a copy has run": "hosted; backup 1; done 1; copied 1",
    "the older of two copies": f"{TWO_COPIES}; done 1; copied 1",
    "both operations of a load": "hosted; load 1; runs load 1 at=2; done 1; done 2; loaded 1",
    "at the second look": f"looking; backup 1; done 1; rounds {LATE - 1}; copied 1; rounds {LATE}",
    "a copy runs for long": f"looking; backup 1; rounds {9 * LATE}; done 1; copied 1",
    "a copy waits for an older one": f"looking; backup 1; backup 2; done 2; rounds {9 * LATE}",
    "a load waits for its turn": f"looking; waits load 1; rounds {9 * LATE}",
    "half of a copy": f"looking; backup 1; runs backup 1 at=2 lane=side; done 2; rounds {9 * LATE}",
    "a prefetch": f"looking; queries a; gets 1; done 1; rounds 2; acked prefetch 0; rounds {LATE}",
    "the looks are not declared": f"hosted; backup 1; done 1; rounds {9 * LATE}",
    "after the counts nobody looks": f"looking; backup 1; done 1; counted 9 0; rounds {LATE}",
    "loads take turns": "looking; loads 1; loads 2 load.1.side; loads 3; loads 4",
    "too few loads for turns": "looking; loads 1; loads 2; loads 3",
    "one load of many operations": f"looking; load 1; {'runs load 1; ' * 8}done 1; loaded 1",
    # Answers
    "all of a prefix is flushed": (
        "hosted; serves a a|b; flushes device+host ab; loses device ab; loses host ab; answers device+host ab gone"
    ),
    "it leaves the device": "hosted; serves a a|b; flushes device a|b; loses device a|b; answers device a|b gone",
    "a prefix that is locked stays": "hosted; serves a a|b; locks host ab; answers device+host ab kept",
    "a prefix that goes on stays on the device": "hosted; serves a a|b; answers device a kept",
    "the device holds it": "hosted; serves a a|b; answers host a|b kept",
}

BAD: dict[str, tuple[str, str]] = {  # code and words of the message, and the history
    # Order of eviction
    "the most recently used": ("KV701 last use is 2 or higher ... is 1", "rules; computes a b; evicts device b"),
    "the most often used": ("KV701 uses is 3", "rules lfu; computes a b; finds a 1; finds a 1; evicts device a"),
    "the higher priority": (
        "KV701 priority is 2",
        "rules priority; computes a priority=2; computes b priority=1; evicts device a",
    ),
    "the host's last use": ("KV701 host full ... lru", "hosted; hosts a; finds ? 0; hosts b; evicts host b"),
    "a state, used last": (
        "KV701 device state",
        "rules; computes a; gains device a state; computes b; gains device b state; evicts device b state",
    ),
    "the middle of a prefix": ("KV701 has more of its prefix behind it", "rules; computes ab; evicts device a"),
    "what is locked": ("KV701 is locked", "rules; computes a; locks device a; evicts device a"),
    "what the device holds": ("KV701 is in use on the device", "hosted; serves a; evicts host a"),
    "leaves without an eviction": ("KV703 chosen", "rules; computes a b; evicts device a; loses device b"),
    "the host's copy goes too": ("KV703 host full", "hosted; serves a; evicts device a; loses host a"),
    "a window for the pages": (
        "KV703 device full",
        "rules; computes a; gains device a window; evicts device a window; loses device a",
    ),
    # How much is given up
    "one more than was wanted": (
        "KV705 device full ... room for 1 was asked for, and 1 were freed",
        "rules; computes a b; wants device 1; evicts device a; evicts device b",
    ),
    "one more of the host": ("KV705 host full", "hosted; hosts a; hosts b; wants host 1; evicts host a; evicts host b"),
    # Backups
    "a backup does not start": ("KV704 is not backed up", f"hosted; computes a; later {SOON + 1}"),
    "due at the second use": ("KV704 backed up", f"rules uses=2 host=9; computes a; finds a 1; later {SOON + 1}"),
    "the end of a prefix": ("KV704 is not backed up", f"hosted; serves a; computes a|b; later {SOON + 1}"),
    "nothing is ever backed up": (
        "KV704 backups of 1 pages ... none was started",
        f"hosted; computes a; evicts device a; later {SOON + 1}",
    ),
    "write-back without a backup": ("KV704 write-back", "rules uses=None host=9; computes a; evicts device a"),
    "no backup within two looks": (
        f"KV704 is not backed up ... {LATE} rounds and 0 uses",
        f"looking; computes a; rounds {LATE}",
    ),
    "not queued for the store": ("KV704 1 pages were backed up", "hosted; keeps; serves a; counted 9 0"),
    "another page is queued": ("KV704 never queued", "hosted; keeps; serves a; puts b; counted 9 0"),
    "the host has room": ("KV702 a backup of 2 full for request 7", "rules host=2; computes ab; refuses backup ab"),
    "the host could make room": ("KV702 for 2", "rules host=2; hosts xy; computes ab; refuses backup ab"),
    "a companion has room": ("KV702 a backup of 1 window", "rules host=2; computes a; refuses backup a window"),
    # Companions
    "a backup leaves the state out": ("KV704 without its state", f"{WITH_STATE}; backs_up abc"),
    "another state's room": (
        "KV704 without its state",
        f"{WITH_STATE}; allocates host.state 9; refuses backup x state; backs_up abc",
    ),
    "a window page that is seen": (
        "KV704 without its window",
        f"{WITH_WINDOW}; gains host ab|c window; acked backup 3 abc",
    ),
    # Loads
    "the device has room": (
        "KV702 served 0 of the 2 pages ... 2 full",
        "rules device=2 host=9; hosts ab; finds ab 2; finds ab 0 device",
    ),
    "the device could make room": (
        "KV702 room, free or evictable, for 1 full",
        "rules device=1 host=9; hosts a; serves x; finds a 0 device",
    ),
    "room for a window": (
        "KV702 2 window",
        "model 2 window=4; rules None host=9 window=2; serves abc; gains host a|bc window; finds abc 3; "
        "finds abc 0 device",
    ),
    "there is a state slot": (
        "KV702 1 full and 1 state",
        "model 2 states; rules host=9 state=3 rows=2; hosts a; gains host a state; finds a 0 device",
    ),
    "a state that could go": (
        "KV702 a snapshot of 1 state",
        "model 1 states; rules host=9 state=1; computes a; gains device a state; refuses snapshot b state",
    ),
    # The store
    "room for a prefetch": ("KV702 a prefetch of 2 full", "rules host=2; stores ab; refuses prefetch ab; queries abc"),
    "what the store holds is not fetched": ("KV704 pages 0 to 1", "hosted; stores ab; queries abc"),
    "nor behind the host's": ("KV704 pages 1 to 2", "hosted; serves a; stores abc; queries abcd"),
    "it comes and is thrown away": ("KV703 2 pages ... 0 were kept", f"{FETCHING}; acked prefetch 0"),
    "half of it is thrown away": ("KV703 1 were kept", f"{FETCHING}; gains host a; acked prefetch 1 a"),
    "a state that came": ("KV703 2 pages that the tiers lacked ... 0 were kept", f"{STATE_COMES}; acked prefetch 0"),
    "a window page is not kept": ("KV703 3 pages ... 2 were kept", f"{WINDOW_COMES}; acked prefetch 2 ab"),
    "its page may go": (
        "KV703 pages from 1 on ... nothing keeps the page before",
        "hosted; serves a; stores ab; locks host a; unlocks host a; fetches abc",
    ),
    "a whole object is not served": ("KV703 was stored whole", f"keeps; {STORED}; misses a|b keys=q"),
    "another object is damaged": ("KV703 was stored whole", f"keeps; {STORED}; damaged p; misses a|b keys=q"),
    "a failed fetch, again and again": (f"KV706 request 7 waits ... {VAIN} fetches", f"hosted; vain {VAIN + 1}"),
    # Prompts
    "a hash that no prompt has": (
        "KV703 host full ... 6164 ... no page of a prompt",
        "hosted; computes abc; queries abcd request=8; gains host a|d",
    ),
    "a companion's": ("KV703 host state ... 62", "model 2 states; hosted; computes ab; gains host b state"),
    "found and computed again": (
        "KV703 from token 2 on ... first 4 tokens",
        "model 2; rules; computes ab; finds abc 2; forward 2 6",
    ),
    "computed and not offered": (
        "KV703 2 whole pages, of which 1",
        "model 2; rules; finds ab 0; forward 0 4; computes a; ended",
    ),
    "offered and not cached": ("KV703 not cached on the device", "rules; offers ab; gains device a; finds ab 1"),
    "the last whole page": (
        "KV703 1 pages of the prompt of request 7 ... 5 tokens ... 2 whole pages",
        "model 2; rules; sent 5; finds a 0",
    ),
    "nothing is looked up": ("KV703 0 pages of the prompt", "model 2; rules; sent 3; finds - 0"),
    # Acknowledgements
    "while it runs": ("KV203 backup 1 is acknowledged before", "hosted; backup 1; copied 1"),
    "only the younger copy has run": ("KV203 backup 1", f"{TWO_COPIES}; done 2; copied 1"),
    "one operation of a load": ("KV203 load 1", "hosted; load 1; runs load 1 at=2; done 1; loaded 1"),
    "a copy, a round later": (
        f"KV706 backup 1 has run ... {LATE} rounds later ... every {PERIOD}",
        f"looking; backup 1; done 1; rounds {LATE}; copied 1",
    ),
    "a load is not acknowledged": ("KV706 load 1 has run", f"looking; load 1; done 1; rounds {9 * LATE}"),
    "a copy behind one that has run": (
        "KV706 backup 2 has run",
        f"looking; backup 1; backup 2; done 1; done 2; copied 1; rounds {LATE}",
    ),
    "a prefetch is not": ("KV706 a prefetch for request 7", f"looking; queries a; gets 1; done 1; rounds {LATE}"),
    "all loads go over one engine": (
        "KV706 4 loads take turns on 2 engines ... load.1 or load.1.side",
        "looking; loads 1; loads 2; loads 3; loads 4",
    ),
    # Answers
    "gone, and not all of it": (
        "KV605 2 pages have left device and host ... host full",
        "hosted; serves a a|b; flushes device+host ab; loses device ab; loses host a; answers device+host ab gone",
    ),
    "gone from the device": ("KV605 1 pages have left device", "hosted; serves a a|b; answers device a|b gone"),
    "kept, and nobody uses it": (
        "KV605 device and host ... nothing locks them",
        "hosted; serves a a|b; answers device+host ab kept",
    ),
    "the end has to stay": ("KV605 stay on device", "hosted; serves a a|b; answers device a|b kept"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_has_no_findings(name: str) -> None:
    oracle = CachingOracle()
    assert [each.message for each in judge(oracle, History.of(*history(GOOD[name])))] == []
    assert oracle.judged == 0 or name != "nothing is declared"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_has_this_one_finding(name: str) -> None:
    said, steps = BAD[name]
    (finding,) = judge(CachingOracle(), History.of(*history(steps)))
    code, _, words = said.partition(" ")
    assert (finding.code, finding.oracle) == (code, "caching")
    assert all(each in finding.message for each in words.split(" ... ")), finding.message


def test_a_lookup_that_was_cut_back_to_the_device_counts_once_for_what_it_served_and_may_for_the_rest() -> None:
    oracle = CachingOracle()
    steps = "rules lfu device=1 host=2; computes a; gains host ab; finds ab 2; finds ab 1 device"
    judge(oracle, History.of(*history(steps)))
    pages = oracle._cache.pages
    assert (pages[b"a"].least[1], pages[b"a"].most[1]) == (2, 3)
    assert (pages[b"ab"].least[1], pages[b"ab"].most[1]) == (0, 1)


def test_findings_have_an_end() -> None:
    oracle = CachingOracle()
    assert len(judge(oracle, History.of(*history("rules host=2" + "; refuses backup a" * 50)))) == MAX_FINDINGS
    assert oracle.judged == 50


# Hits beside those of a plain cache

FEW_HITS = "rules device=2; computes a" + "".join(f"; finds a 0 request={each}" for each in range(4))
AS_MANY: dict[str, str] = {
    "three of four": "rules; computes a; finds a 0" + "".join(f"; finds a 1 request={each}" for each in range(1, 4)),
    "a later use": "rules uses=2; computes a; finds a 0",
    "states": "model 2 states; rules; computes a; finds a 0",
    "window": "model 2 window=4; rules; computes a; finds a 0",
    "cut back once": "rules device=1; computes ab; finds b 0; finds ab 1 device",
    "not declared": "computes a; finds a 0",
}


def test_a_run_that_serves_far_less_than_a_plain_cache_is_warned_of_and_breaks_no_rule() -> None:
    oracle = CachingOracle()
    assert judge(oracle, History.of(*history(FEW_HITS))) == ()
    assert oracle.note is not None and "served 0 pages" in oracle.note and "serves 4" in oracle.note


@pytest.mark.parametrize("name", AS_MANY)
def test_a_difference_that_is_small_or_has_a_reason_is_not_warned_of(name: str) -> None:
    oracle = CachingOracle()
    judge(oracle, History.of(*history(AS_MANY[name])))
    assert oracle.note is None


def test_a_plain_cache_gives_up_the_least_recently_used_page_and_of_one_prefix_the_end() -> None:
    cache = PlainCache(3)
    cache.keep(chain("ab"))
    cache.keep(chain("c"))
    assert cache.look_up(chain("abx")) == 2
    cache.keep(chain("d"))
    assert (cache.look_up(chain("c")), cache.look_up(chain("ab"))) == (0, 2)
    cache.keep(chain("efgh"))
    assert (cache.look_up(chain("ab")), cache.look_up(chain("efgh"))) == (0, 3)
