"""The edges a backend tells its observer: the same on every backend, and those of SEMANTICS.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from litmus.onlooker import Inbox, Onlooker
from litmus.programs import LITMUS, Litmus
from litmus.rig import Rig
from litmus.simulators import Explorer

from kvcheck.core.cache.backend.backend import Backend, Place
from kvcheck.core.cache.backend.cuda import CudaBackend
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import Choice, Goal, SimulatedBackend
from kvcheck.core.cache.backend.threads import ThreadsBackend


class Lazy(Explorer):
    """Runs nothing before it must."""

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        return None if may_pause else 0


every_backend = pytest.mark.parametrize(
    "make",
    [
        pytest.param(EagerBackend, id="eager"),
        pytest.param(ThreadsBackend, id="threads"),
        pytest.param(lambda seer: SimulatedBackend(Explorer(), seer), id="simulated, at once"),
        pytest.param(lambda seer: SimulatedBackend(Lazy(), seer), id="simulated, lazy"),
        pytest.param(lambda seer: CudaBackend(emit=seer), id="cuda", marks=pytest.mark.gpu),
    ],
)
Make = Callable[[Onlooker], Backend]


def told(make: Make, program: Callable[[Rig], object]) -> list[Inbox]:
    onlooker = Onlooker()
    program(Rig(make(onlooker), lambda _actor: None))
    return onlooker.edges()


def submits_and_waits(rig: Rig) -> None:
    cell = rig.cells(0)
    first = rig.store("a", cell, 1)
    second = rig.store("b", cell, 2, after=[first])
    rig.wait(second, "c")
    rig.backend.wait(second)
    rig.backend.drain()


def records_twice(rig: Rig) -> None:
    cell, signal = rig.cells(0), rig.backend.signal()
    rig.record(signal, "a")
    rig.wait(signal, "b")
    rig.store("a", cell, 1)
    rig.record(signal, "a")
    rig.wait(signal, "b")
    rig.backend.wait(signal)


def records_what_submit_returned(rig: Rig) -> None:
    done = rig.store("a", rig.cells(0), 1)
    rig.record(done, "b")
    rig.wait(done, "c")


def never_records(rig: Rig) -> None:
    signal = rig.backend.signal()
    rig.wait(signal, "b")
    rig.backend.wait(signal)
    rig.store("b", rig.cells(0), 1, after=[signal])
    assert rig.backend.query(signal)
    rig.record(signal, "a")


def waits_for_what_is_over(rig: Rig) -> None:
    done = rig.store("a", rig.cells(0), 1)
    rig.backend.wait(done)
    rig.wait(done, "b")


def asks_when_it_is_over(rig: Rig) -> None:
    done = rig.store("a", rig.cells(0), 1)
    rig.backend.drain()
    assert rig.backend.query(done)


def writes_pageable_memory(rig: Rig) -> None:
    cell, pageable = rig.cells(1), rig.host_cell("pageable", 0, Place.PAGEABLE)
    rig.run("a", lambda: pageable.copy_(cell), writes=Place.PAGEABLE)


PROGRAMS: tuple[tuple[Callable[[Rig], None], str], ...] = (
    (
        submits_and_waits,
        "submitted 1 a 1, lane_waited 1 b, submitted 2 b 2, lane_waited 2 c, process_joined 2, process_drained",
    ),
    (
        records_twice,
        "recorded 1 a, lane_waited 1 b, submitted 1 a 2, recorded 3 a, lane_waited 3 b, process_joined 3",
    ),
    (records_what_submit_returned, "submitted 1 a 1, recorded 2 b, lane_waited 2 c"),
    (never_records, "submitted 1 b 1, recorded 2 a"),
    (waits_for_what_is_over, "submitted 1 a 1, process_joined 1, lane_waited 1 b"),
    (asks_when_it_is_over, "submitted 1 a 1, process_drained, process_joined 1"),
    (writes_pageable_memory, "submitted 1 a 1, process_joined 1"),
)


@every_backend
@pytest.mark.parametrize(("program", "edges"), PROGRAMS, ids=lambda value: getattr(value, "__name__", ""))
def test_an_observer_is_told_every_edge(make: Make, program: Callable[[Rig], None], edges: str) -> None:
    assert ", ".join(" ".join(map(str, row)) for row in told(make, program)) == edges


def test_a_query_that_says_no_is_no_edge() -> None:
    def program(rig: Rig) -> None:
        assert not rig.backend.query(rig.store("a", rig.cells(0), 1))

    assert told(lambda seer: SimulatedBackend(Lazy(), seer), program) == [("submitted", 1, "a", 1)]


@pytest.mark.parametrize("litmus", LITMUS, ids=lambda litmus: litmus.name)
def test_a_litmus_program_tells_the_same_edges_whenever_things_run(litmus: Litmus) -> None:
    """A query's answer may differ, so a join behind it is left out."""
    runs = [told(make, litmus.program) for make in (EagerBackend, lambda seer: SimulatedBackend(Lazy(), seer))]
    asks = "query" in litmus.program.__code__.co_names
    one, other = ([row for row in run if not (asks and row[0] == "process_joined")] for run in runs)
    assert one == other
