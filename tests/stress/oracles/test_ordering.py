"""The ordering oracle on literal histories, of one process and of several, and against a slow judge.

A history is right or wrong by its edges; no test looks at what happened to run first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from rigs.ordering_histories import RIGHT, WRONG, Said, load, op, read, touch, write

from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import Footprint, LaneWaited, ProcessDrained, ProcessJoined, Recorded, Submitted
from kvcheck.core.stress.access_log import LOG_MAX
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.oracles.ordering import OrderingOracle
from kvcheck.core.stress.workload.events import Event, ProcessActs


def verdict(*events: Event) -> list[tuple[str, str]]:
    """Code and message of every finding."""
    return [(found.code, found.message) for found in judge(OrderingOracle(), History.of(*events))]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_stays_green(name: str) -> None:
    assert verdict(*RIGHT[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_missing_edge_is_named(name: str) -> None:
    (code, request, seen, page, row, end), events = WRONG[name]
    (found,) = judge(OrderingOracle(), History.of(*events))
    said: Said = (found.code, found.request, found.seen_request, found.page or 0, found.row, found.message[-len(end) :])
    assert said == (code, request, seen, page, row, end)
    assert (found.oracle, found.lane) == ("ordering", end.split()[0])


def test_the_message_names_both_operations_the_place_and_the_edge() -> None:
    last_page = Footprint("full", ("latent",), (1, 2), np.array([5]), np.array([[0, 3]]), np.array([7]))
    append = Footprint("full", ("latent",), (0, 2), np.array([4, 5]), np.array([[0, 4], [2, 4]]), np.array([8, 9]))
    events = (
        Submitted(1, "offload.save", "d2h", (last_page,), (), 1, 7),
        Submitted(2, "decode.write", "forward", (), (append,), 2),
    )
    (found,) = judge(OrderingOracle(), History.of(*events))
    assert found.message == (
        "decode.write (forward #2 for request 9) writes full.latent, layer 1, page 5, row 2 (device), which "
        "offload.save (d2h #1 for request 7) reads: forward does not wait for d2h #1"
    )
    assert (found.tier, found.buffer, found.layer, found.request, found.seen_request) == ("device", "latent", 1, 9, 7)


@pytest.mark.parametrize(
    ("space", "tier", "words"),
    [
        ("host.full", "host", "page 3"),
        ("host.offload", "host", "value 3"),
        ("storage.full", "storage", "page 3"),
        ("hosted", "device", "page 3"),
        ("state", "device", "slot 3"),
        ("metadata-prefill", "device", "slot 3"),
        ("table", "device", "row 3, column 1"),
    ],
)
def test_tier_and_place_come_from_the_space(space: str, tier: str, words: str) -> None:
    there = touch(3, space=space, span=(1, 2) if space == "table" else None)
    (found,) = judge(OrderingOracle(), History.of(op(1, "a", writes=(there,)), op(2, "b", reads=(there,))))
    assert found.tier == tier
    assert f"{words} and 1 more cells ({tier})" in found.message


def test_a_request_of_the_operation_stands_in_where_the_footprint_names_none() -> None:
    events = (replace(load(1, 5), request=3), replace(read(2, 5), request=4))
    (found,) = judge(OrderingOracle(), History.of(*events))
    assert (found.request, found.seen_request) == (4, 3)


def test_what_is_compared_is_counted_row_by_row_and_other_lane() -> None:
    oracle = OrderingOracle()
    judge(oracle, History.of(write(1, 5, 6), read(2, 5, 6)))
    assert oracle.judged == 0, "one lane has nothing to be compared with"
    judge(oracle, History.of(ProcessDrained(), load(3, 5, 6, 7), read(4, 5)))
    assert oracle.judged == 2 * 3 + 1, "a write with the forward lane's writes and reads, a read with the load's writes"


def test_the_same_race_is_told_once_and_more_of_the_same_is_not_listed() -> None:
    again = [replace((load if n % 2 else read)(n, 5), name="load" if n % 2 else "read") for n in range(1, 9)]
    codes = [found.code for found in judge(OrderingOracle(), History.of(*again))]
    assert codes == ["KV201", "KV202"]
    many = tuple((load if n % 2 else read)(n, 5) for n in range(1, 4 * MAX_FINDINGS))
    assert len(judge(OrderingOracle(), History.of(*many))) == MAX_FINDINGS


def test_a_read_that_checks_what_it_read_may_race_and_excuses_nobody_else() -> None:
    look = op(2, "verify", reads=(replace(touch(5), is_checked=True),))
    assert verdict(load(1, 5), look, load(3, 5, lane="h2d")) == []
    assert [code for code, _ in verdict(load(1, 5), look, read(3, 5))] == ["KV201"]
    assert [code for code, _ in verdict(load(1, 5), look, write(3, 5))] == ["KV202"]
    unchecked = op(2, "verify", reads=(touch(5),))
    assert [code for code, _ in verdict(load(1, 5), unchecked)] == ["KV201"]


def test_a_page_list_that_changes_later_is_judged_as_it_was() -> None:
    pages = np.array([5, 6])
    first = Footprint("full", ("latent",), (0, 1), pages[:1])
    oracle = OrderingOracle()
    for kind, handler in oracle.handlers():
        if kind is Submitted:
            handler(op(1, "h2d", writes=(first,)))
            pages[0] = 9
            handler(op(2, "forward", reads=(touch(5, layers=(0, 1)),)))
            handler(op(3, "forward", reads=(touch(9, layers=(0, 1)),)))
    assert [found.page for found in oracle.findings] == [5]


def test_a_long_history_without_joins_keeps_what_it_needs() -> None:
    writes = tuple(load(n, n % 50, span=(n % 4, n % 4 + 1)) for n in range(1, 3 * LOG_MAX))
    for last in (writes[-1].ordinal, writes[-60].ordinal):
        events = (*writes, LaneWaited(last, "forward"), read(1 << 33, *range(50)))
        found = verdict(*events)
        assert bool(found) == (last != writes[-1].ordinal)


# Several processes

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
        "KV201",
        3,
        (A, load(1, 5), message(2), ProcessJoined(1), B, ProcessJoined(2), read(3, 5)),
    ),
    "the message was not read": ("KV201", 3, (A, load(1, 5), ProcessJoined(1), message(2), B, read(3, 5))),
    "the message was read too late": (
        "KV201",
        3,
        (A, load(1, 5), ProcessJoined(1), message(2), B, read(3, 5), ProcessJoined(2)),
    ),
    "the message was for somebody else": (
        "KV201",
        4,
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
        "KV201",
        3,
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
        "KV201",
        3,
        (A, load(1, 5), ProcessJoined(1), op(2, "draft"), ProcessJoined(2), B, read(3, 5)),
    ),
    "a page that was taken over without a message": (
        "KV202",
        3,
        (B, read(1, 5, lane="b:forward", owner=1), ProcessJoined(1), A, op(2, "draft"), load(3, 5, owner=2)),
    ),
    "a status that is ahead of its data": ("KV201", 3, (A, load(1, 5), message(2), B, ProcessJoined(2), read(3, 5))),
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_processes_were_told_is_ordered(name: str) -> None:
    assert verdict(*ORDERED[name]) == []


@pytest.mark.parametrize("name", RACES)
def test_what_a_process_was_not_told_is_a_race(name: str) -> None:
    code, ordinal, events = RACES[name]
    (found,) = judge(OrderingOracle(), History.of(*events))
    assert (found.code, found.page, later_of(found)) == (code, 5, ordinal)


def later_of(finding: Finding) -> int:
    assert finding.minimal is not None
    return int(finding.minimal["later"]["ordinal"])  # type: ignore[index]


@pytest.mark.parametrize("processes", [(A,), (A, B)], ids=["one", "two"])
def test_a_write_that_all_others_joined_is_named_to_a_process_that_comes_last(processes: tuple[Event, ...]) -> None:
    events: list[Event] = [processes[0], replace(load(1, 5), request=7)]
    for n, process in enumerate(processes):
        events += [process, ProcessJoined(1), op(10 + n, "draft"), ProcessJoined(10 + n)]
    (found,) = judge(OrderingOracle(), History.of(*events, C, read(90, 5)))
    assert (found.code, found.seen_request) == ("KV201", 7) and "#1" in found.message


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_one_process_is_judged_as_before_whatever_it_is_called(name: str) -> None:
    events = RIGHT[name] if name in RIGHT else WRONG[name][1]
    expected = verdict(*events)
    assert verdict(HARNESS, *events) == expected
    assert verdict(A, *events) == expected
    again = [event for each in events for event in (A, each)]
    assert verdict(*again) == expected


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

LANES, UNITS, TOKENS = ("a", "b", "c"), 3, 4
PROCESSES = ("", "a", "b", "c")


def steps() -> st.SearchStrategy[list[tuple[int, ...]]]:
    """(verb, lane, unit, process or record, start, stop): what a process may do next, or who acts."""
    number = st.integers(0, 7)
    return st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 2), st.integers(0, UNITS - 1), st.integers(0, 15), number, number),
        max_size=22,
    )


def program(rows: list[tuple[int, ...]]) -> list[Event]:
    """Events of several processes that submit, record and wait; records that they wait for exist."""
    events: list[Event] = []
    records = 0
    for verb, lane, unit, number, start, stop in rows:
        if verb < 4:
            records += 1
            span = None if start >= TOKENS else (start, min(TOKENS, max(start + 1, stop)))
            there = (touch(unit, span=span, layers=(0, 1)),)
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


def clash(one: Submitted, other: Submitted) -> bool:
    return bool(one.writes or other.writes) and bool(_cells(one) & _cells(other))


def _cells(event: Submitted) -> set[tuple[int, int]]:
    (footprint,) = (*event.reads, *event.writes)
    start, stop = (0, TOKENS) if footprint.spans is None else footprint.spans[0].tolist()
    return {(int(unit), token) for unit in footprint.rows for token in range(start, stop)}


@examples(800)
@given(steps())
def test_the_oracle_agrees_with_a_judge_of_every_pair(rows: list[tuple[int, ...]]) -> None:
    events = program(rows)
    found = judge(OrderingOracle(), History.of(*events))
    assert len(found) < MAX_FINDINGS
    assert {later_of(each) for each in found} == racing(events)
