"""The rules of SEMANTICS.md, seen on each backend, and proof that each can be seen to break."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from litmus import simulators
from litmus.onlooker import Onlooker
from litmus.programs import LITMUS, UNTOUCHED, Litmus
from litmus.rig import Rig
from litmus.simulators import Explorer, explore, run_once

import kvcheck.core.cache.backend
from kvcheck.core.base.errors import DoubleFree, Hang, InternalError, UnknownVerdict
from kvcheck.core.cache.backend import BACKENDS
from kvcheck.core.cache.backend.backend import POISON_BYTE, Backend, Place, Signal
from kvcheck.core.cache.backend.cuda import CudaBackend
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import Choice, Goal, SimulatedBackend
from kvcheck.core.cache.backend.threads import ThreadsBackend

SEMANTICS = Path(kvcheck.core.cache.backend.__file__).with_name("SEMANTICS.md")
BY_NAME = {litmus.name: litmus for litmus in LITMUS}
CUDA_RUNS = 200
HOLD_CYCLES = 400_000  # about a fifth of a millisecond: longer than a launch, short enough for 200 runs a program
HOLD_HOST_S = 0.0005

every_litmus = pytest.mark.parametrize("litmus", LITMUS, ids=lambda litmus: litmus.name)


@every_litmus
def test_simulated_shows_exactly_the_allowed_outcomes(litmus: Litmus) -> None:
    assert set(explore(litmus.program).values()) == litmus.allowed


@every_litmus
def test_eager_shows_one_allowed_outcome(litmus: Litmus) -> None:
    outcome = litmus.program(Rig(EagerBackend(), lambda _actor: None))
    assert outcome in litmus.allowed


@pytest.mark.gpu
@every_litmus
def test_cuda_stays_within_the_allowed_outcomes(litmus: Litmus, record_property: Callable[[str, object], None]) -> None:
    seen: Counter[str] = Counter()
    for run in range(CUDA_RUNS):
        slow = (None, "a", "b", "c", "host")[run % 5]

        def hold(actor: str, slow: str | None = slow) -> None:
            if actor != slow:
                return
            if actor == "host":
                time.sleep(HOLD_HOST_S)
            else:
                torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]

        backend = CudaBackend()
        seen[litmus.program(Rig(backend, hold))] += 1
        backend.drain()  # what is still queued must not outlive the memory of this run
    record_property("seen", dict(seen))
    record_property("allowed_not_seen", sorted(litmus.allowed - set(seen)))
    assert sum(seen.values()) == CUDA_RUNS
    assert set(seen) <= litmus.allowed, f"{litmus.name}: allowed {sorted(litmus.allowed)}, seen {dict(seen)}"


@every_litmus
def test_same_choices_give_the_same_outcome(litmus: Litmus) -> None:
    for path, outcome in explore(litmus.program).items():
        chooser = Explorer(path)
        assert run_once(litmus.program, chooser) == outcome
        assert tuple(chooser.path) == path


MUTANTS: tuple[tuple[type[SimulatedBackend], tuple[str, ...]], ...] = (
    (simulators.LaneWithoutOrder, ("lane_is_fifo",)),
    (simulators.WaitBindsLate, ("wait_binds_when_called", "wait_ignores_a_later_record")),
    (simulators.WaitBindsFirst, ("rerecord_moves_the_signal", "rerecord_forgets_the_first_lane")),
    (simulators.NeverRecordedBlocks, ("never_recorded_does_not_wait",)),
    (simulators.LaneWaitDropped, ("after_orders_two_lanes", "wait_joins_one_lane", "waits_compose")),
    (simulators.HostWaitDropped, ("host_wait_orders_later_submissions", "pinned_source_is_free_after_wait")),
    (simulators.QueryEarly, ("query_is_never_early",)),
    (simulators.StageIgnored, ("pageable_source_is_read_at_once",)),
    (simulators.PartsAreAtomic, ("chunks_run_in_any_order",)),
    (simulators.FirstPartCompletes, ("signal_covers_every_chunk",)),
    (simulators.CaptureRuns, ("capture_runs_nothing", "graph_is_replayed_again")),
    (simulators.RunsAtOnce, ("lanes_are_unordered", "pinned_source_is_read_late", "sent_is_not_visible")),
)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [(mutant, name) for mutant, names in MUTANTS for name in names],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_broken_simulator_changes_the_outcomes(mutant: type[SimulatedBackend], name: str) -> None:
    litmus = BY_NAME[name]
    assert set(explore(litmus.program).values()) == litmus.allowed
    assert set(explore(litmus.program, mutant).values()) != litmus.allowed


def test_semantics_has_every_program_under_its_rule_with_its_outcomes() -> None:
    written = {}
    for section in re.split(r"^## ", SEMANTICS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        for name, cell in re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|", section, re.MULTILINE):
            written[name] = (section.splitlines()[0], frozenset(re.findall(r"`([^`]*)`", cell)))
    assert written == {litmus.name: (litmus.rule, litmus.allowed) for litmus in LITMUS}


every_backend = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda seer=None: SimulatedBackend(Explorer(), seer), id="simulated"),
        pytest.param(EagerBackend, id="eager"),
        pytest.param(ThreadsBackend, id="threads"),
        pytest.param(lambda seer=None: CudaBackend(observer=seer), id="cuda", marks=pytest.mark.gpu),
    ],
)


@every_backend
@pytest.mark.parametrize("place", Place)
def test_fresh_memory_is_poisoned_and_counted(make: Callable[[], Backend], place: Place) -> None:
    backend = make()
    memory = backend.empty("rows", (3, 5), torch.float32, place)
    assert set(memory.cpu().view(torch.uint8).flatten().tolist()) == {POISON_BYTE}
    assert backend.allocated() == {"rows": 60}
    backend.release("rows")
    assert backend.allocated() == {}


@every_backend
def test_memory_is_released_once_and_allocated_once(make: Callable[[], Backend]) -> None:
    backend = make()
    with pytest.raises(DoubleFree, match="'rows' is not allocated; allocated: none"):
        backend.release("rows")
    backend.empty("rows", (1,), torch.int64, Place.DEVICE)
    with pytest.raises(InternalError, match="'rows' is allocated already"):
        backend.empty("rows", (1,), torch.int64, Place.DEVICE)
    backend.release("rows")
    with pytest.raises(DoubleFree):
        backend.release("rows")


@every_backend
def test_an_observer_is_told_of_each_operation_once_and_in_causal_order(make: Callable[[Onlooker], Backend]) -> None:
    onlooker = Onlooker()
    rig = Rig(make(onlooker), lambda _actor: None)
    cell = rig.cells(0)
    first = rig.store("a", cell, 1)
    second = rig.store("b", cell, 2, after=[first])
    rig.run("b", after=[second])
    rig.backend.drain()
    told = [row[:2] for row in onlooker.told if row[0] in ("submitted", "completed")]
    assert sorted(told) == [(what, n) for what in ("completed", "submitted") for n in (1, 2, 3)]
    assert [n for what, n in told if what == "completed"] == [1, 2, 3]
    assert all(told.index(("submitted", n)) < told.index(("completed", n)) for n in (1, 2, 3))


def test_an_operation_without_parts_takes_its_turn_and_ends() -> None:
    def program(rig: Rig) -> str:
        x, out = rig.cells(0), rig.cells(UNTOUCHED)
        written = rig.store("a", x, 1)
        passed = rig.run("b", after=[written])
        rig.copy("c", x, out, after=[passed])
        return rig.outcome(out)

    assert set(explore(program).values()) == {"1"}


def test_other_lanes_go_on_while_a_copy_to_pageable_memory_returns() -> None:
    def program(rig: Rig) -> str:
        x, pageable = rig.cells(0), rig.host_cell("pageable", 0, Place.PAGEABLE)
        pinned = rig.host_cell("pinned", UNTOUCHED, Place.PINNED)
        rig.copy("b", x, pinned)

        def store_and_copy() -> None:
            x.fill_(1)
            pageable.copy_(x)

        rig.run("a", store_and_copy, writes=Place.PAGEABLE)
        return str(pinned.item())

    assert set(explore(program).values()) == {"-1", "0", "1"}


def foreign_signal() -> Signal:
    """A pending record of a machine that nobody runs: the one wait that can never be satisfied."""

    class Idle(Explorer):
        def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
            return None

    return Rig(SimulatedBackend(Idle()), lambda _actor: None).run("a", lambda: None)


def test_a_host_wait_that_nothing_can_satisfy_is_a_hang() -> None:
    backend = SimulatedBackend(Explorer())
    with pytest.raises(Hang, match="host wait: no pending operation can satisfy this wait"):
        backend.wait(foreign_signal())


def test_a_drain_of_a_lane_that_waits_for_ever_is_a_hang_and_names_the_lane() -> None:
    rig = Rig(SimulatedBackend(Explorer()), lambda _actor: None)
    rig.wait(foreign_signal(), "b")
    rig.run("b", lambda: None)
    with pytest.raises(Hang, match="lanes b wait"):
        rig.backend.drain()


def test_a_spent_step_budget_is_a_hang() -> None:
    rig = Rig(SimulatedBackend(Explorer(), max_steps=2), lambda _actor: None)
    rig.run("a", lambda: None, lambda: None)
    with pytest.raises(Hang, match="step budget of 2 virtual steps is spent"):
        rig.run("a", lambda: None)


def test_polling_for_ever_is_a_hang() -> None:
    backend = SimulatedBackend(Explorer(), max_steps=100)
    signal = foreign_signal()
    with pytest.raises(Hang, match="step budget of 100"):
        while not backend.query(signal):
            pass
    assert backend.steps == 101


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_unknown() -> None:
    with pytest.raises(UnknownVerdict, match="needs a CUDA device"):
        CudaBackend()


@pytest.mark.gpu
def test_cuda_device_that_is_not_there_is_unknown() -> None:
    with pytest.raises(UnknownVerdict, match="no device 999"):
        CudaBackend(999)


def test_every_backend_of_the_table_is_covered_here() -> None:
    covered = [SimulatedBackend, EagerBackend, ThreadsBackend, CudaBackend]
    assert [BACKENDS.load(name) for name in BACKENDS.names()] == covered
    assert np.unique([litmus.name for litmus in LITMUS]).size == len(LITMUS)
