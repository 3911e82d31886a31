"""Arms over lanes that go on beside the process: threads, and the stand-in of a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fakes.cuda import Backend as StandIn
from fakes.cuda import Machine, Stream, installed
from rigs.cut_rounds import QuickClock, cut_rounds, point

from kvcheck.commands.main import run
from kvcheck.core.base.errors import DoubleFree, InternalError, WrongOutput
from kvcheck.core.base.record import Verdict, read_record
from kvcheck.core.bench import CASES, case_layer_load, memory
from kvcheck.core.bench.arms import Arm, BenchSetting, Maker
from kvcheck.core.bench.case_decode import arm_of
from kvcheck.core.bench.case_guarded import queue_load
from kvcheck.core.bench.clock import ThreadsClock
from kvcheck.core.bench.decode_work import DecodeStep
from kvcheck.core.bench.measure import Samples
from kvcheck.core.bench.memory import FORWARD, FreshMemory, LeanBackend, LeanCudaBackend, LeanThreadsBackend
from kvcheck.core.cache.backend import threads
from kvcheck.core.cache.backend.backend import Lane, Place
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.report.comparison.compare import compare
from kvcheck.core.report.gate.budgets import Budget
from kvcheck.core.report.gate.result import gated_rows
from kvcheck.core.report.prices import has_price
from kvcheck.core.stress.workload.shapes import shape

RUNS = 6
LATE_S = 0.005
TINY = shape("glm-5.1-tiny")


def of_case(case: str, name: str) -> Maker:
    return CASES.load(case)(BenchSetting(shape=TINY, device="threads"))[-1].makers[name]


def step_behind_load(fresh: FreshMemory) -> Arm:
    """A decode step with guarded reads, behind a load that the process has not seen finish."""
    backend = fresh.backend()
    step = DecodeStep(fresh, TINY, backend)
    queue_load(backend, step.gate, [step.load(layer) for layer in range(TINY.num_layers)])
    return arm_of(step, "guarded")


BEHIND_LOADS: dict[str, Callable[[], Maker]] = {
    "guarded-read": lambda: of_case("guarded-read", "guarded-behind-load"),
    "layer-load": lambda: of_case("layer-load", "layer-wise"),
    "decode-step": lambda: step_behind_load,
    "decode-step, graph": lambda: of_case("decode-step", "graph-guarded"),
}


def wrong_of(make: Maker, runs: int = RUNS, device: str = "threads") -> int:
    """In how many runs the arm's check finds its first call wrong."""
    wrong = 0
    for number in range(runs):
        fresh = FreshMemory(np.random.default_rng(number), device)
        if device == "cuda":  # memory of the stand-in
            fresh.device = torch.device("cpu")
        arms = []
        try:
            arms.append(arm := make(fresh))
            arm.call()
            fresh.join()
            arm.check()
        except WrongOutput:
            wrong += 1
        finally:
            for arm in arms:
                arm.close()
            fresh.close()
    return wrong


def is_load(lane: str) -> bool:
    return lane.startswith(("load", "hicache.h2d"))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk of a load is late and no other is, so that what does not wait for it loses the race."""
    stream_for = LeanThreadsBackend._stream_for

    def late_stream_for(backend: LeanThreadsBackend, name: str) -> Any:
        stream = stream_for(backend, name)
        if is_load(name):
            put = stream.put

            def put_late(work: Callable[[], object], *, is_chunk: bool = False) -> None:
                if is_chunk:
                    put(partial(time.sleep, LATE_S))
                put(work, is_chunk=is_chunk)

            monkeypatch.setattr(stream, "put", put_late)
        return stream

    monkeypatch.setattr(threads, "SLEEPS", 0.0)
    monkeypatch.setattr(LeanThreadsBackend, "_stream_for", late_stream_for)


def in_process(backend: object, lane: Lane, work: Callable[..., None], *args: object) -> None:
    """What an arm computes runs in the process, whatever its lane was made to wait for."""
    work(*args)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", BEHIND_LOADS)
def test_arms_beside_the_lane_that_waits_or_whose_lane_does_not_wait_are_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_of(BEHIND_LOADS[name]()) == 0
    if "graph" not in name:  # a graph is replayed on the lane
        with monkeypatch.context() as beside:
            beside.setattr(LeanThreadsBackend, "launch", in_process)
            assert wrong_of(BEHIND_LOADS[name]()) > RUNS // 2
    monkeypatch.setattr(LayerGate, "wait", lambda gate, layer, lane: None)
    monkeypatch.setattr(KVPool, "before_replay", lambda pool, lane: None)
    assert wrong_of(BEHIND_LOADS[name]()) > 0


@pytest.mark.usefixtures("late")
def test_an_arm_that_does_not_wait_is_judged_by_what_it_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    make = of_case("layer-load", "no-wait")
    (point,) = case_layer_load.points(BenchSetting(shape=TINY, device="threads"))
    assert point.note == case_layer_load.RACES and wrong_of(make) == 0
    monkeypatch.setattr(HostPool, "load_chunks", lambda *args, **kwargs: ())
    assert wrong_of(make, 2) == 2


@pytest.mark.parametrize("case", ["offload-restore", "metadata-read", "seal", "nvlink-aux"])
def test_other_arms_with_lanes_are_right_over_threads(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcheck.core.bench.case_offload.TARGET_BYTES", (1 << 16,))
    for each in CASES.load(case)(BenchSetting(shape=TINY, device="threads")):
        assert all(wrong_of(make, 2) == 0 for make in each.makers.values())


def test_a_batch_of_threads_begins_and_ends_with_joined_lanes() -> None:
    done: list[str] = []
    batch = ThreadsClock().batch([lambda: done.append("call")], 2, "events", lambda: done.append("join"))
    assert batch() > 0 and done == ["join", "call", "call", "join"]


class HastyClock(ThreadsClock):
    """A clock that joins nothing, and by which every call takes long enough."""

    batch = QuickClock.batch


def test_lanes_are_joined_before_a_check_and_ended_behind_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def make(fresh: FreshMemory) -> Arm:
        backend = fresh.backend()
        ran: list[bool] = []

        def call() -> None:
            ran.clear()
            backend.launch(backend.lane(FORWARD), time.sleep, 0.002)
            backend.launch(backend.lane(FORWARD), ran.append, True)

        def check() -> None:
            done.append("check")
            assert ran

        return Arm(call=call, check=check)

    monkeypatch.setattr(LeanThreadsBackend, "close", lambda backend: done.append("close"))
    samples = Samples(point(a=make, b=make), HastyClock())
    samples.add_round(np.random.default_rng(1))
    assert done == ["check"] * 3 + ["close"] * 3 and samples.is_precise(1e-9)


def test_an_error_of_a_lane_is_raised_where_it_is_joined() -> None:
    fresh = FreshMemory(np.random.default_rng(1), "threads")
    backend = fresh.backend()

    def fail() -> None:
        raise WrongOutput("in the lane")

    backend.launch(backend.lane(FORWARD), fail)
    with pytest.raises(WrongOutput, match="in the lane"):
        fresh.join()
    fresh.close()


def test_rows_of_threads_are_checks_and_no_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "layer-load", "--shape", "llama-3-tiny", "--device", "threads", "--rounds", "6", "--seed", "1"]
    assert run([*line, "--out", str(tmp_path / "runs"), "-o", f"junit={tmp_path / 'junit.xml'}"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_record(folder)
    assert record.verdict is Verdict.PASS and len(record.bench) == 2
    for row in record.bench:
        assert (row.device, row.status, len(row.ratios)) == ("threads", "unknown", 6) and not has_price(row)
        assert row.note is not None and "times are no prices" in row.note
    shown = capsys.readouterr().out
    assert "2 of 2 rows checked" in shown and "floor" not in shown
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "right, no price" in page and "µs" not in page.partition('id="prices"')[2]
    junit = (tmp_path / "junit.xml").read_text(encoding="utf-8")
    assert "right in 6 rounds" in junit and "ratio" not in junit
    (table,) = compare([record, replace(record, run_id="again")]).tables
    assert not table.prices
    budget = Budget(case="layer-load", arm="layer-wise", baseline="no-wait", max_ratio=9)
    gated, problems, _ = gated_rows([record], [budget])
    assert not gated and len(problems) == 1 and "not measured" in problems[0].message


def test_too_few_rounds_over_threads_are_no_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_rounds(monkeypatch, lambda samples: samples.rounds == 1)
    line = ["bench", "guarded-read", "--shape", "llama-3-tiny", "--device", "threads", "--seed", "1"]
    assert run([*line, "--out", str(tmp_path)]) == 4
    assert "0 of 4 rows checked" in capsys.readouterr().out


@pytest.mark.usefixtures("late")
def test_a_wrong_arm_over_threads_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeanThreadsBackend, "launch", in_process)
    line = ["bench", "layer-load", "--shape", "glm-5.1-tiny", "--device", "threads", "--seed", "1"]
    assert run([*line, "--out", str(tmp_path)]) == 1
    (folder,) = tmp_path.iterdir()
    (finding,) = json.loads((folder / "run.json").read_text(encoding="utf-8"))["findings"]
    assert finding["code"] == "KV105" and "arm layer-wise: attention over loaded pages" in finding["message"]


class LeanStandIn(StandIn, LeanCudaBackend):
    """LeanCudaBackend, whose launches join the queue of the current stream. Its loads are the last to go on."""

    machine: ClassVar[Machine]

    def lane(self, name: str) -> Lane:
        is_new = name not in self._lanes
        lane = super().lane(name)
        if is_new and is_load(name):
            go_last(self.machine, self._streams[lane.index])
        return lane

    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        super().launch(lane, self._queue, partial(work, *args))

    def _queue(self, work: Callable[[], None]) -> None:
        (self.machine.current or self.machine.ordinary).call(work)


def go_last(machine: Machine, stream: Stream) -> None:
    """This stream goes on where the process waits and no other can go on."""
    step, jitter = machine.step, machine.jitter

    @contextmanager
    def without() -> Iterator[None]:
        all_of_them = machine.streams
        machine.streams = [each for each in all_of_them if each is not stream]
        yield
        machine.streams = all_of_them

    def step_last() -> bool:
        with without():
            has_moved = step()
        return has_moved or step()

    def jitter_without() -> None:
        with without():
            jitter()

    machine.step, machine.jitter = step_last, jitter_without  # type: ignore[method-assign]


class StreamOfItsOwn(LeanStandIn):
    """As it was: the forward lane is a stream of its own, and the process computes on another one."""

    def _stream_for(self, name: str) -> Any:
        return self._machine.stream()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[LeanStandIn], Maker], int]]:
    def wrong(kind: type[LeanStandIn], make: Maker) -> int:
        found = 0
        for seed in range(RUNS):
            with installed(seed) as machine:
                monkeypatch.setitem(memory.LEAN, "cuda", type("OfMachine", (kind,), {"machine": machine}))
                found += wrong_of(make, 1, "cuda")
        return found

    yield wrong


@pytest.mark.parametrize("name", BEHIND_LOADS)
def test_the_forward_lane_of_a_device_is_the_stream_of_the_process(
    name: str, stand_in: Callable[[type[LeanStandIn], Maker], int]
) -> None:
    make = BEHIND_LOADS[name]()
    assert stand_in(LeanStandIn, make) == 0
    if "graph" not in name:  # a graph is replayed on the lane, whichever stream that is
        assert stand_in(StreamOfItsOwn, make) > RUNS // 2


def test_an_arm_of_a_device_computes_on_the_forward_lane_alone() -> None:
    with installed(1) as machine:
        fresh = FreshMemory(np.random.default_rng(1), "cuda")
        fresh.device = torch.device("cpu")
        backend = type("OfMachine", (LeanStandIn,), {"machine": machine})(fresh)
        with pytest.raises(InternalError, match="expected to compute on lane forward"):
            backend.launch(backend.lane("load"), lambda: None)


def test_lean_backends_recycle_pinned_memory_alike() -> None:
    for kind in (LeanBackend, LeanThreadsBackend):
        backend = kind(FreshMemory(np.random.default_rng(1), "cpu"))
        first = backend.empty("a", (4, 8), torch.int64, Place.PINNED)
        assert backend.allocated() == {"a": 256}
        with pytest.raises(InternalError, match="allocated already"):
            backend.empty("a", (1,), torch.uint8, Place.DEVICE)
        backend.release("a")
        with pytest.raises(DoubleFree):
            backend.release("a")
        assert backend.empty("b", (32,), torch.int64, Place.PINNED).data_ptr() == first.data_ptr()
        assert backend.empty("c", (32,), torch.int64, Place.DEVICE).data_ptr() != first.data_ptr()
