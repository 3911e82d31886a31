"""The ordering oracle where several processes act: what one has waited for, another has not, unless a message says so.

Invariants:
- Every right history has a wrong one that differs by one edge or by who acts.
- The judge of every pair forgets nothing, so the oracle may forget only what nobody needs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from rigs.ordering_histories import RIGHT, WRONG, load, op, read, touch, write
from stress.oracles.test_ordering import LANES, UNITS, Make, clash, verdict, with_clocks

from kvcheck.core.cache.backend.backend import LaneWaited, ProcessDrained, ProcessJoined, Recorded, Submitted
from kvcheck.core.cache.events import Event
from kvcheck.core.stress.clocks import Clock, Clocks, joined
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.oracles.ordering import OrderingOracle
from kvcheck.core.stress.workload.events import ProcessActs

A, B, C, HARNESS = ProcessActs("a"), ProcessActs("b"), ProcessActs("c"), ProcessActs("")


def message(ordinal: int, lane: str = "a>b:message") -> Submitted:
    """An operation that carries a message: it touches nothing and knows what its sender knew."""
    return op(ordinal, lane)


ORDERED: dict[str, tuple[Event, ...]] = {
    "one process joins and reads": (A, load(1, 5), ProcessJoined(1), read(2, 5)),
    "joined, told, and read there": (
        *(A, load(1, 5), ProcessJoined(1), message(2)),
        *(B, ProcessJoined(2), read(3, 5)),
    ),
    "told over two hops": (
        *(A, load(1, 5), ProcessJoined(1), message(2)),
        *(B, ProcessJoined(2), message(3, "b>c:message")),
        *(C, ProcessJoined(3), read(4, 5)),
    ),
    "the message itself waits for the write": (
        *(A, load(1, 5), LaneWaited(1, "a>b:message"), message(2)),
        *(B, ProcessJoined(2), read(3, 5)),
    ),
    "the reader joined the write itself": (A, load(1, 5), B, ProcessJoined(1), read(2, 5)),
    "a lane's wait is everybody's": (A, load(1, 5), LaneWaited(1, "forward"), B, read(2, 5)),
    "a process begins with what the harness knows": (load(1, 5), ProcessJoined(1), A, read(2, 5), B, read(3, 5)),
    "the harness knows what processes know": (A, load(1, 5), ProcessJoined(1), B, op(2, "draft"), HARNESS, read(3, 5)),
    "a process that is new gets what the harness has learnt": (
        *(A, load(1, 5), ProcessJoined(1), HARNESS, op(2, "draft")),
        *(B, read(3, 5)),
    ),
    "the harness drains and starts others": (A, load(1, 5), HARNESS, ProcessDrained(), B, read(2, 5)),
    "a process goes on with what it knew": (
        *(A, load(1, 5), ProcessJoined(1), B, op(2, "draft"), A, read(3, 5)),
        *(HARNESS, A, write(4, 5)),
    ),
    "a page that was taken over with a message": (
        *(B, read(1, 5, lane="b:forward", owner=1), ProcessJoined(1), message(2, "b>a:message")),
        *(A, ProcessJoined(2), load(3, 5, owner=2)),
    ),
}

# name: the last of two ordinals and the code of the only finding, and the history
RACES: dict[str, tuple[str, int, tuple[Event, ...]]] = {
    "another process's join": ("KV201", 2, (A, load(1, 5), ProcessJoined(1), B, read(2, 5))),
    "the message was sent before the join": (
        *("KV201", 3),
        (A, load(1, 5), message(2), ProcessJoined(1), B, ProcessJoined(2), read(3, 5)),
    ),
    "the message was not read": ("KV201", 3, (A, load(1, 5), ProcessJoined(1), message(2), B, read(3, 5))),
    "the message was read too late": (
        *("KV201", 3),
        (A, load(1, 5), ProcessJoined(1), message(2), B, read(3, 5), ProcessJoined(2)),
    ),
    "the message was for somebody else": (
        *("KV201", 4),
        (A, load(1, 5), ProcessJoined(1), message(2), C, ProcessJoined(2), B, op(3, "draft"), read(4, 5)),
    ),
    "the second hop is missing": (
        *("KV201", 4),
        (
            *(A, load(1, 5), ProcessJoined(1), message(2), B, message(3, "b>c:message"), ProcessJoined(2)),
            *(C, ProcessJoined(3), read(4, 5)),
        ),
    ),
    "the harness does not tell those who are there": (
        *("KV201", 3),
        (A, op(1, "draft"), HARNESS, load(2, 5), ProcessJoined(2), A, read(3, 5)),
    ),
    "what another joined is not forgotten": (
        *("KV202", 9),
        (
            *(B, op(1, "draft"), A, load(2, 5)),
            *(event for n in range(3, 9) for event in (load(n, n), ProcessJoined(n))),
            *(B, write(9, 5)),
        ),
    ),
    "a process that comes last needs what all others have joined": (
        *("KV201", 3),
        (A, load(1, 5), ProcessJoined(1), op(2, "draft"), ProcessJoined(2), B, read(3, 5)),
    ),
    "a page that was taken over without a message": (
        *("KV202", 3),
        (B, read(1, 5, lane="b:forward", owner=1), ProcessJoined(1), A, op(2, "draft"), load(3, 5, owner=2)),
    ),
    "a status that is ahead of its data": (
        *("KV201", 3),
        (A, load(1, 5), message(2), B, ProcessJoined(2), read(3, 5)),
    ),
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_processes_were_told_is_ordered(name: str) -> None:
    assert verdict(OrderingOracle, ORDERED[name]) == []


@pytest.mark.parametrize("name", RACES)
def test_what_a_process_was_not_told_is_a_race(name: str) -> None:
    code, ordinal, events = RACES[name]
    (found,) = judge(OrderingOracle(), History.of(*events))
    assert (found.code, found.page) == (code, 5)
    assert found.minimal is not None and found.minimal["later"]["ordinal"] == ordinal  # type: ignore[index]


def test_a_write_that_all_others_joined_is_named_to_a_process_that_comes_last() -> None:
    for processes in ((A,), (A, B)):
        events: list[Event] = [replace(load(1, 5), request=7)]
        for process in processes:
            events += [process, ProcessJoined(1), op(10 + len(events), "draft"), ProcessJoined(10 + len(events))]
        (found,) = judge(OrderingOracle(), History.of(processes[0], *events, C, read(90, 5)))
        assert (found.code, found.seen_request) == ("KV201", 7)
        assert "#1" in found.message


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_one_process_is_judged_as_before_whatever_it_is_called(name: str) -> None:
    events = RIGHT[name] if name in RIGHT else WRONG[name][1]
    expected = verdict(OrderingOracle, events)
    assert verdict(OrderingOracle, (HARNESS, *events)) == expected
    assert verdict(OrderingOracle, (A, *events)) == expected
    again = [event for each in events for event in (A, each)]
    assert verdict(OrderingOracle, tuple(again)) == expected


def test_what_everybody_has_joined_is_forgotten() -> None:
    oracle = OrderingOracle()
    table = dict(oracle.handlers())
    for n in range(1, 400):
        for event in (A, load(n, n % 7), ProcessJoined(n), B, ProcessJoined(n), HARNESS, op(1000 + n, "h2d")):
            table[type(event)](event)
    clocks = oracle._clocks
    assert len(clocks._records) < 10
    assert sum(map(len, oracle._operations)) < 10


# Against a judge that looks at every pair and forgets nothing

PROCESSES = ("", "a", "b", "c")


def steps() -> st.SearchStrategy[list[tuple[int, ...]]]:
    """(verb, lane, unit, process or record): what a process may do next, or who acts."""
    return st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 2), st.integers(0, UNITS - 1), st.integers(0, 15)), max_size=22
    )


def program(rows: list[tuple[int, ...]]) -> list[Event]:
    """Events of several processes that submit, record and wait; records that they wait for exist."""
    events: list[Event] = []
    records = 0
    for verb, lane, unit, number in rows:
        if verb < 4:
            records += 1
            there = (touch(unit, layers=(0, 1)),)
            writes = verb < 2
            events.append(op(records, LANES[lane], reads=() if writes else there, writes=there if writes else ()))
        elif verb == 4:
            records += 1
            events.append(Recorded(records, LANES[lane]))
        elif verb in (5, 6, 7) and records:
            which = max(1, records - number % 6)
            events.append(LaneWaited(which, LANES[lane]) if verb == 5 else ProcessJoined(which))
        elif verb == 8 and unit == 0:
            events.append(ProcessDrained())
        elif verb > 8:
            events.append(ProcessActs(PROCESSES[number % len(PROCESSES)]))
    return events


def racing(events: list[Event]) -> set[int]:
    """Ordinals of operations that race with an earlier one: reachability over all edges, and every pair."""
    by_record: dict[int, set[int]] = {}
    lanes: dict[str, set[int]] = {lane: set() for lane in LANES}
    processes: dict[str, set[int]] = {"": set()}
    acting, found = "", set()
    operations: list[Submitted] = []
    for event in events:
        if isinstance(event, Submitted):
            before = lanes[event.lane] | processes[acting]
            found |= {event.ordinal for other in operations if other.ordinal not in before and clash(other, event)}
            operations.append(event)
            lanes[event.lane] = by_record[event.ordinal] = before | {event.ordinal}
        elif isinstance(event, Recorded):
            lanes[event.lane] = by_record[event.record] = lanes[event.lane] | processes[acting]
        elif isinstance(event, LaneWaited):
            lanes[event.lane] = lanes[event.lane] | by_record[event.record]
        elif isinstance(event, ProcessJoined):
            processes[acting] = processes[acting] | by_record[event.record]
        elif isinstance(event, ProcessDrained):
            processes[acting] = processes[acting].union(*lanes.values())
        elif isinstance(event, ProcessActs):
            acting = event.process
            processes.setdefault(acting, processes[""])
            if not acting:
                processes[""] = processes[""].union(*processes.values())
    return found


@examples(600)
@given(steps())
def test_the_oracle_agrees_with_a_judge_of_every_pair_and_process(rows: list[tuple[int, ...]]) -> None:
    events = program(rows)
    found = judge(OrderingOracle(), History.of(*events))
    assert len(found) < MAX_FINDINGS
    assert {each.minimal["later"]["ordinal"] for each in found if each.minimal} == racing(events)  # type: ignore[index]


# Broken clocks


class OneProcess(Clocks):
    """All processes are one."""

    def act(self, process: str) -> None:
        return


class NewProcessesKnowAll(Clocks):
    """A process begins with what whoever acted before knew."""

    def act(self, process: str) -> None:
        is_new = process and process not in self._others and process != self._acting
        before = self.process
        super().act(process)
        if is_new:
            self.process = before


class NewProcessesKnowNothing(Clocks):
    """A process begins with nothing."""

    def act(self, process: str) -> None:
        is_new = process and process not in self._others and process != self._acting
        super().act(process)
        if is_new:
            self.process = ()


class HarnessLearnsNothing(Clocks):
    """The harness knows only what it has waited for itself."""

    def act(self, process: str) -> None:
        known = self._others.get("")
        super().act(process)
        if not process and known is not None:
            self.process = known


class HarnessTellsAll(Clocks):
    """Whoever acts after the harness knows what it knows."""

    def act(self, process: str) -> None:
        before = self.process if not self._acting else ()
        super().act(process)
        self.process = joined(self.process, before)


class ProcessesForgetThemselves(Clocks):
    """A process that acts again begins anew."""

    def act(self, process: str) -> None:
        if process:
            self._others.pop(process, None)
        super().act(process)


class MessagesSayNothing(Clocks):
    """An operation knows its lane, and not what its process knew."""

    def advance(self, lane: int, record: int | None) -> Clock:
        process, self.process = self.process, ()
        clock = super().advance(lane, record)
        self.process = process
        return clock


class WhoeverActsForgets(Clocks):
    """What the acting process has joined is forgotten for all."""

    def known_to_all(self, lane: int) -> int:
        return self.process[lane] if lane < len(self.process) else 0


BROKEN: tuple[tuple[Make, str], ...] = (
    (with_clocks(OneProcess), "another process's join"),
    (with_clocks(NewProcessesKnowAll), "another process's join"),
    (with_clocks(HarnessLearnsNothing), "the harness knows what processes know"),
    (with_clocks(HarnessLearnsNothing), "a process that is new gets what the harness has learnt"),
    (with_clocks(HarnessTellsAll), "the harness does not tell those who are there"),
    (with_clocks(ProcessesForgetThemselves), "a process goes on with what it knew"),
    (with_clocks(MessagesSayNothing), "joined, told, and read there"),
)


@pytest.mark.parametrize(("broken", "name"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_broken_clocks_are_noticed(broken: Make, name: str) -> None:
    events = ORDERED[name] if name in ORDERED else RACES[name][2]
    assert verdict(broken, events) != verdict(OrderingOracle, events)


def test_clocks_that_forget_too_early_are_noticed() -> None:
    """What was forgotten cannot be named any more, or is not even seen."""
    with pytest.raises(StopIteration):
        verdict(with_clocks(NewProcessesKnowNothing), ORDERED["a process begins with what the harness knows"])
    assert verdict(with_clocks(WhoeverActsForgets), RACES["what another joined is not forgotten"][2]) == []
