"""Lines of running servers: what they hold, and what they refuse."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.line import LivePlan, is_live_line, parse_live_line
from kvcheck.core.live.scenarios import LIVE_SCENARIOS

TEXTS = st.text(min_size=1, max_size=20)
NUMBERS = st.integers(0, 10**9)


@given(
    scenario=st.sampled_from(LIVE_SCENARIOS.names()),
    target=TEXTS,
    known_answers=TEXTS,
    decode=st.none() | TEXTS,
    seed=st.integers(-(10**9), 10**9),
    names=NUMBERS,
    requests=st.integers(1, 1000),
    pool=st.none() | NUMBERS,
    admin=st.integers(0, 1),
)
def test_a_line_leads_back_to_its_plan_and_needs_no_quotes(**fields: object) -> None:
    plan = LivePlan(**fields)  # type: ignore[arg-type]
    line = plan.line()
    assert is_live_line(line)
    assert parse_live_line(line) == plan
    assert shlex.split(line) == [line]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nothing:known-answers=d,target=t", "unknown scenario of a running server 'nothing'"),
        ("hicache:known-answers=d", "expected target="),
        ("hicache:known-answers=,target=t", "expected known-answers="),
        ("hicache:known-answers=d,target=t,colour=red", "unknown key 'colour'"),
        ("hicache:known-answers=d,target=t,round=-1", "round is a whole number from 0; got '-1'"),
        ("hicache:known-answers=d,target=t,seed=1-1", "seed is a whole number from 0; got '1-1'"),
        ("hicache:known-answers=d,target=t,seed=" + "9" * 30, "whole number"),
        ("hicache:known-answers=d,target=t,requests=0", "--requests: expected 1 to"),
        ("hicache:known-answers=d,target=t,concurrency=99999", "--concurrency: expected 1 to"),
    ],
)
def test_a_broken_line_says_what_is_wrong(line: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_live_line(line)
