"""A comparison of servers whose times are given: who is asked when, what is told apart, and what is no measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rigs.live_client import ALPHABET, PARAMETERS
from rigs.timed_client import TimedClient

from kvcheck.core.base.record import Verdict
from kvcheck.core.base.server_facts import FIRST_TOKEN, NEXT_TOKEN, SERVE_CASES, THROUGHPUT
from kvcheck.core.live import health
from kvcheck.core.live.exchange import Answer, End, Sending
from kvcheck.core.live.prices import bench as bench_module
from kvcheck.core.live.prices import side as side_module
from kvcheck.core.live.prices.bench import LoadedServer, ServeBench
from kvcheck.core.live.prices.load import FRESH, SHARED, ServingLoad
from kvcheck.core.live.prices.side import Side
from kvcheck.core.report.prices import ALIKE, NO_MEASUREMENT, verdict

LOAD = ServingLoad(kind=SHARED, requests=8, concurrency=1, prompt=96, answer=6, seed=5)
WHY = "its time was up"


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(health, "PAUSE_S", 0.0)


def side(client: TimedClient, *, admin: bool = False) -> Side:
    return Side(client, client.served(), ALPHABET, longest=PARAMETERS.length, timeout_s=5.0, admin=admin)


def two(
    target: TimedClient, versus: TimedClient | None = None, *, load: ServingLoad = LOAD, admin: bool = False
) -> ServeBench:
    """Two servers, or one that is named twice."""
    first = side(target, admin=admin)
    second = first if versus is None else side(versus, admin=admin)
    arms = {
        "baseline": LoadedServer(name="target", side=first, load=load),
        "arm": LoadedServer(name="versus", side=second, load=load),
    }
    return ServeBench(**arms, names=9, shape="llama", device="scripted", is_reuse=False)


def one(client: TimedClient, *, load: ServingLoad = LOAD) -> ServeBench:
    """One server, without and with reuse."""
    only = side(client)
    return ServeBench(
        baseline=LoadedServer(name="fresh", side=only, load=replace(load, kind=FRESH)),
        arm=LoadedServer(name="reuse", side=only, load=load),
        names=9,
        shape="llama",
        device="scripted",
        is_reuse=True,
    )


def ran(bench: ServeBench, rounds: int = 6) -> ServeBench:
    bench.begin()
    goes_on = bench.warm_up(until=None, told=lambda name, answered: None)
    while goes_on and len(bench.rounds.times) < rounds:
        goes_on = bench.add_round(until=None, told=lambda name, answered: None)
    bench.end()
    return bench


def verdicts(bench: ServeBench) -> dict[str, Verdict]:
    return {row.id: row.verdict for row in bench.results(WHY)}


def reason(bench: ServeBench, row: str) -> str:
    return next(each.reason or "" for each in bench.results(WHY) if each.id == row)


def told(bench: ServeBench) -> dict[str, str]:
    return {row.case: verdict(row, None) for row in bench.rows()}


def test_a_server_that_takes_half_as_long_again_is_slower_by_so_much() -> None:
    slow = TimedClient(prompt_s=0.0015, token_s=0.015, noise=0.05, seed=4)
    bench = ran(two(TimedClient(noise=0.05), slow), 15)
    assert told(bench) == dict.fromkeys(SERVE_CASES, "slower")
    for row in bench.rows():
        assert row.ratio.lo is not None and row.ratio.hi is not None
        assert row.ratio.lo <= 1.5 <= row.ratio.hi
    assert set(verdicts(bench).values()) == {Verdict.PASS}


@pytest.mark.parametrize("is_one", [True, False], ids=["one server twice", "two servers"])
def test_equal_servers_are_not_told_apart(is_one: bool) -> None:
    bench = ran(two(TimedClient(noise=0.1), None if is_one else TimedClient(noise=0.1, seed=2)), 8)
    assert told(bench) == dict.fromkeys(SERVE_CASES, ALIKE)
    assert set(verdicts(bench).values()) == {Verdict.PASS}


def test_reuse_saves_the_prompt_and_not_the_answer() -> None:
    bench = ran(one(TimedClient(noise=0.01)), 7)
    assert told(bench) == {THROUGHPUT: "faster", FIRST_TOKEN: "faster", NEXT_TOKEN: ALIKE}
    shares = {name: bench.rounds.cached_share(name) for name in ("fresh", "reuse")}
    assert shares["fresh"] == 0.0 and shares["reuse"] is not None and shares["reuse"] > 0.5
    assert bench.why_no_measurement() is None
    seen = bench.tallies["reuse"].evidence.observed
    # 8 timed requests and the warm prompts: 15 passes, the first of them thrown away as a price and judged all the same
    assert bench.tallies["reuse"].evidence.schedules == 15 and seen["hit"] >= 8 * 15 and seen["token"] > 0


def test_without_hits_there_is_no_price_of_reuse() -> None:
    bench = ran(one(TimedClient(has_cache=False)))
    assert verdicts(bench)[THROUGHPUT] is Verdict.UNKNOWN and verdicts(bench)["integrity/reuse"] is Verdict.PASS
    assert "hit: 0 of 1" in reason(bench, THROUGHPUT) and "start it with a cache" in reason(bench, THROUGHPUT)
    assert told(bench) == dict.fromkeys(SERVE_CASES, NO_MEASUREMENT)
    silent = ran(one(TimedClient(says_cached=False)))
    assert "does not say" in reason(silent, FIRST_TOKEN)


def test_a_load_without_reuse_that_hits_the_cache_is_no_control() -> None:
    bench = ran(one(TimedClient(changed=lambda _, answer: replace(answer, cached=16), page=96)))
    assert "share nothing was cached" in reason(bench, THROUGHPUT)


def wrong_token(client: TimedClient, at: int) -> Callable[[Sending, Answer], Answer]:
    """From the request `at` on, the last two tokens are others."""

    def changed(sending: Sending, answer: Answer) -> Answer:
        tokens = answer.tokens
        return answer if len(client.asked) < at else replace(answer, tokens=(*tokens[:-2], 7, 7))

    return changed


@pytest.mark.parametrize("at", [8, 15, 60], ids=["in the warm-up", "in the first round", "later"])
def test_a_wrong_token_is_a_finding_and_no_price_is_left(at: int) -> None:
    bad = TimedClient()
    bad.changed = wrong_token(bad, at)
    bench = ran(two(TimedClient(), bad), 20)
    assert verdicts(bench)["integrity/versus"] is Verdict.FAIL and verdicts(bench)["integrity/target"] is Verdict.PASS
    assert [verdicts(bench)[case] for case in SERVE_CASES] == [Verdict.UNKNOWN] * 3
    wrong = bench.tallies["versus"].wrong_tokens
    assert wrong > 0 and reason(bench, THROUGHPUT) == f"not a measurement: {wrong} wrong tokens"
    assert all(verdict(row, None) == NO_MEASUREMENT and row.note == reason(bench, THROUGHPUT) for row in bench.rows())
    finding = bench.take_findings()[0]
    assert (finding.code[:3], finding.cell, bench.take_findings()) == ("KV8", "integrity/versus", [])
    # nothing is sent after the pass that was wrong
    assert len(bad.asked) < at + 12


def test_a_server_that_died_is_a_finding_and_is_asked_no_more() -> None:
    dead = TimedClient(alive=False)
    gone = {"end": End.UNREACHED, "tokens": (), "reason": "connection refused"}
    dead.changed = lambda _, answer: replace(answer, **gone) if len(dead.asked) == 40 else answer  # type: ignore[arg-type]
    bench = ran(two(TimedClient(), dead), 6)
    assert bench.is_over and [finding.code for finding in bench.findings] == ["KV806"]
    assert reason(bench, THROUGHPUT) == "not a measurement: KV806"


def test_two_servers_are_never_asked_at_the_same_time() -> None:
    order: list[str] = []
    target, versus = TimedClient(name="target", entered=order.append), TimedClient(name="versus", entered=order.append)
    ran(two(target, versus, load=replace(LOAD, concurrency=4)), 2)
    # one cold request each, then passes of 8 timed requests, 2 warm prompts and the warm test
    runs = [order[0], order[1], *(order[at] for at in range(2, len(order), 11))]
    assert order == [runs[0], runs[1], *(name for name in runs[2:] for _ in range(11))]
    assert runs[:4] == ["target", "versus", "target", "versus"]  # the warm-up
    assert runs[4:].count("target") == 2 * runs[4:].count("versus") == 8  # target twice, since it is the control too


def test_counters_of_a_server_are_its_arms_alone_and_of_one_server_both() -> None:
    apart = ran(two(TimedClient(), TimedClient()), 2)
    assert all(tally.evidence.observed["evict"] > 0 for tally in apart.tallies.values())
    both = ran(two(TimedClient()), 2)
    assert not any("evict" in tally.evidence.observed for tally in both.tallies.values())
    assert "of target and versus together: evict" in both.notes[0]


def test_a_round_that_the_time_cut_is_left_out() -> None:
    bench = two(TimedClient())
    bench.begin()
    assert bench.warm_up(until=None, told=lambda name, answered: None)
    assert not bench.add_round(until=0.0, told=lambda name, answered: None)
    assert bench.rounds.times == [] and bench.why_no_measurement() is None


def test_a_client_that_is_busy_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("kvcheck itself" in note for note in ran(two(TimedClient()), 0).notes)
    monkeypatch.setattr(bench_module, "MOST_BUSY", -1.0)
    assert any("kvcheck itself took" in note for note in ran(two(TimedClient()), 1).notes)
