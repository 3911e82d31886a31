"""Plans of running servers: how their lines are told from others, their cells, and their sizes."""

from __future__ import annotations

import dataclasses

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.line import LivePlan, check_sizes, is_live_line

PLAN = LivePlan(
    scenario="hicache", target="http://127.0.0.1:8000", known_answers="models/tiny", engine="vllm", longest=99
)


def test_a_schedule_line_is_no_line_of_a_server() -> None:
    assert is_live_line(PLAN.line())
    assert not is_live_line("retract-resume:shape=glm-5.1-tiny,seed=1,schedule=3")
    assert not is_live_line("20260102-030405-0c4e91d7")


def test_a_cell_is_named_by_scenario_and_engine() -> None:
    assert PLAN.cell == "hicache/vllm"
    assert dataclasses.replace(PLAN, engine=None).cell == "hicache/server"


def test_sizes_have_limits() -> None:
    check_sizes(requests=1, concurrency=1)
    with pytest.raises(UsageError, match="--requests"):
        check_sizes(requests=10**9, concurrency=1)
