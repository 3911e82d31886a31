"""The ordering oracle on literal histories, against a slow judge, and on the product with a wait taken out.

Invariants:
- A history is right or wrong by its edges; no test looks at what happened to run first.
- An oracle with an edge too few, an edge too many or coarser cells gives another verdict on a named history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from rigs.ordering_histories import RIGHT, WRONG, Said, load, op, read, touch, write

from kvcheck.core.cache.backend.backend import Footprint, LaneWaited, ProcessDrained, ProcessJoined, Recorded, Submitted
from kvcheck.core.cache.events import Event, Freed
from kvcheck.core.stress.access_log import LOG_MAX, AccessLog
from kvcheck.core.stress.clocks import Clock, Clocks
from kvcheck.core.stress.history import Handler, History
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.oracles.ordering import OrderingOracle

Make = Callable[[], OrderingOracle]


def verdict(make: Make, events: tuple[Event, ...]) -> list[tuple[str, str]]:
    """Code and message of every finding."""
    return [(found.code, found.message) for found in judge(make(), History.of(*events))]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_stays_green(name: str) -> None:
    assert verdict(OrderingOracle, RIGHT[name]) == []


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
    again = tuple(
        replace(each, name="load" if n % 2 else "read")
        for n in range(1, 9)
        for each in ((load if n % 2 else read)(n, 5),)
    )
    codes = [found.code for found in judge(OrderingOracle(), History.of(*again))]
    assert codes == ["KV201", "KV202"]
    many = tuple((load if n % 2 else read)(n, 5) for n in range(1, 4 * MAX_FINDINGS))
    assert len(judge(OrderingOracle(), History.of(*many))) == MAX_FINDINGS


def test_a_read_that_checks_what_it_read_may_race_and_excuses_nobody_else() -> None:
    look = op(2, "verify", reads=(replace(touch(5), is_checked=True),))
    assert verdict(OrderingOracle, (load(1, 5), look, load(3, 5, lane="h2d"))) == []
    assert [code for code, _ in verdict(OrderingOracle, (load(1, 5), look, read(3, 5)))] == ["KV201"]
    assert [code for code, _ in verdict(OrderingOracle, (load(1, 5), look, write(3, 5)))] == ["KV202"]
    unchecked = op(2, "verify", reads=(touch(5),))
    assert [code for code, _ in verdict(OrderingOracle, (load(1, 5), unchecked))] == ["KV201"]


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
        events = (*writes, LaneWaited(last, "forward"), read(FAR_ORDINAL, *range(50)))
        found = verdict(OrderingOracle, events)
        assert bool(found) == (last != writes[-1].ordinal)


FAR_ORDINAL = 1 << 33


# Against a judge that looks at every pair

LANES, UNITS, TOKENS = ("a", "b", "c"), 3, 4


def steps() -> st.SearchStrategy[list[tuple[int, ...]]]:
    """(verb, lane, unit, start, stop or record): what a process may do next."""
    number = st.integers(0, 7)
    return st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), number, number, number), max_size=14)


def program(rows: list[tuple[int, ...]]) -> list[Event]:
    """Events of a process that submits, records and waits; records it waits for exist."""
    events: list[Event] = []
    records = 0
    for verb, lane, unit, start, stop in rows:
        if verb < 6:
            span = None if start > TOKENS - 1 else (start, min(TOKENS, max(start + 1, stop)))
            there = (touch(unit % UNITS, span=span, layers=(0, 1)),)
            records += 1
            writes = verb < 3
            events.append(op(records, LANES[lane], reads=() if writes else there, writes=there if writes else ()))
        elif verb == 6:
            records += 1
            events.append(Recorded(records, LANES[lane]))
        elif records and verb in (7, 8):
            which = 1 + (unit + start) % records
            events.append(LaneWaited(which, LANES[lane]) if verb == 7 else ProcessJoined(which))
        elif verb == 9 and unit == 0:
            events.append(ProcessDrained())
    return events


def racing(events: list[Event]) -> set[int]:
    """Ordinals of operations that race with an earlier one: reachability over all edges, and every pair."""
    by_record: dict[int, set[int]] = {}
    lanes: dict[str, set[int]] = {lane: set() for lane in LANES}
    process: set[int] = set()
    found: set[int] = set()
    operations: dict[int, Submitted] = {}
    for event in events:
        if isinstance(event, Submitted):
            before = lanes[event.lane] | process
            for other in operations.values():
                if other.ordinal not in before and clash(other, event):
                    found.add(event.ordinal)
            operations[event.ordinal] = event
            lanes[event.lane] = by_record[event.ordinal] = before | {event.ordinal}
        elif isinstance(event, Recorded):
            lanes[event.lane] = by_record[event.record] = lanes[event.lane] | process
        elif isinstance(event, LaneWaited):
            lanes[event.lane] = lanes[event.lane] | by_record[event.record]
        elif isinstance(event, ProcessJoined):
            process = process | by_record[event.record]
        elif isinstance(event, ProcessDrained):
            process = process.union(*lanes.values())
    return found


def clash(one: Submitted, other: Submitted) -> bool:
    if not (one.writes or other.writes):
        return False
    return bool(_cells(one) & _cells(other))


def _cells(event: Submitted) -> set[tuple[int, int]]:
    (footprint,) = (*event.reads, *event.writes)
    start, stop = (0, TOKENS) if footprint.spans is None else footprint.spans[0].tolist()
    return {(int(unit), token) for unit in footprint.rows for token in range(start, stop)}


@examples(300)
@given(steps())
def test_the_oracle_agrees_with_a_judge_of_every_pair(rows: list[tuple[int, ...]]) -> None:
    events = program(rows)
    found = judge(OrderingOracle(), History.of(*events))
    assert len(found) < MAX_FINDINGS
    assert {int(each.message.split("#")[1].split()[0].rstrip(")")) for each in found} == racing(events)


# Broken oracles


class ForgetsItsLane(Clocks):
    def advance(self, lane: int, record: int | None) -> Clock:
        count = self._lanes[lane][lane] if len(self._lanes[lane]) > lane else 0
        clock = super().advance(lane, record)
        self._lanes[lane] = (*(0,) * lane, count + 1)
        return clock


class ForgetsProcessJoins(Clocks):
    def process_joins(self, record: int) -> None:
        return


class ForgetsDrains(Clocks):
    def process_drains(self) -> None:
        return


class ForgetsLaneWaits(Clocks):
    def lane_waits(self, record: int, lane: int) -> None:
        return


class LaneWaitJoinsTheProcess(Clocks):
    def lane_waits(self, record: int, lane: int) -> None:
        super().lane_waits(record, lane)
        self.process_joins(record)


class LaneWaitJoinsEveryLane(Clocks):
    def lane_waits(self, record: int, lane: int) -> None:
        for each in range(len(self._lanes)):
            super().lane_waits(record, each)


class ProcessJoinDrains(Clocks):
    def process_joins(self, record: int) -> None:
        self.process_drains()


class WaitTakesTheLanesPresent(Clocks):
    """A wait covers whatever the recorded lane holds by now."""

    def _of(self, record: int) -> Clock:
        clock = super()._of(record)
        lane = next((n for n, kept in enumerate(self._kept) if any(each == record for _, each in kept)), None)
        return clock if lane is None else self._lanes[lane]


class RecordCoversItsLaneOnly(Clocks):
    def advance(self, lane: int, record: int | None) -> Clock:
        clock = super().advance(lane, record)
        if record is not None:
            self._records[record] = (*(0,) * lane, clock[lane])
        return clock


class PageLog(AccessLog):
    def touch(self, event: int, footprint: Footprint, *, over: int) -> None:
        super().touch(event, replace(footprint, spans=None), over=over)


class LayerlessLog(AccessLog):
    def touch(self, event: int, footprint: Footprint, *, over: int) -> None:
        super().touch(event, replace(footprint, layers=(0, 2)), over=over)


class NamedTokensOnly(AccessLog):
    """A whole unit is the tokens that have been named so far."""

    def _enter(self) -> None:
        super()._enter()
        self._last[:, :, -1] = 0


class FirstTouchLog(AccessLog):
    def touch(self, event: int, footprint: Footprint, *, over: int) -> None:
        if not self.latest:
            super().touch(event, footprint, over=over)


def with_clocks(kind: type[Clocks]) -> Make:
    return type(kind.__name__, (OrderingOracle,), {"clocks": kind})


def with_log(kind: type[AccessLog]) -> Make:
    return type(kind.__name__, (OrderingOracle,), {"log": kind})


class FreeIsAnEdge(OrderingOracle):
    def handlers(self) -> tuple[tuple[type, Handler], ...]:
        return (*super().handlers(), (Freed, lambda event: self._process_drained(ProcessDrained())))


class ReadersExclude(OrderingOracle):
    def _submitted(self, event: Submitted) -> None:
        super()._submitted(replace(event, writes=(*event.reads, *event.writes)))


class MixesSpaces(OrderingOracle):
    def _submitted(self, event: Submitted) -> None:
        reads, writes = (tuple(replace(row, space="full") for row in rows) for rows in (event.reads, event.writes))
        super()._submitted(replace(event, reads=reads, writes=writes))


class ForgetsReads(OrderingOracle):
    def _submitted(self, event: Submitted) -> None:
        super()._submitted(replace(event, reads=()))


class PageableIsOrdinary(OrderingOracle):
    def _submitted(self, event: Submitted) -> None:
        super()._submitted(replace(event, reads=tuple(replace(row, place=FAST) for row in event.reads)))


FAST = touch(1).place
BROKEN: tuple[tuple[Make, str], ...] = (
    (with_clocks(ForgetsItsLane), "behind a wait, later"),
    (with_clocks(ForgetsProcessJoins), "process joined"),
    (with_clocks(ForgetsDrains), "process drained"),
    (with_clocks(ForgetsLaneWaits), "waited"),
    (with_clocks(LaneWaitJoinsTheProcess), "a lane's wait does not join the process"),
    (with_clocks(LaneWaitJoinsEveryLane), "the wrong lane waits"),
    (with_clocks(ProcessJoinDrains), "the process joined another lane"),
    (with_clocks(WaitTakesTheLanesPresent), "recorded too early"),
    (with_clocks(RecordCoversItsLaneOnly), "waits compose"),
    (with_clocks(RecordCoversItsLaneOnly), "a record covers what its lane waited for"),
    (with_log(PageLog), "append beside a backup"),
    (with_log(LayerlessLog), "a layer at a time"),
    (with_log(NamedTokensOnly), "the whole page, then a row that nobody had named"),
    (with_log(FirstTouchLog), "the last layer"),
    (FreeIsAnEdge, "reuse without an edge"),
    (ReadersExclude, "two readers"),
    (MixesSpaces, "another space"),
    (ForgetsReads, "no wait"),
    (ForgetsReads, "reuse without an edge"),
    (PageableIsOrdinary, "pageable source"),
    (PageableIsOrdinary, "pageable source, still being written"),
)


@pytest.mark.parametrize(("broken", "name"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_oracle_is_noticed(broken: Make, name: str) -> None:
    events = RIGHT[name] if name in RIGHT else WRONG[name][1]
    assert verdict(broken, events) != verdict(OrderingOracle, events)
