"""What delays decide: which lane is held, what ends that, and that none of it is silent. No device takes part."""

from __future__ import annotations

import dataclasses

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.backend import Lane
from kvcheck.core.cache.backend.delays import FIRED_MOST, Delay, DelayCount, Delayer, DelayReport, DelaySite
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.stress.delay_lines import delays_of, delays_text, parse_delays
from kvcheck.core.stress.strategies import DELAYS, LANE_GROUPS

LOAD, READ = Lane(0, "hicache.h2d.0"), Lane(1, "forward")
PAIR = Delay(held=DelaySite(operation="load", nth=2), until=DelaySite(operation="read", nth=3))


class NotedHold:
    """A hold that ends when it is told to."""

    def __init__(self) -> None:
        self.is_released = self.is_over = self.is_fired = False

    def release(self) -> None:
        self.is_released = self.is_over = True

    def fire(self) -> None:
        self.is_fired = self.is_over = True

    def has_ended(self) -> bool:
        return self.is_over

    def has_fired(self) -> bool:
        return self.is_fired


def placed(delayer: Delayer, name: str, lane: Lane) -> NotedHold | None:
    """Submit: the hold that came before it, if any."""
    row = delayer.arrives(name, lane)
    if row is None:
        return None
    hold = NotedHold()
    delayer.place(row, lane, hold)
    return hold


def counts(delayer: Delayer) -> list[tuple[int, ...]]:
    return [(row.met, row.placed, row.overtaken, row.gave_way, row.fired) for row in delayer.report().rows]


def test_the_nth_operation_is_held_until_the_other_one_has_run() -> None:
    delayer = Delayer((PAIR,))
    assert placed(delayer, "load", LOAD) is None
    assert placed(delayer, "read", READ) is None
    hold = placed(delayer, "load", LOAD)
    assert hold is not None and delayer.is_holding
    assert placed(delayer, "read", READ) is None
    assert delayer.overtaking("read", READ) == ()
    assert placed(delayer, "read", READ) is None
    assert delayer.overtaking("read", READ) == (hold,)
    assert not hold.is_released, "it has been submitted, and has not run"
    delayer.overtaken(hold)
    assert hold.is_released and not delayer.is_holding
    assert counts(delayer) == [(1, 1, 1, 0, 0)]
    assert delayer.report().gap is None and delayer.report().warning is None


def test_what_is_behind_the_hold_in_its_own_lane_does_not_overtake_it() -> None:
    delayer = Delayer((Delay(held=DelaySite(operation="load"), until=DelaySite(operation="read")),))
    hold = placed(delayer, "load", LOAD)
    assert placed(delayer, "read", LOAD) is None
    assert delayer.overtaking("read", LOAD) == ()
    assert delayer.arrives("read", READ) is None
    assert delayer.overtaking("read", READ) == (hold,)


def test_a_waiting_host_lets_every_lane_go_and_the_next_operation_is_held_again() -> None:
    delayer = Delayer((Delay(held=DelaySite(lanes=LANE_GROUPS["h2d"])),))
    first = placed(delayer, "load", LOAD)
    assert first is not None
    assert placed(delayer, "load", LOAD) is None, "one hold a lane is enough"
    other = placed(delayer, "load", Lane(2, "rank1:h2d"))
    assert other is not None
    assert placed(delayer, "read", READ) is None
    delayer.give_way()
    assert first.is_released and other.is_released
    assert placed(delayer, "load", LOAD) is not None
    delayer.give_way()
    assert counts(delayer) == [(4, 3, 0, 3, 0)]


def test_a_watchdog_is_counted_told_and_is_no_order() -> None:
    delayer = Delayer((Delay(held=DelaySite(operation="load")),))
    for _ in range(FIRED_MOST):
        hold = placed(delayer, "load", LOAD)
        assert hold is not None
        hold.fire()
        assert delayer.look() == (hold,)
    assert placed(delayer, "load", LOAD) is None, "each costs its whole time, and imposes nothing"
    report = delayer.report()
    assert counts(delayer) == [(FIRED_MOST + 1, FIRED_MOST, 0, 0, FIRED_MOST)]
    assert "3 of 3 holds" in str(report.warning) and "all 3 holds" in str(report.gap)


def test_a_watchdog_that_fired_before_the_release_is_a_watchdog() -> None:
    delayer = Delayer((Delay(held=DelaySite(operation="load")),))
    hold = placed(delayer, "load", LOAD)
    assert hold is not None
    hold.fire()
    delayer.give_way()
    assert counts(delayer) == [(1, 1, 0, 0, 1)]


def test_a_delay_that_met_nothing_was_not_exercised() -> None:
    delayer = Delayer((PAIR,))
    placed(delayer, "load", LOAD)
    assert "load #2 never came" in str(delayer.report().gap)
    legs = Delayer((Delay(held=DelaySite(lanes=("storage",))), Delay(held=DelaySite(lanes=("h2d",)))))
    assert "nothing was held by lanes storage" in str(legs.report().gap)
    hold = placed(legs, "load", Lane(3, "h2d"))
    assert hold is not None
    legs.give_way()
    assert legs.report().gap is None, "a schedule need not use every leg"


def test_reports_of_several_runs_add_up_by_delay() -> None:
    other = Delay(held=DelaySite(lanes=("d2h",)))
    one = DelayReport((DelayCount(delay=PAIR, met=1, placed=1, overtaken=1),))
    two = DelayReport((DelayCount(delay=other, met=4), DelayCount(delay=PAIR, met=1, placed=1, fired=1)))
    assert one.plus(two).rows == (
        DelayCount(delay=PAIR, met=2, placed=2, overtaken=1, fired=1),
        DelayCount(delay=other, met=4),
    )
    assert one.plus(two).warning is not None


@pytest.mark.parametrize(
    "text", ["3.hicache.load~17.decode.read", "hicache.load", "hicache.load/2.storage.put", "h2d", "h2d/a.b~c.d/d2h"]
)
def test_text_and_delays_round_trip(text: str) -> None:
    assert parse_delays("2.load~3.read") == (PAIR,)
    assert delays_text(parse_delays(text)) == text
    plan = Plan(scenario="hicache", shape="llama-3-tiny", backend="cuda", device="cuda", strategy="delay", choices=text)
    assert parse_line(plan.line()) == plan
    assert delays_of(plan) == parse_delays(text)


@pytest.mark.parametrize(
    "text", ["", "0.load", "load~", "~read", "a~b~c", "2.h2d", "load//read", "x" * 99, "/".join("a" * 20)]
)
def test_another_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^strategy=delay: expected [^\n]*got [^\n]*$"):
        parse_delays(text)


def test_without_text_the_legs_go_by_with_the_schedule() -> None:
    plan = Plan(scenario="hicache", shape="llama-3-tiny", backend="cuda", device="cuda", strategy="delay")
    seen = [delays_of(dataclasses.replace(plan, schedule=number)) for number in range(len(DELAYS))]
    assert [len(delays) for delays in seen] == [1] * len(LANE_GROUPS) + [len(LANE_GROUPS)]
    assert [delays[0].held.lanes for delays in seen[:-1]] == list(LANE_GROUPS.values())
    assert delays_of(dataclasses.replace(plan, strategy="random")) == ()
    assert delays_of(dataclasses.replace(plan, backend="simulated", device="cpu")) == ()
