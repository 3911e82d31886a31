"""Evidence of a round: from answers, from counters that moved, and from the order of answers."""

from __future__ import annotations

import pytest
from rigs.live_client import ALPHABET, ScriptedClient, exchange

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.conclusion import requirements
from kvcheck.core.live.counting import Observed, lost_prefixes, observe, overtakes, parse_requirements
from kvcheck.core.live.exchange import AbortRequest, End, Exchange, Question, Tier
from kvcheck.core.live.questions import Questions


def question(number: int = 0, places: int = 100) -> Question:
    asked = Questions(ALPHABET, longest=1024, names=3, first=number)
    rng = Rng(number)
    return asked.put(rng, asked.walk(rng, places), 16)


def seen(client: ScriptedClient, exchanges: list[Exchange], **readings: object) -> Observed:
    given = {"before": None, "after": None, "page": 16, **readings}
    return observe(client, exchanges, judged=exchanges, **given)  # type: ignore[arg-type]


def test_what_answers_say_is_counted() -> None:
    exchanges = [
        exchange(question(0), cached=0, retractions=0, cached_by={Tier.DEVICE: 0, Tier.HOST: 0}),
        exchange(question(1), cached=64, retractions=2, cached_by={Tier.DEVICE: 16, Tier.HOST: 48}),
    ]
    found = seen(ScriptedClient(), exchanges)
    assert found.counts == {"hit": 1, "hit-token": 64, "host-hit": 48, "retract": 2, "lost-prefix": 0}
    assert found.sources["hit"] == "each request: cached tokens"
    assert seen(ScriptedClient(), [exchange(question())]).counts == {}, "what no answer says has no count"


def test_counters_count_by_how_they_moved_and_a_new_one_from_nothing() -> None:
    client = ScriptedClient(counted={"retract": ("preemptions_total",), "evict": ("evicted",), "backup": ("none",)})
    found = seen(
        client,
        [exchange(question())],
        before={"preemptions_total": 5.0},
        after={"preemptions_total": 8.0, "evicted": 7.0},
    )
    assert found.counts == {"retract": 3, "evict": 7}
    assert found.sources == {"retract": "preemptions_total", "evict": "evicted"}


def test_a_counter_that_was_reset_counts_nothing() -> None:
    client = ScriptedClient(counted={"evict": ("evicted",)})
    assert seen(client, [], before={"evicted": 5.0}, after={"evicted": 2.0}).counts == {"evict": 0}


def test_the_engine_says_it_of_each_request_before_its_counter_unless_requests_were_aborted() -> None:
    client = ScriptedClient(counted={"hit-token": ("cached_total",), "retract": ("retracted_total",)})
    exchanges = [exchange(question(), cached=32, retractions=1)]
    found = seen(client, exchanges, before={}, after={"cached_total": 900.0, "retracted_total": 0.0})
    assert (found.counts["hit-token"], found.counts["retract"]) == (32, 1)
    more = seen(client, exchanges, before={}, after={"cached_total": 900.0, "retracted_total": 4.0})
    assert (more.counts["retract"], more.sources["retract"]) == (4, "retracted_total")


def test_an_abort_counts_once_something_had_been_answered() -> None:
    aborts = [
        exchange(question(0), abort=AbortRequest(after=3)),
        exchange(question(1), abort=AbortRequest(after=3), end=End.ABORTED, tokens=()),
        exchange(question(2), abort=AbortRequest(after=3), end=End.DONE),
    ]
    assert seen(ScriptedClient(), aborts).counts == {"abort": 1}


def test_a_transfer_is_an_answered_request_of_a_pair() -> None:
    pair = ScriptedClient(said=frozenset({"transfer"}))
    exchanges = [exchange(question(0)), exchange(question(1), end=End.REFUSED, tokens=())]
    assert seen(pair, exchanges).counts == {"transfer": 1}


def test_a_request_overtakes_one_of_lower_priority_that_began_before_it() -> None:
    low = exchange(question(0), began_s=0, ended_s=10, priority=0)
    high = exchange(question(1), began_s=1, ended_s=5, priority=5)
    same = exchange(question(2), began_s=1, ended_s=5, priority=0)
    late = exchange(question(3), began_s=1, ended_s=11, priority=5)
    first = exchange(question(4), began_s=-1, ended_s=5, priority=5)
    assert overtakes([low, high]) == 1
    assert overtakes([low, same]) == overtakes([low, late]) == overtakes([low, first]) == 0


def test_a_prefix_is_lost_where_it_had_been_computed_and_is_not_cached() -> None:
    asked = Questions(ALPHABET, longest=1024, names=3)
    rng = Rng(1)
    base = asked.walk(rng, 120)
    first = asked.put(rng, base, 8)
    again = asked.put(rng, asked.walk(rng, 140, prefix=base.cut(110)), 8)
    before = exchange(first, began_s=0, ended_s=1, cached=0)
    assert lost_prefixes([before, exchange(again, began_s=2, ended_s=3, cached=0)], page=16) == 1
    assert lost_prefixes([before, exchange(again, began_s=2, ended_s=3, cached=96)], page=16) == 0
    assert lost_prefixes([before, exchange(again, began_s=0.5, ended_s=3, cached=0)], page=16) == 0
    assert lost_prefixes([exchange(first), exchange(again, began_s=2)], page=16) is None


@pytest.mark.parametrize(
    ("texts", "expected"),
    [([], {}), (["retract=10,hit=100"], {"retract": 10, "hit": 100}), (["hit=1", "hit=2"], {"hit": 2})],
)
def test_requirements_are_read(texts: list[str], expected: dict[str, int]) -> None:
    assert parse_requirements(texts) == expected


@pytest.mark.parametrize("text", ["", "hit", "hit=", "hit=0", "hit=-1", "hit=x", "hits=1", "hit=1,", "hit=" + "9" * 13])
def test_a_broken_requirement_says_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match=r"--require .*expected"):
        parse_requirements([text])


def test_a_requirement_that_was_not_met_says_what_to_change() -> None:
    rows = requirements({"retract": 3, "hit": 1}, {"retract": 2, "hit": 5}, {"retract": "use a smaller pool"})
    assert [(row.id, row.verdict.value) for row in rows] == [("require/retract", "unknown"), ("require/hit", "pass")]
    assert "2 of 3 retractions" in str(rows[0].reason) and "use a smaller pool" in str(rows[0].reason)
    (unsaid,) = requirements({"evict": 1}, {}, {})
    assert unsaid.verdict.value == "unknown" and "does not say" in str(unsaid.reason)
