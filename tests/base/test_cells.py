"""A cell has one name: the one that its plan gives is the one that its line leads to, also in records of before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcheck.core.base.cells import ENGINE_NAMES, PROCESS_TRANSPORTS, SCENARIO_NAMES, cell_of, keys_of, lines_of
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
