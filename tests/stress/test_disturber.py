"""The disturber does legal things only, aims at what it has reached least, and counts what has happened."""

from __future__ import annotations

from collections import Counter

from rigs.situations import StillEngine

from kvcheck.core.base.situations import PAIR, SITUATIONS, STATES, TREE, Situation, never_reached, situations_of
from kvcheck.core.stress.scenarios.disturber import ABORTED_SHARE, CAUSED, Disturber
from kvcheck.core.targets.target import Standing
from kvcheck.core.workload.events import Aborted, Event, Happened

LEGAL = (
    Situation("request", "running", "abort"),
    Situation("request", "running", "preempt"),
    Situation("request", "waiting", "abort"),
)
QUEUE = tuple(Standing("request", state, at) for at, state in enumerate(("running", "waiting") * 4, 1))


def run(disturber: Disturber, engine: StillEngine, rounds: int = 60) -> None:
    for _ in range(rounds):
        disturber(engine)


def test_it_does_each_legal_thing_before_it_does_one_again() -> None:
    events: list[Event] = []
    engine = StillEngine(QUEUE)
    run(Disturber(LEGAL, events.append, start=0, requests=100), engine, rounds=9)
    assert Counter((what, standing.state) for what, standing in engine.done) == {
        ("abort", "running"): 1,
        ("preempt", "running"): 1,
        ("abort", "waiting"): 1,
    }
    assert [each for each in events if isinstance(each, Happened)] == [
        Happened(standing.subject, standing.state, what) for what, standing in engine.done
    ]
    aborted = [standing.name for what, standing in engine.done if what == "abort"]
    assert [each.request for each in events if isinstance(each, Aborted)] == aborted


def test_it_aborts_one_request_in_four_at_most() -> None:
    engine = StillEngine(QUEUE)
    run(Disturber(LEGAL, lambda event: None, start=1, requests=8), engine)
    assert sum(what == "abort" for what, _ in engine.done) == 8 // ABORTED_SHARE


def test_what_could_not_be_done_is_not_counted() -> None:
    events: list[Event] = []
    engine = StillEngine(QUEUE, is_able=False)
    run(Disturber(LEGAL, events.append, start=0, requests=100), engine)
    assert not events


def test_spared_requests_are_left_alone() -> None:
    engine = StillEngine(QUEUE)
    run(Disturber(LEGAL, lambda event: None, start=0, requests=100, spared=lambda name: name != 3), engine)
    assert {standing.name for _, standing in engine.done} == {3}


def test_two_schedules_begin_with_different_situations() -> None:
    first = []
    for start in range(3):
        engine = StillEngine(QUEUE)
        run(Disturber(LEGAL, lambda event: None, start=start, requests=100), engine, rounds=3)
        first += [(what, standing.state) for what, standing in engine.done]
    assert len(set(first)) == 3


def test_every_row_of_the_table_belongs_to_some_scenario_and_has_a_key_of_its_own() -> None:
    rows = [(state.subject, state.name, what) for state in STATES for what in state.happenings]
    assert len(SITUATIONS) == len(rows)
    assert all(scenarios and scenarios <= PAIR | TREE for state in STATES for scenarios in state.happenings.values())


def test_each_scenario_has_something_that_can_be_done() -> None:
    for name in PAIR | TREE:
        assert any(each.happening in CAUSED for each in situations_of(name))


def test_what_no_scenario_of_a_run_can_reach_is_not_missed() -> None:
    missed = never_reached(["retract-resume"], {"request/running/abort": 2})
    assert Situation("request", "running", "preempt") in missed
    assert Situation("request", "running", "abort") not in missed
    assert all(each.subject == "request" for each in missed)
