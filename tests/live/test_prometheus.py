"""Counters from text that is written out here."""

from __future__ import annotations

import math

import pytest

from kvcheck.core.live.clients.asking import counters, parse_samples

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
