"""The CUDA backend's own code, run on a CPU over a stand-in for torch.cuda; and what the commands make of delays.

It shows that the code does what it says to streams, events, graphs and flags. It says nothing about a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import cuda_worker
from fakes.cuda import Graph, Machine, installed
from litmus.programs import LITMUS, Litmus
from litmus.rig import Rig

from kvcheck.commands import replay, run_cells, selftest
from kvcheck.commands.main import run
from kvcheck.core.base.errors import InternalError, UnknownVerdict, UsageError
from kvcheck.core.base.record import Verdict
from kvcheck.core.bench.memory import FreshMemory, LeanCudaBackend
from kvcheck.core.cache.backend import cuda, holds, streamed
from kvcheck.core.cache.backend.backend import Backend, Footprint, Operation, Place
from kvcheck.core.cache.backend.delays import Delay, DelaySite
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.delayed import Rates, check_operations, device_plans, run_both, tries, why_not
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant_target

SEEDS = 12
PLAN = Plan(scenario="hicache", shape="llama-3-tiny", seed=3, schedule=5, requests=24)
HELD = Plan(
    scenario="hicache", shape="llama-3-tiny", seed=1, requests=24, backend="cuda", device="cuda", strategy="delay"
)


def rig(machine: Machine, *delays: Delay) -> Rig:
    return Rig(machine.backend(delays=delays), lambda _actor: None)


def ends(rigged: Rig) -> list[tuple[int, int, int, int]]:
    """How the holds of each delay ended, once all is over."""
    report = rigged.backend.settle()  # type: ignore[attr-defined]
    return [(row.placed, row.overtaken, row.gave_way, row.fired) for row in report.rows]


@pytest.mark.parametrize("litmus", LITMUS, ids=lambda litmus: litmus.name)
def test_the_code_of_the_cuda_backend_keeps_the_rules(litmus: Litmus, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for seed in range(SEEDS):
        monkeypatch.setattr(streamed, "PENDING_MAX", (4096, 1)[seed % 2])
        with installed(seed) as machine:
            seen.add(litmus.program(rig(machine)))
    assert seen <= litmus.allowed


def test_each_lane_has_a_stream_of_its_own_also_behind_the_pool_of_torch() -> None:
    with installed(1) as machine:
        backend = rig(machine).backend
        for number in range(40):
            backend.lane(f"lane {number}")
        assert len({each.cuda_stream for each in backend._streams}) == 40  # type: ignore[attr-defined]
        ours = {backend._machine._service.cuda_stream, backend._machine._capturing.cuda_stream}  # type: ignore[attr-defined]
        assert len(ours) == 2 and ours.isdisjoint(each.cuda_stream for each in backend._streams)  # type: ignore[attr-defined]
        with pytest.raises(UnknownVerdict, match=r"torch has no more than 64; next: fewer ranks"):
            for number in range(40, 63):
                backend.lane(f"lane {number}")


def test_a_capture_that_fails_is_told_by_its_own_error() -> None:
    def fails() -> None:
        raise RuntimeError("the first error")

    with installed(1) as machine:
        backend = rig(machine).backend
        lane = backend.lane("a")
        with backend.capture(lane) as graph:
            cuda.CudaBackend.submit(backend, Operation("part", (fails,)), lane=lane)  # called while it is captured
        ended: list[bool] = []

        def ends(graph: object) -> None:
            ended.append(True)
            raise RuntimeError("and the end of the capture")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Graph, "capture_end", ends)
            with pytest.raises(RuntimeError, match="the first error"):
                backend.replay(graph)
        assert ended == [True]


def store_and_copy(rig: Rig) -> str:
    """lane a: x = 1. lane b: out = x, behind nothing."""
    x, out = rig.cells(0), rig.cells(-1)
    rig.backend.submit(Operation("set", (lambda: x.fill_(1),)), lane=rig.backend.lane("a"))
    rig.backend.submit(Operation("get", (lambda: out.copy_(x),)), lane=rig.backend.lane("b"))
    return rig.outcome(out)


def test_a_delay_imposes_the_order_that_seldom_comes_about() -> None:
    late = Delay(held=DelaySite(operation="set", nth=1), until=DelaySite(operation="get", nth=1))
    free, held = [], []
    for seed in range(SEEDS):
        with installed(seed) as machine:
            free.append(store_and_copy(rig(machine)))
        with installed(seed) as machine:
            rigged = rig(machine, late)
            held.append(store_and_copy(rigged))
            assert ends(rigged) == [(1, 1, 0, 0)]
    assert held == ["0"] * SEEDS
    assert "1" in free


def test_a_host_that_only_polls_goes_on_too() -> None:
    with installed(3) as machine:
        rigged = rig(machine, Delay(held=DelaySite(operation="litmus")))
        written = rigged.store("a", rigged.cells(0), 1)
        polls = 0
        while not rigged.backend.query(written):
            polls += 1
            assert polls < 2 * holds.POLLS_MOST
        assert polls >= holds.POLLS_MOST - 1 and ends(rigged) == [(1, 0, 1, 0)]


def test_a_part_that_makes_the_host_wait_ends_by_the_watchdog_and_it_is_told() -> None:
    with installed(3) as machine:
        rigged = rig(machine, Delay(held=DelaySite(operation="litmus", nth=1)))
        rigged.store("a", rigged.cells(0), 1)
        stream = next(each for each in machine.streams if each.queue)
        stream.synchronize()  # as a copy to pageable memory inside a part does
        report = rigged.backend.settle()  # type: ignore[attr-defined]
        assert [(row.placed, row.gave_way, row.fired) for row in report.rows] == [(1, 0, 1)]
        assert report.gap is not None and "watchdog" in report.gap


@pytest.mark.parametrize("is_held_itself", [True, False])
def test_every_lane_is_released_before_an_operation_that_makes_the_host_wait(is_held_itself: bool) -> None:
    """Behind its own hold, or behind a lane that is held."""
    held = DelaySite(operation="read" if is_held_itself else "litmus")
    with installed(3) as machine:
        rigged = rig(machine, Delay(held=held))
        x, seen = rigged.cells(0), list[int]()
        written = rigged.store("a", x, 1)
        reading = Operation("read", (lambda: seen.append(int(x[0])),), joins_host=True)
        rigged.backend.submit(reading, lane=rigged.backend.lane("b"), after=(written,))
        assert seen == [1], "it has run when it is submitted"
        assert ends(rigged) == [(1, 0, 1, 0)]


def test_a_copy_to_pageable_memory_releases_every_lane_before_it_is_launched() -> None:
    """The driver blocks inside the copy: a release that comes behind it comes too late."""
    with installed(3) as machine:
        rigged = rig(machine, Delay(held=DelaySite(operation="litmus")))
        written = rigged.store("a", rigged.cells(0), 1)
        into = (Footprint("host", ("x",), (0, 1), np.array([0]), place=Place.PAGEABLE),)

        def blocks() -> None:
            assert machine.current is not None
            machine.current.synchronize()

        lane = rigged.backend.lane("b")
        operation = Operation("copy", (blocks,))
        cuda.CudaBackend.submit(rigged.backend, operation, lane=lane, writes=into, after=(written,))
        assert ends(rigged) == [(1, 0, 1, 0)]


def test_places_of_holds_are_used_again_and_an_old_end_lets_no_new_hold_go() -> None:
    both = Delay(held=DelaySite(operation="set"), until=DelaySite(operation="get"))
    with installed(5) as machine:
        rigged = rig(machine, both)
        rounds = 3 * holds.HOLDS_MOST
        for _ in range(rounds):
            assert store_and_copy(rigged) == "0"
        assert ends(rigged) == [(rounds, rounds, 0, 0)]


def test_a_capture_does_not_wait_for_the_device_and_a_graph_is_held_as_one() -> None:
    with installed(2) as machine:
        rigged = rig(machine, Delay(held=DelaySite(operation="litmus", nth=2)))
        x = rigged.cells(0)
        with rigged.capture("a") as graph:
            rigged.store("a", x, 1)
            rigged.store("a", x, 2)
        rigged.backend.replay(graph)
        assert machine.syncs == 0
        assert int(x) == 0, "the lane is held in front of the whole graph"
        assert rigged.outcome(x) == "2"
        assert ends(rigged) == [(1, 0, 1, 0)]


@pytest.mark.parametrize("make", [EagerBackend, None], ids=["eager", "cuda"])
def test_a_graph_is_refused_where_it_would_mean_something_else(make: Callable[[], Backend] | None) -> None:
    with installed(0) as machine:
        backend = machine.backend() if make is None else make()
        lane = backend.lane("a")
        with backend.capture(lane) as first:
            with pytest.raises(InternalError, match="record its signals behind the replay"):
                backend.record(backend.signal(), lane=lane)
            with pytest.raises(InternalError, match="pageable memory"):
                backend.submit(Operation("x", (), stage=tuple), lane=lane)
            with pytest.raises(InternalError, match="makes the process wait"):
                backend.submit(Operation("x", (), joins_host=True), lane=lane)
        with backend.capture(lane):
            pass
        with pytest.raises(InternalError, match="expected the newest graph"):
            backend.replay(first)


@pytest.mark.parametrize(("place", "syncs"), [(Place.DEVICE, 1), (Place.PINNED, 0), (Place.PAGEABLE, 0)])
def test_fresh_memory_of_a_price_is_filled_when_a_lane_may_use_it(place: Place, syncs: int) -> None:
    """It is filled on the default stream, which orders nothing with a lane."""
    with installed(1) as machine:
        backend = LeanCudaBackend(FreshMemory(np.random.default_rng(1), "cuda"))
        backend.empty("words", (8,), torch.int64, place)
        assert machine.syncs == syncs


@pytest.mark.schedules
@pytest.mark.parametrize("name", ["replay-without-whole-wait", "gate-waits-on-load-lane"])
def test_what_the_cpu_finds_unordered_serves_wrong_bytes_under_its_delay(name: str) -> None:
    engine = ScheduleRunner(mutant_target(name))
    plans = device_plans(engine, dataclasses.replace(PLAN, mutant=name), "cuda")
    assert len(plans) >= 3 and len({plan.choices for plan in plans}) == len(plans)
    with installed(1):
        made = list(tries(engine, plans))
        assert made[-1].shown and made[-1].rates.free_wrong == 0
        assert made[-1].message.startswith("KV10")
        assert made[-1].rates.text().startswith("wrong bytes in 0 of 1 run without delays, 1 of 1 with")
        fixed = dataclasses.replace(made[-1].plan, mutant=None)
        outcomes = run_both(ScheduleRunner(BuiltinTarget()), fixed)
    assert [outcome.findings for outcome in outcomes] == [(), ()]
    assert outcomes[1].delays is not None and outcomes[1].verdict is Verdict.PASS


@pytest.mark.schedules
def test_a_fixed_build_is_clean_with_every_lane_delayed_and_nothing_delayed_is_unknown() -> None:
    engine = ScheduleRunner(BuiltinTarget())
    with installed(4):
        held = engine.run(dataclasses.replace(HELD, choices="/".join(("compute", "d2h", "h2d", "storage"))))
        none = engine.run(dataclasses.replace(HELD, choices="9999.hicache.load"))
    assert held.findings == () and held.verdict is Verdict.PASS
    assert held.delays is not None and sum(row.placed for row in held.delays.rows) > 10
    assert none.findings == () and none.verdict is Verdict.UNKNOWN
    assert none.delays is not None and "not exercised: hicache.load #9999 never came" in str(none.delays.gap)
    rates = Rates().plus(none, none)
    assert rates.gap == none.delays.gap


@pytest.mark.schedules
def test_an_operation_that_the_schedule_has_not_is_refused_in_one_line() -> None:
    engine = ScheduleRunner(BuiltinTarget())
    check_operations(engine, dataclasses.replace(HELD, choices="1.hicache.load"))
    for choices, site in (("hicache.lod", "hicache.lod"), ("9999.hicache.load", "hicache.load #9999")):
        with pytest.raises(UsageError, match=rf"no operation {site}; on a CPU it submits [^\n]*hicache\.load \(\d+\)"):
            check_operations(engine, dataclasses.replace(HELD, choices=choices))


@pytest.mark.schedules
def test_a_build_without_an_unordered_pair_has_nothing_to_delay() -> None:
    assert device_plans(ScheduleRunner(BuiltinTarget()), PLAN, "cuda") == ()
    assert why_not([]).startswith("no operation is known that could be delayed")


@pytest.mark.schedules
@pytest.mark.processes
def test_commands_impose_delays_and_say_the_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (run_cells, selftest):
        monkeypatch.setattr(command, "worker", cuda_worker)
    monkeypatch.setattr(replay, "WORKER", cuda_worker.__name__)
    monkeypatch.setenv("CUDA_DIARY", str(tmp_path / "diary"))
    line = dataclasses.replace(PLAN, mutant="replay-without-whole-wait").line()
    with installed(1):
        assert run(["replay", line, "--device", "cuda"]) == 1
        shown = capsys.readouterr().out
        assert run(["replay", line.replace("mutant=replay-without-whole-wait,", ""), "--device", "cuda"]) == 4
        assert "NOT REPRODUCED" in capsys.readouterr().out
        common = ["--device", "cuda", "--strategy", "delay", "--no-reports", "--out", str(tmp_path), "--seed", "1"]
        assert run(["stress", "hicache", "--shape", "llama-3-tiny", "--schedules", "3", *common]) == 0
        stressed = capsys.readouterr().out
        mutant = ["selftest", "replay-without-whole-wait", "--device", "cuda", "--seed", "1"]
        assert run([*mutant, "--no-reports", "--out", str(tmp_path)]) == 0
        assert "reproduced" in capsys.readouterr().out
    assert "wrong bytes in 0 of 1 run without delays, 1 of 1 with" in shown
    assert "backend=cuda,device=cuda,strategy=delay" in shown
    assert "hicache/llama-3-tiny: wrong bytes in 0 of 3 runs without delays, 0 of 3 with" in stressed


@pytest.mark.schedules
def test_a_message_is_taken_when_its_turn_has_come_not_when_it_lies_in_the_inbox() -> None:
    """It was taken as soon as it was there: on a device, before what its sender waited for."""
    plan = Plan(scenario="nvlink-aux", shape="llama-3-fp8-tiny", seed=1, schedule=6, backend="cuda", device="cuda")
    with installed(6):
        outcome = ScheduleRunner(BuiltinTarget()).run(dataclasses.replace(plan, strategy="delay"))
    assert outcome.findings == ()
    assert outcome.delays is not None and outcome.delays.rows[0].gave_way > 0


@pytest.mark.gpu
def test_a_device_imposes_a_delay_and_says_how_it_ended() -> None:
    late = Delay(held=DelaySite(operation="set", nth=1), until=DelaySite(operation="get", nth=1))
    warm = Rig(cuda.CudaBackend(), lambda _actor: None)
    store_and_copy(warm)  # loads the kernels, which may wait for the device
    rigged = Rig(cuda.CudaBackend(delays=(late,)), lambda _actor: None)
    assert store_and_copy(rigged) == "0"
    ((placed, overtaken, gave_way, fired),) = ends(rigged)
    assert (placed, overtaken + gave_way, fired) == (1, 1, 0)


@pytest.mark.gpu
def test_a_device_serves_wrong_bytes_under_the_delay_that_the_cpu_found() -> None:
    name = "gate-waits-on-load-lane"
    engine = ScheduleRunner(mutant_target(name))
    made = list(tries(engine, device_plans(engine, dataclasses.replace(PLAN, mutant=name), "cuda")))
    assert made[-1].shown, why_not(made)
