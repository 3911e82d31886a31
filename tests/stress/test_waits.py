"""Waits: one that is put in orders what it names; of several candidates the one that removes a failure is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from kvcheck.core.base.errors import Hang
from kvcheck.core.cache.backend.backend import Backend, Lane, Operation
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.run.plan import parse_line
from kvcheck.core.stress import wait_search
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.strategies import LazyStrategy
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant, mutant_target
from kvcheck.core.stress.targets.target import TargetParts
from kvcheck.core.stress.wait_search import Waits, search_waits
from kvcheck.core.stress.waits import Wait, Waiter, WaitingBackend

KEYS = "index-key-reader-without-wait"
ACKS = "ack-by-kv-alone"
READ = "hicache:shape=glm-5.1-micro,strategy=answers,seed=1,schedule=10,requests=2,pages=2,choices=none,extras=no"
SAVED = (
    "retract-resume:shape=glm-5.1-micro,strategy=answers,seed=1,schedule=5,requests=1,pages=2,choices=none,extras=no"
)
STATUS = (
    "nvlink-aux:shape=llama-3-micro,strategy=answers,seed=1,schedule=16,requests=2,pages=2,faults=acts.aborts.transfers,"
    "choices=m27.m31.m35.m39.m43.m44.m51.m54.m56.m62.m67.27.m74.m79.m84.m89.m94.m95.m117.66,extras=no"
)
NAMED = Wait(earlier="hicache.load", earlier_lane="hicache.h2d", later="decode.read_index_key", later_lane="forward")
COPY_READ = Wait(earlier="copy", earlier_lane="h2d", later="read", later_lane="forward")


def ordered(make: Callable[[Backend], Backend], *, is_captured: bool = False) -> list[str]:
    """The order in which a copy and a read run, where the machine does last what it is asked first."""
    ran: list[str] = []
    inner = SimulatedBackend(LazyStrategy())
    backend = make(inner)
    lanes = {name: backend.lane(name) for name in ("rank-0:h2d.1.side", "rank-0:forward")}
    backend.submit(Operation("copy", (lambda: ran.append("copy"),)), lane=lanes["rank-0:h2d.1.side"])
    read, forward = Operation("read", (lambda: ran.append("read"),)), lanes["rank-0:forward"]
    if is_captured:
        with backend.capture(forward) as graph:
            backend.submit(read, lane=forward)
        backend.replay(graph)
    else:
        backend.submit(read, lane=forward)
    backend.drain()
    return ran


@pytest.mark.parametrize("is_captured", [False, True], ids=["queued", "captured"])
def test_a_wait_orders_what_it_names_and_nothing_else(is_captured: bool) -> None:
    assert ordered(lambda inner: inner, is_captured=is_captured) == ["read", "copy"]
    for wait in COPY_READ.stronger():
        assert ordered(lambda inner, wait=wait: WaitingBackend(inner, wait), is_captured=is_captured) == [
            "copy",
            "read",
        ]
    for other in (replace(COPY_READ, earlier="load"), replace(COPY_READ, later="write")):
        assert ordered(lambda inner, wait=other: WaitingBackend(inner, wait), is_captured=is_captured) == [
            "read",
            "copy",
        ]


def search(line: str, runner: ScheduleRunner, code: str, said: str = "") -> Waits:
    """What a search says of the failure of that code, whose message has that text."""
    plan = parse_line(line)
    made = [each for each in runner.run(plan).findings if each.code == code and said in each.message]
    return search_waits(runner, plan, made[0], most=12)


def lacking(*names: str) -> ScheduleRunner:
    """A build with the bugs of all these mutants, each in a part of its own."""
    parts = mutant(names[0]).parts
    for name in names[1:]:
        theirs, fixed = mutant(name).parts, TargetParts()
        changed = [row.name for row in fields(TargetParts) if getattr(theirs, row.name) is not getattr(fixed, row.name)]
        parts = replace(parts, **{each: getattr(theirs, each) for each in changed})
    return ScheduleRunner(BuiltinTarget(parts))


@pytest.mark.schedules
@pytest.mark.parametrize("names", [(KEYS,), (KEYS, ACKS)], ids=["one", "two"])
def test_the_missing_wait_is_named_also_where_another_one_is_missing_too(names: tuple[str, ...]) -> None:
    found = search(READ, lacking(*names), "KV201", "which hicache.load")
    assert found.wait == NAMED and found.failed and found.cleared == found.explored == 12
    assert found.text().startswith(f"{NAMED.text()}: with it, 0 of 12 schedules failed; without it, ")


@pytest.mark.schedules
def test_a_failure_without_a_race_has_no_wait() -> None:
    found = search(SAVED, ScheduleRunner(mutant_target("offload-skips-index-buffer")), "KV304")
    assert found.wait is None and found.failed and not found.tried
    assert found.text() == "none missing"


@pytest.mark.schedules
def test_on_the_fixed_build_nothing_is_named() -> None:
    made = lacking(KEYS).run(parse_line(READ)).findings[0]
    found = search_waits(ScheduleRunner(BuiltinTarget()), parse_line(READ), made, most=6)
    assert found == Waits(wait=None, tried=0, failed=0, explored=6)


@pytest.mark.schedules
def test_a_wait_that_hangs_is_not_named_and_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(WaitingBackend):
        """Its lane waits never end."""

        def _make(self, lane: Lane) -> None:
            if self._wait.waiter is Waiter.LANE and self._latest:
                raise Hang("no pending operation can satisfy this wait")
            super()._make(lane)

    monkeypatch.setattr(wait_search, "WaitingBackend", Hanging)
    found = search(READ, lacking(KEYS), "KV201")
    assert found.wait == replace(NAMED, waiter=Waiter.PROCESS) and found.tried > 2


@pytest.mark.schedules
def test_a_status_before_its_data_waits_for_the_copy() -> None:
    name = "room-alone-is-checked"
    runner = ScheduleRunner(mutant_target(name))
    plan = parse_line(STATUS)
    made = [each for each in runner.run(plan).findings if each.code == "KV203" and each.buffer is not None]
    found = search_waits(runner, plan, made[0], most=8)
    assert found.wait is not None and found.wait.later == "wire.message.status" and found.wait.waiter is Waiter.LANE
