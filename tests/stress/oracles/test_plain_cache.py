"""Hits beside those of a plain cache: what is warned of, and what is not.

Invariants:
- A warning is no finding, and names no request.
"""

from __future__ import annotations

import pytest
from rigs.cache_histories import Events, chain, computes, finds, rules

from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.cache_model import PlainCache
from kvcheck.core.stress.oracles.caching import CachingOracle
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.stress.workload.events import Modelled

STATES = Modelled(page_size=2, window=0, has_state=True)
WINDOW = Modelled(page_size=2, window=4, has_state=False)


def test_a_run_that_serves_far_less_than_a_plain_cache_is_warned_of_and_breaks_no_rule() -> None:
    history = (rules(device=2), *computes("a"), *[finds("a", 0, request=each) for each in range(4)])
    oracle = CachingOracle()
    assert judge(oracle, History.of(*history)) == ()
    assert oracle.note is not None and "served 0 pages" in oracle.note and "serves 4" in oracle.note


@pytest.mark.parametrize(
    "history",
    [
        (rules(), *computes("a"), *[finds("a", min(each, 1), request=each) for each in range(4)]),
        (rules(uses=2), *computes("a"), finds("a", 0)),
        (STATES, rules(), *computes("a"), finds("a", 0)),
        (WINDOW, rules(), *computes("a"), finds("a", 0)),
        (rules(device=1), *computes("ab"), finds("b", 0), finds("ab", 1, device_only=True)),
        (*computes("a"), finds("a", 0)),
    ],
    ids=("three of four", "a later use", "states", "window", "cut back once", "not declared"),
)
def test_a_difference_that_is_small_or_has_a_reason_is_not_warned_of(history: Events) -> None:
    oracle = CachingOracle()
    judge(oracle, History.of(*history))
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
