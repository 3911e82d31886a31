"""Names of cells, counted nouns, hints for misspelt names, and ranges of seeds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvcheck.core.base.cells import ENGINE_NAMES, PROCESS_TRANSPORTS, SCENARIO_NAMES, cell_of, keys_of, lines_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted, counted_field, plural
from kvcheck.core.base.registry import LISTED_NAMES, did_you_mean, unknown_name
from kvcheck.core.base.seeds import parse_seeds, parse_shard
from kvcheck.core.cache.transfer import SHARING_TRANSPORTS, TRANSPORTS
from kvcheck.core.live.line import LivePlan
from kvcheck.core.probes.installed import ENGINES
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.scenarios import SCENARIOS

PLAN = Plan(scenario="pd-transfer", shape="llama-3-tiny")
PLANS = {
    "pd-transfer/llama-3-tiny": PLAN,
    "pd-transfer/llama-3-tiny/tcp": replace(PLAN, transport="tcp", backend="eager", ranks="1x1"),
    "pd-transfer/llama-3-tiny/mooncake": replace(PLAN, transport="mooncake", backend="eager", ranks="1x1"),
    "retract-resume/retract.nsa": Plan(scenario="retract-resume", probe="retract.nsa", target="sglang"),
}
MANY = [f"name-{number}" for number in range(LISTED_NAMES + 1)]


@pytest.mark.parametrize("name", PLANS)
def test_line_of_a_plan_leads_to_its_cell(name: str) -> None:
    assert PLANS[name].cell == name == cell_of(PLANS[name].line(), [*PLANS])


def test_record_that_named_no_transport_reads_as_before() -> None:
    line = PLANS["pd-transfer/llama-3-tiny/tcp"].line()
    assert cell_of(line, ["pd-transfer/llama-3-tiny"]) == "pd-transfer/llama-3-tiny"
    assert cell_of(line, []) == "pd-transfer/llama-3-tiny/tcp", "what was not judged is named as it is now"


@pytest.mark.parametrize("engine", ["vllm", None])
def test_line_of_a_running_server_leads_to_the_cell_of_its_engine(engine: str | None) -> None:
    plan = LivePlan(scenario="hicache", target="http://127.0.0.1:8000", known_answers="tiny", engine=engine)
    assert cell_of(plan.line(), []) == plan.cell == f"hicache/{engine or 'server'}"


def test_names_that_base_states_are_those_of_the_tables() -> None:
    assert SCENARIOS.names() == SCENARIO_NAMES
    assert TRANSPORTS.names() == ("loopback", *PROCESS_TRANSPORTS) and {*SHARING_TRANSPORTS} <= {*PROCESS_TRANSPORTS}
    assert ENGINES.names() == ENGINE_NAMES


def test_what_is_no_list_of_lines_names_no_cell() -> None:
    assert lines_of({}) == lines_of({"cells": "pd-transfer:shape=x"}) == []
    assert lines_of({"cells": [5]}) == ["5"] and cell_of("5", []) == "5/"
    assert keys_of("a:shape=b%2Cc,seed=1") == {"scenario": "a", "shape": "b,c", "seed": "1"}


@pytest.mark.parametrize(
    ("noun", "many"), [("cell", "cells"), ("process", "processes"), ("retry", "retries"), ("search", "searches")]
)
def test_the_plural_is_for_all_numbers_but_one(noun: str, many: str) -> None:
    assert [counted(number, noun) for number in (0, 1, 1000)] == [f"0 {many}", f"1 {noun}", f"1,000 {many}"]
    assert plural(1, noun) == noun


@pytest.mark.parametrize(
    ("name", "one"),
    [("retries", "1 retry"), ("pages_wanted", "1 page wanted"), ("orderings_checked", "1 ordering checked")],
)
def test_fields_of_the_evidence_have_a_singular(name: str, one: str) -> None:
    assert counted_field(1, name) == one
    assert counted_field(2, name) == f"2 {name.replace('_', ' ')}"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("retract-resum", "'retract-resume'"),
        ("RETRACT-RESUME", "'retract-resume'"),
        ("kv102", "'KV102'"),
        ("resum", "'retract-resume'"),
        ("xyz", ""),
    ],
)
def test_the_nearest_name_is_told_case_aside(name: str, near: str) -> None:
    hint = did_you_mean(name, ["retract-resume", "hicache", "KV102"])
    assert hint == (f"; did you mean {near}?" if near else "")


def test_names_are_listed_or_their_command_is() -> None:
    assert "known: tree, seal" in unknown_name("case", "tre", ["tree", "seal"])
    text = unknown_name("mutant", "nome-3", MANY, listed_by="kvcheck list mutants")
    assert "name-4" not in text and "'name-3'" in text and "kvcheck list mutants" in text
    assert all(name in unknown_name("key", "x", MANY) for name in MANY), "no command lists them"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shards_share_the_seeds_out(count: int) -> None:
    seeds = parse_seeds("5-9")
    shares = [[*parse_shard(f"{number}/{count}", seeds)] for number in range(1, count + 1)]
    assert sorted(itertools.chain.from_iterable(shares)) == [5, 6, 7, 8, 9]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert parse_shard(None, seeds) == seeds


@pytest.mark.parametrize(
    "text", ["", "7", "0-", "9-5", "x", "-1", "1-10000000", "1.5-2", "01-2", "1-2-3", "1-٣", "1-2 "]
)
def test_bad_seeds_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--seeds: expected"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "1/6", "a/b", "1/2/3"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard: expected"):
        parse_shard(text, range(1, 6))
