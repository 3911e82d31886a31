"""Litmus programs: the smallest runs in which one rule of a backend can be seen, each with its allowed outcomes.

Invariants:
- A program asks nothing of a machine but the Backend Protocol; what it saw comes back as a short string.
- `allowed` is exact: everything in it can happen on `simulated`, and nothing else may happen on any backend.
- Lanes are called a, b and c; the caller is the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from litmus.rig import Rig, copy

from kvcheck.core.cache.backend.backend import ChunkWork, Place

UNTOUCHED = -1
"""What a result holds until the program writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Litmus:
    """One program. `rule`: the heading in SEMANTICS.md that it belongs to."""

    rule: str
    program: Callable[[Rig], str]
    allowed: frozenset[str]

    @property
    def name(self) -> str:
        return self.program.__name__


# Lanes and waits.


def lane_is_fifo(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    rig.store("a", x, 1)
    rig.copy("a", x, out)
    rig.store("a", x, 2)
    return rig.outcome(out)


def lanes_are_unordered(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    rig.store("a", x, 1)
    rig.copy("b", x, out)
    return rig.outcome(out)


def after_orders_two_lanes(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    written = rig.store("a", x, 1)
    rig.copy("b", x, out, after=[written])
    return rig.outcome(out)


def wait_joins_one_lane(rig: Rig) -> str:
    x, out_b, out_c = rig.cells(0), rig.cells(UNTOUCHED), rig.cells(UNTOUCHED)
    written = rig.store("a", x, 1)
    rig.wait(written, "b")
    rig.copy("b", x, out_b)
    rig.copy("c", x, out_c)
    return rig.outcome(out_b, out_c)


def waits_compose(rig: Rig) -> str:
    x, y, out = rig.cells(0), rig.cells(0), rig.cells(UNTOUCHED)
    written = rig.store("a", x, 1)
    passed = rig.store("b", y, 1, after=[written])
    rig.copy("c", x, out, after=[passed])
    return rig.outcome(out)


# Signals.


def never_recorded_does_not_wait(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    signal = rig.backend.signal()
    is_reached = rig.backend.query(signal)
    rig.backend.wait(signal)
    rig.wait(signal, "b")
    rig.copy("b", x, out)
    rig.store("a", x, 1)
    rig.record(signal, "a")
    return f"{is_reached} {rig.outcome(out)}"


def record_covers_what_is_queued(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    signal = rig.backend.signal()
    rig.store("a", x, 1)
    rig.record(signal, "a")
    rig.store("a", x, 2)
    rig.wait(signal, "b")
    rig.copy("b", x, out)
    return rig.outcome(out)


def wait_binds_when_called(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    signal = rig.backend.signal()
    rig.store("a", x, 1)
    rig.record(signal, "a")
    rig.wait(signal, "b")
    rig.copy("b", x, out)
    rig.record(signal, "c")  # nothing is queued in c: a wait that looked later would find this one reached
    return rig.outcome(out)


def wait_ignores_a_later_record(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    signal = rig.backend.signal()
    rig.store("a", x, 1)
    rig.record(signal, "a")
    rig.wait(signal, "b")
    rig.copy("b", x, out)
    rig.record(signal, "b")  # a wait that looked later would wait for itself
    return rig.outcome(out)


def rerecord_moves_the_signal(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    signal = rig.backend.signal()
    rig.store("a", x, 1)
    rig.record(signal, "a")
    rig.store("a", x, 2)
    rig.record(signal, "a")
    rig.wait(signal, "b")
    rig.copy("b", x, out)
    return rig.outcome(out)


def rerecord_forgets_the_first_lane(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    signal = rig.backend.signal()
    rig.store("a", x, 1)
    rig.record(signal, "a")
    rig.record(signal, "c")
    rig.wait(signal, "b")
    rig.copy("b", x, out)
    return rig.outcome(out)


def query_is_never_early(rig: Rig) -> str:
    x, pinned = rig.cells(1), rig.host_cell("pinned", 0, Place.PINNED)
    copied = rig.copy("a", x, pinned)
    rig.hold("host")
    # Only a True promises anything: after a False the copy may land before the host can look.
    return f"reached {pinned.item()}" if rig.backend.query(copied) else "pending"


# What a copy reads, and when.


def pinned_source_is_read_late(rig: Rig) -> str:
    pinned, out = rig.host_cell("pinned", 1, Place.PINNED), rig.cells(UNTOUCHED)
    rig.copy("a", pinned, out)
    rig.hold("host")
    pinned.fill_(2)
    return rig.outcome(out)


def pinned_source_is_free_after_wait(rig: Rig) -> str:
    pinned, out = rig.host_cell("pinned", 1, Place.PINNED), rig.cells(UNTOUCHED)
    rig.backend.wait(rig.copy("a", pinned, out))
    pinned.fill_(2)
    return rig.outcome(out)


def pageable_source_is_read_at_once(rig: Rig) -> str:
    pageable, out = rig.host_cell("pageable", 1, Place.PAGEABLE), rig.cells(UNTOUCHED)

    def snapshot() -> tuple[ChunkWork, ...]:
        taken = pageable.clone()
        return (lambda: rig.hold("a"), lambda: copy(taken, out))

    rig.run("a", lambda: copy(pageable, out), reads=Place.PAGEABLE, stage=snapshot)
    pageable.fill_(2)
    return rig.outcome(out)


def pinned_target_is_written_late(rig: Rig) -> str:
    x, pinned = rig.cells(1), rig.host_cell("pinned", 0, Place.PINNED)
    copied = rig.copy("a", x, pinned)
    rig.hold("host")
    seen = pinned.item()
    rig.backend.wait(copied)
    return f"{seen} {pinned.item()}"


def pageable_target_is_written_at_once(rig: Rig) -> str:
    x, pageable = rig.cells(0), rig.host_cell("pageable", UNTOUCHED, Place.PAGEABLE)
    rig.store("a", x, 1)
    rig.run("a", lambda: copy(x, pageable), writes=Place.PAGEABLE)
    return str(pageable.item())


def index_is_read_when_the_kernel_runs(rig: Rig) -> str:
    table, index, out = rig.cells(10, 20), rig.cells(0), rig.cells(UNTOUCHED)

    def gather() -> None:
        torch.index_select(table, 0, index, out=out)

    rig.run("a", gather)
    rig.store("b", index, 1)
    return rig.outcome(out)


def index_is_a_copy(rig: Rig) -> str:
    table, out = rig.cells(10, 20), rig.cells(UNTOUCHED)
    values = np.array([0], dtype=np.int64)
    index = rig.backend.index(values)

    def gather() -> None:
        torch.index_select(table, 0, index, out=out)

    rig.run("a", gather)
    values[0] = 1
    return rig.outcome(out)


def chunks_run_in_any_order(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED, UNTOUCHED)
    rig.run("a", lambda: copy(x, out[:1]), lambda: copy(x, out[1:]))
    rig.store("b", x, 1)
    return rig.outcome(out)


def signal_covers_every_chunk(rig: Rig) -> str:
    x, out = rig.cells(1, 1), rig.cells(UNTOUCHED, UNTOUCHED)
    y = rig.cells(0, 0)
    landed = rig.run("a", lambda: copy(x[:1], y[:1]), lambda: copy(x[1:], y[1:]))
    rig.copy("b", y, out, after=[landed])
    return rig.outcome(out)


# The host.


def host_wait_joins_only_the_host(rig: Rig) -> str:
    x, pinned = rig.cells(0), rig.host_cell("pinned", UNTOUCHED, Place.PINNED)
    written = rig.store("a", x, 1)
    rig.copy("b", x, pinned)
    rig.backend.wait(written)
    return str(pinned.item())


def host_wait_orders_later_submissions(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    rig.backend.wait(rig.store("a", x, 1))
    rig.copy("b", x, out)
    return rig.outcome(out)


def lane_wait_does_not_join_the_host(rig: Rig) -> str:
    x, pinned = rig.cells(1), rig.host_cell("pinned", UNTOUCHED, Place.PINNED)
    rig.wait(rig.copy("a", x, pinned), "b")
    rig.hold("host")
    return str(pinned.item())


def drain_joins_every_lane(rig: Rig) -> str:
    x, y = rig.cells(0), rig.cells(0)
    rig.store("a", x, 1)
    rig.store("b", y, 1)
    return rig.outcome(x, y)


# The in-process fabric: a sends, b is the wire that lands bytes on the far side, c is the far side's own lane.


def sent_is_not_visible(rig: Rig) -> str:
    source, wire, target, out = rig.cells(1), rig.cells(0), rig.cells(0), rig.cells(UNTOUCHED)
    sent = rig.copy("a", source, wire)
    rig.copy("b", wire, target, after=[sent])
    rig.copy("c", target, out, after=[sent])
    return rig.outcome(out)


def sent_frees_the_source(rig: Rig) -> str:
    source, wire, target = rig.cells(1), rig.cells(0), rig.cells(0)
    sent = rig.copy("a", source, wire)
    rig.copy("b", wire, target, after=[sent])
    rig.store("c", source, 2, after=[sent])
    return rig.outcome(target)


def landed_is_visible(rig: Rig) -> str:
    source, wire, target, out = rig.cells(1), rig.cells(0), rig.cells(0), rig.cells(UNTOUCHED)
    sent = rig.copy("a", source, wire)
    landed = rig.copy("b", wire, target, after=[sent])
    rig.copy("c", target, out, after=[landed])
    return rig.outcome(out)


def notified_is_not_visible(rig: Rig) -> str:
    source, target, flag, out = rig.cells(1), rig.cells(0), rig.cells(0), rig.cells(UNTOUCHED, UNTOUCHED)
    rig.copy("b", source, target)
    rig.store("a", flag, 1)
    rig.copy("c", flag, out[:1])
    rig.copy("c", target, out[1:])
    return rig.outcome(out)


def notified_after_landing_is_visible(rig: Rig) -> str:
    source, target, flag, out = rig.cells(1), rig.cells(0), rig.cells(0), rig.cells(UNTOUCHED, UNTOUCHED)
    landed = rig.copy("b", source, target)
    rig.store("a", flag, 1, after=[landed])
    rig.copy("c", flag, out[:1])
    rig.copy("c", target, out[1:])
    return rig.outcome(out)


# Captured graphs.


def capture_runs_nothing(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    with rig.capture("a"):
        rig.store("a", x, 1)
    rig.copy("b", x, out)
    return rig.outcome(out, x)


def replay_keeps_the_order(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    rig.store("a", x, 5)
    with rig.capture("a") as graph:
        rig.copy("a", x, out)
        rig.store("a", x, 2)
    rig.backend.replay(graph)
    return rig.outcome(out, x)


def graph_is_replayed_again(rig: Rig) -> str:
    x = rig.cells(0)
    with rig.capture("a") as graph:
        rig.run("a", lambda: x.add_(1))
    rig.backend.replay(graph)
    rig.backend.replay(graph)
    return rig.outcome(x)


def wait_in_a_capture_is_lost(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    written = rig.store("a", x, 1)
    with rig.capture("b") as graph:
        rig.wait(written, "b")
        rig.copy("b", x, out, after=[written])
    rig.backend.replay(graph)
    return rig.outcome(out)


def wait_before_a_replay_holds(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED)
    written = rig.store("a", x, 1)
    with rig.capture("b") as graph:
        rig.copy("b", x, out)
    rig.wait(written, "b")
    rig.backend.replay(graph)
    return rig.outcome(out)


FIFO = "A lane is FIFO, lanes are not ordered"
WAITS = "A wait joins one lane to one record"
NEVER = "Waiting on a never-recorded signal does nothing"
BINDS = "A wait binds to the latest record when it is called"
RERECORD = "A signal can be recorded again"
SOURCE = "An asynchronous copy reads its source when it runs"
INDEX = "Index tensors are read when the kernel runs"
MEMORY = "Pinned and pageable host memory differ"
FABRIC = "Sent, visible and notified are three events"
CHUNKS = "The chunks of a large copy run in any order"
QUERY = "A query may be late and is never early"
HOST = "A wait of the process joins that process only"
GRAPH = "A captured graph runs when it is replayed, behind no wait of its own"


def _litmus(rule: str, program: Callable[[Rig], str], *allowed: str) -> Litmus:
    return Litmus(rule=rule, program=program, allowed=frozenset(allowed))


LITMUS: tuple[Litmus, ...] = (
    _litmus(FIFO, lane_is_fifo, "1"),
    _litmus(FIFO, lanes_are_unordered, "0", "1"),
    _litmus(WAITS, after_orders_two_lanes, "1"),
    _litmus(WAITS, wait_joins_one_lane, "1 0", "1 1"),
    _litmus(WAITS, waits_compose, "1"),
    _litmus(NEVER, never_recorded_does_not_wait, "True 0", "True 1"),
    _litmus(BINDS, wait_binds_when_called, "1"),
    _litmus(BINDS, wait_ignores_a_later_record, "1"),
    _litmus(RERECORD, record_covers_what_is_queued, "1", "2"),
    _litmus(RERECORD, rerecord_moves_the_signal, "2"),
    _litmus(RERECORD, rerecord_forgets_the_first_lane, "0", "1"),
    _litmus(SOURCE, pinned_source_is_read_late, "1", "2"),
    _litmus(SOURCE, pinned_source_is_free_after_wait, "1"),
    _litmus(INDEX, index_is_read_when_the_kernel_runs, "10", "20"),
    _litmus(INDEX, index_is_a_copy, "10"),
    _litmus(MEMORY, pageable_source_is_read_at_once, "1"),
    _litmus(MEMORY, pageable_target_is_written_at_once, "1"),
    _litmus(MEMORY, pinned_target_is_written_late, "0 1", "1 1"),
    _litmus(FABRIC, sent_is_not_visible, "0", "1"),
    _litmus(FABRIC, sent_frees_the_source, "1"),
    _litmus(FABRIC, landed_is_visible, "1"),
    _litmus(FABRIC, notified_is_not_visible, "0 0", "0 1", "1 0", "1 1"),
    _litmus(FABRIC, notified_after_landing_is_visible, "0 0", "0 1", "1 1"),
    _litmus(CHUNKS, chunks_run_in_any_order, "0 0", "0 1", "1 0", "1 1"),
    _litmus(CHUNKS, signal_covers_every_chunk, "1 1"),
    _litmus(QUERY, query_is_never_early, "pending", "reached 1"),
    _litmus(HOST, host_wait_joins_only_the_host, "-1", "0", "1"),
    _litmus(HOST, host_wait_orders_later_submissions, "1"),
    _litmus(HOST, lane_wait_does_not_join_the_host, "-1", "1"),
    _litmus(HOST, drain_joins_every_lane, "1 1"),
    _litmus(GRAPH, capture_runs_nothing, "0 0"),
    _litmus(GRAPH, replay_keeps_the_order, "5 2"),
    _litmus(GRAPH, graph_is_replayed_again, "2"),
    _litmus(GRAPH, wait_in_a_capture_is_lost, "0", "1"),
    _litmus(GRAPH, wait_before_a_replay_holds, "1"),
)
