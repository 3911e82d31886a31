"""Litmus programs: the smallest runs in which one rule of a backend can be seen, each with its allowed outcomes.

Invariants:
- A program asks nothing of a machine but the Backend Protocol; what it saw comes back as a short string.
- `allowed` is exact: everything in it can happen on `simulated`, and nothing else may happen on any backend.
- Lanes are called a, b and c. `hold` makes a lane or the host slow on real hardware and does nothing on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcheck.core.backend.backend import Backend, Footprint, Operation, Part, Place, Signal

UNTOUCHED = -1
"""What a result holds until the program writes it."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A backend, and a way to slow down one actor: "a", "b", "c" or "host"."""

    backend: Backend
    hold: Callable[[str], None]

    def cells(self, *values: int) -> torch.Tensor:
        """Ints on the device, written before the program starts."""
        return self.backend.index(np.array(values, dtype=np.int64))

    def host_cell(self, name: str, value: int, place: Place) -> torch.Tensor:
        """One int in host memory."""
        return self.backend.empty(name, (1,), torch.int64, place).fill_(value)

    def run(
        self,
        lane: str,
        *parts: Part,
        after: Sequence[Signal] = (),
        reads: Place = Place.DEVICE,
        writes: Place = Place.DEVICE,
        stage: Callable[[], tuple[Part, ...]] | None = None,
    ) -> Signal:
        """Submit one operation of these parts; each part first holds its lane."""
        operation = Operation("litmus", tuple(self._held(lane, part) for part in parts), stage=stage)
        return self.backend.submit(
            operation,
            lane=self.backend.lane(lane),
            reads=[_footprint(reads)],
            writes=[_footprint(writes)],
            after=after,
        )

    def store(self, lane: str, cell: torch.Tensor, value: int, *, after: Sequence[Signal] = ()) -> Signal:
        """Submit: cell = value."""
        return self.run(lane, lambda: _fill(cell, value), after=after)

    def copy(self, lane: str, source: torch.Tensor, target: torch.Tensor, *, after: Sequence[Signal] = ()) -> Signal:
        """Submit: target = source, both on the device or pinned."""
        return self.run(lane, lambda: _copy(source, target), after=after)

    def record(self, signal: Signal, lane: str) -> None:
        """Record the signal behind what the lane holds."""
        self.backend.record(signal, lane=self.backend.lane(lane))

    def wait(self, signal: Signal, lane: str) -> None:
        """Make the lane wait."""
        self.backend.wait(signal, lane=self.backend.lane(lane))

    def outcome(self, *results: torch.Tensor) -> str:
        """Drain, then the results."""
        self.backend.drain()
        return " ".join(str(value) for result in results for value in result.tolist())

    def _held(self, lane: str, part: Part) -> Part:
        def held() -> None:
            self.hold(lane)
            part()

        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Litmus:
    """One program. `rule`: the heading in SEMANTICS.md that it belongs to."""

    rule: str
    program: Callable[[Rig], str]
    allowed: frozenset[str]

    @property
    def name(self) -> str:
        """The program's name, as SEMANTICS.md writes it."""
        return self.program.__name__


def _footprint(place: Place) -> Footprint:
    return Footprint("litmus", ("cell",), (0, 1), np.zeros(1, dtype=np.int64), place=place)


def _fill(cell: torch.Tensor, value: int) -> None:
    cell.fill_(value)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


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

    def snapshot() -> tuple[Part, ...]:
        taken = pageable.clone()
        return (lambda: rig.hold("a"), lambda: _copy(taken, out))

    rig.run("a", lambda: _copy(pageable, out), reads=Place.PAGEABLE, stage=snapshot)
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
    rig.run("a", lambda: _copy(x, pageable), writes=Place.PAGEABLE)
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


def parts_run_in_any_order(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(UNTOUCHED, UNTOUCHED)
    rig.run("a", lambda: _copy(x, out[:1]), lambda: _copy(x, out[1:]))
    rig.store("b", x, 1)
    return rig.outcome(out)


def signal_covers_every_part(rig: Rig) -> str:
    x, out = rig.cells(1, 1), rig.cells(UNTOUCHED, UNTOUCHED)
    y = rig.cells(0, 0)
    landed = rig.run("a", lambda: _copy(x[:1], y[:1]), lambda: _copy(x[1:], y[1:]))
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


def notified_is_not_visible(rig: Rig) -> str:
    source, target, flag, out = rig.cells(1), rig.cells(0), rig.cells(0), rig.cells(UNTOUCHED, UNTOUCHED)
    rig.copy("b", source, target)
    rig.store("a", flag, 1)
    rig.run("c", lambda: _copy(torch.stack_target(out, 0), flag))
    return rig.outcome(out)
