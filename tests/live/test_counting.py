"""Counts of a server's work, from its answers and from its metrics."""

from __future__ import annotations

import math

import pytest
from rigs.live_client import ALPHABET, ScriptedClient, exchange

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.clients.asking import counters, parse_samples
from kvcheck.core.live.conclusion import requirements
from kvcheck.core.live.counting import Observed, lost_prefixes, observe, overtakes, parse_requirements
from kvcheck.core.live.exchange import AbortRequest, End, Exchange, Question, Tier
from kvcheck.core.live.questions import Questions

TEXT = """
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m4"} 39.0
vllm:num_preemptions_total{engine="1",model_name="m4"} 2
vllm:num_preemptions_created{engine="0",model_name="m4"} 1.79e+09
vllm:cache_config_info{block_size="32",num_gpu_blocks="130",x="a\\"b}\\\\\\nc",engine="0"} 1.0
hits_total{source="host"} 3 1700000000000
hits_total{source="disk"} 4
hits_total{source="host",engine="1"} 5 # {trace="x"} 1
latency_bucket{le="+Inf"} 7
latency_count 7
latency_sum 0.5
bad_total NaN
bad_total 2
worse_total +Inf
plain 1.5e3
empty{} 6
spaced { a = "1" , } 8
"""


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


def test_a_counter_is_the_sum_over_its_labels() -> None:
    sums = counters(parse_samples(TEXT))
    assert sums == {
        "vllm:num_preemptions_total": 41,
        "vllm:cache_config_info": 1,
        "hits_total": 12,
        "latency_count": 7,
        "latency_sum": 0.5,
        "bad_total": 2,
        "plain": 1500,
        "empty": 6,
        "spaced": 8,
    }


def test_a_sum_of_one_label_can_be_asked_for() -> None:
    sums = counters(parse_samples(TEXT), ['hits_total{source="host"}', 'hits_total{source="p2p"}'])
    assert sums['hits_total{source="host"}'] == 8
    assert 'hits_total{source="p2p"}' not in sums
    assert sums["hits_total"] == 12


def test_labels_of_an_info_metric_are_read_without_their_escapes() -> None:
    (info,) = [each for each in parse_samples(TEXT) if each.name == "vllm:cache_config_info"]
    assert dict(info.labels) == {"block_size": "32", "num_gpu_blocks": "130", "x": 'a"b}\\\nc', "engine": "0"}
    assert math.isnan(next(each.value for each in parse_samples(TEXT) if each.name == "bad_total"))


@pytest.mark.parametrize(
    "line",
    [
        *("", "# EOF", "x", "x{", 'x{a="1} 2', 'x{a="1"', "x{a=1} 2", "x y", "1x 2", "<html>", 'x{a="1"} 0x10'),
        "x" + " " * 70_000 + "1",
        "x{" + 'a="1",' * 20_000 + "} 1",
    ],
)
def test_a_line_that_is_no_sample_is_passed_over(line: str) -> None:
    assert counters(parse_samples(f"{line}\ny 1\n")) == {"y": 1}
