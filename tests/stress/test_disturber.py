"""The disturber does legal things only, aims at what it has reached least, and counts what has happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rigs.situations import StillEngine

from kvcheck.core.base.situations import Situation, never_reached
from kvcheck.core.stress.scenarios.disturber import ABORTED_SHARE, MOST, PACE, Disturber
from kvcheck.core.stress.scenarios.rivals import Rival
from kvcheck.core.stress.scenarios.serving import Feed
from kvcheck.core.stress.targets.target import Standing
from kvcheck.core.stress.workload.events import Aborted, Event, Happened
from kvcheck.core.stress.workload.jobs import session_jobs

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
    engine = StillEngine([Standing("room", "arrived", 1)])
    legal = (Situation("room", "arrived", "copy"),)
    run(Disturber(legal, lambda event: None, start=0, requests=100, spared=lambda name: name == 1), engine)
    assert not engine.done, "nor are their rooms touched"


def test_two_schedules_begin_with_different_situations() -> None:
    first = []
    for start in range(3):
        engine = StillEngine(QUEUE)
        run(Disturber(LEGAL, lambda event: None, start=start, requests=100), engine, rounds=3)
        first += [(what, standing.state) for what, standing in engine.done]
    assert len(set(first)) == 3


def test_what_no_scenario_of_a_run_can_reach_is_not_missed() -> None:
    missed = never_reached(["retract-resume"], {"request/running/abort": 2})
    assert Situation("request", "running", "preempt") in missed
    assert Situation("request", "running", "abort") not in missed
    assert all(each.subject == "request" for each in missed)


# What it does no more, and what it leaves to rivals


def test_what_has_happened_often_is_not_aimed_at() -> None:
    only = (Situation("prefix", "in use", "pressure"), Situation("prefix", "on the host", "evict"))
    engine = StillEngine([Standing(each.subject, each.state, each.state) for each in only])
    told: list[Event] = []
    acts = Disturber(only, told.append, start=0, requests=8)
    noted = acts.noting(told.append)
    for _ in range(MOST - 1):
        noted(Happened("prefix", "in use", "pressure"))
    run(acts, engine)
    assert Counter(what for what, _ in engine.done) == {"pressure": 1, "evict": MOST}
    assert len(told) == 2 * MOST, "noted events are passed on"


def rival(request: int, shared: int, chain: str = "abcd", of: int = 1) -> Rival:
    (made,) = session_jobs(1, 8, requests=1, sessions=1, seed=1)
    job = replace(made, request=request)
    return Rival(job=job, of=of, chain=tuple(chain), shared=shared)


def sent(situation: Situation, standings: list[Standing], *rivals: Rival) -> list[int]:
    """The rivals that are sent while an engine stands still."""
    acts = Disturber((situation,), lambda event: None, start=0, requests=8, rivals=rivals)
    asked = [acts(StillEngine(standings)) for _ in range(30)]
    return [each for each in asked if each is not None]


def test_a_rival_is_sent_when_its_lookup_goes_through_the_prefix() -> None:
    loaded = [Standing("prefix", "being loaded", "b")]
    match = Situation("prefix", "being loaded", "match")
    assert sent(match, loaded, rival(7, 1), rival(8, 2), rival(9, 4), rival(10, 3, chain="xyz")) == [8, 9]
    assert sent(match, [Standing("prefix", "in use", "b")], rival(8, 2)) == []


def test_a_rival_is_sent_when_its_lookup_ends_inside_the_prefix() -> None:
    split = Situation("prefix", "being loaded", "split")
    inner = [Standing("prefix", "in use", "a"), Standing("prefix", "being loaded", "d")]
    assert sent(split, inner, rival(6, 0), rival(7, 1), rival(8, 2), rival(9, 3), rival(10, 4)) == [8, 9]


def test_a_rival_is_sent_while_what_it_shares_is_read_from_the_store() -> None:
    match = Situation("object", "being read", "match")
    standings = [Standing("request", "fetching", 3), Standing("object", "being read", "ff")]
    assert sent(match, standings, rival(7, 2), rival(8, 0, of=3), rival(9, 1, of=3)) == [9]


def test_each_rival_is_sent_once_and_the_others_are_held() -> None:
    acts = Disturber(
        (Situation("prefix", "in use", "match"),),
        lambda event: None,
        start=0,
        requests=8,
        rivals=[rival(7, 1), rival(8, 1, chain="x")],
    )
    assert acts.held == {7, 8}
    run(acts, StillEngine([Standing("prefix", "in use", "a")]))
    assert acts.held == {8}


def test_what_is_held_comes_when_it_is_asked_for_or_at_the_end() -> None:
    jobs = tuple(rival(request, 0).job for request in (1, 2, 3, 4))
    feed = Feed(jobs, hurry=1, held={2, 4})
    assert [each.request_id for each in feed.due(is_idle=True)] == [1, 3]
    assert feed.holds(2) and feed.release(2).is_urgent and not feed.holds(2)
    assert feed.is_open and feed.due(is_idle=False) == []
    assert [each.request_id for each in feed.due(is_idle=True)] == [4] and not feed.is_open


TIMED = (Situation("request", "sealing", "time out"), Situation("request", "asked for", "time out"))


def test_a_clock_runs_ahead_once() -> None:
    engine = StillEngine([Standing("request", "sealing", 1), Standing("request", "asked for", 2)])
    run(Disturber(TIMED, lambda event: None, start=0, requests=100), engine)
    assert [what for what, _ in engine.done] == ["time out"]


def test_states_that_are_soon_over_are_met_in_any_round() -> None:
    for state, rounds in (("restoring", 1), ("running", PACE)):
        engine = StillEngine([Standing("request", state, 1)])
        legal = (Situation("request", state, "preempt"),)
        disturber = Disturber(legal, lambda event: None, start=0, requests=100)
        run(disturber, engine, rounds=rounds - 1)
        assert not engine.done
        run(disturber, engine, rounds=1)
        assert len(engine.done) == 1


def test_an_abort_is_kept_for_what_the_scenario_is_about() -> None:
    legal = tuple(Situation("request", state, "abort") for state in ("joined", "handing over", "restoring"))
    early = [Standing("request", "joined", 1), Standing("request", "handing over", 2)]
    late = Standing("request", "restoring", 3)
    disturber = Disturber(legal, lambda event: None, start=0, requests=4, focus=("request/restoring/abort",))
    engine = StillEngine(early)
    run(disturber, engine)
    assert not engine.done, "one abort is all that there is"
    engine = StillEngine([*early, late])
    run(disturber, engine)
    assert engine.done == [("abort", late)]


def test_one_abort_more_than_a_scenario_aims_at_goes_to_another_state() -> None:
    states = ("restoring", "retracted", "joined", "running")
    legal = tuple(Situation("request", state, "abort") for state in states)
    focus = ("request/restoring/abort", "request/retracted/abort")
    third = set()
    for start in range(8):
        engine = StillEngine([Standing("request", state, number) for number, state in enumerate(states, 1)])
        run(Disturber(legal, lambda event: None, start=start, requests=8, focus=focus), engine)
        done = [standing.state for _, standing in engine.done]
        assert len(done) == 3 and {"restoring", "retracted"} < set(done)
        third |= {*done} - {"restoring", "retracted"}
    assert third == {"joined", "running"}
