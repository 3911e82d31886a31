"""The audit: every operation of the product declares what it touches, and one that declares less is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from rigs.settings import with_settings

from kvcheck.core.cache.backend.backend import Footprint, Operation, Place
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.hicache.host_pool import HOST_LAYOUTS
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.buffers import BufferSpec
from kvcheck.core.cache.pools.pool import Extent
from kvcheck.core.cache.pools.request_table import IndexTable
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import FLOOR, Plan, parse_line
from kvcheck.core.stress.audit import WATCHED_FIRST, AuditBackend, Excess, is_audited
from kvcheck.core.stress.named_memory import NamedAllocation, naming
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.strategies import EagerStrategy
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED, TargetParts
from kvcheck.core.stress.workload.shapes import TINY_SHAPES
from kvcheck.core.stress.workload.shapes import shape as shape_named


def audited(line: str, parts: TargetParts = FIXED) -> Outcome:
    return ScheduleRunner(BuiltinTarget(parts), audit=True).run(parse_line(line))


RETRACTS = "retract-resume:shape={},seed=1,schedule=0,requests=12,strategy=random"
TWO = ("pd-transfer:shape=llama-3-fp8-tiny", "pd-transfer:shape=qwen3-next-tiny", "nvlink-aux:shape=gpt-oss-tiny")
SMALL = parse_line("hicache:shape=llama-3-micro,seed=1,requests=16")
AUDITED = [
    *((RETRACTS.format(shape), "retractions") for shape in TINY_SHAPES),
    # These load: fewer requests hardly do, and index pages are large.
    ("hicache:shape=deepseek-v3.2-tiny,seed=1,schedule=1,requests=16", "loads"),
    ("hicache-hybrid:shape=gpt-oss-tiny,seed=1,schedule=4,requests=16", "loads"),
    ("hicache-hybrid:shape=qwen3-next-tiny,seed=1,schedule=0,requests=24", "loads"),
    *((with_settings(SMALL, f"host layout:{layout}").line(), "backups") for layout in HOST_LAYOUTS),
    # Of two ranks and one: each row of the decode rank is written in two parts.
    *((with_settings(parse_line(f"{cell},seed=1,requests=3"), "rank layout:2x1").line(), "transfers") for cell in TWO),
]


@pytest.mark.schedules
@pytest.mark.parametrize(("line", "shown"), AUDITED)
def test_every_operation_of_the_product_declares_what_it_touches(line: str, shown: str) -> None:
    outcome = audited(line)
    assert [found.message for found in outcome.findings] == []
    assert getattr(outcome.evidence, shown) and outcome.judged["audit"] > 1000


class SaveDeclaresOneRowLess(Offload):
    """The last page is declared one token too short."""

    def _footprint(self, extent: Extent, space: str, buffer: BufferSpec, *, whole: bool = False) -> Footprint:
        declared = super()._footprint(extent, space, buffer, whole=whole)
        if declared.spans is not None:
            declared.spans[-1, 1] -= 1
        return declared


@pytest.mark.schedules
def test_an_operation_that_declares_one_row_less_is_named() -> None:
    outcome = audited(RETRACTS.format("llama-3-tiny"), replace(FIXED, offload=SaveDeclaresOneRowLess))
    found = [each for each in outcome.findings if each.oracle == "audit"]
    assert {each.code for each in found} == {"KV306"}
    assert any(each.message.startswith("offload.restore writes") and each.buffer == "k" for each in found)


# Call by call: 2 layers of 3 pages of 4 tokens, 2 words a token

Touch = Callable[[torch.Tensor], object]
ROWS = torch.tensor([5, 6])  # page 1, tokens 1 and 2


def declaring(*spans: tuple[int, int, int, int]) -> tuple[Footprint, ...]:
    """Footprints (page, start, stop, layer)."""
    return tuple(
        Footprint("full", ("k",), (layer, layer + 1), np.array([page]), np.array([[start, stop]]))
        for page, start, stop, layer in spans
    )


def excess(touch: Touch, declared: Sequence[Footprint], verb: str) -> list[tuple[str, int]]:
    """What an operation that runs `touch` is found to touch beyond that: verb and cell."""
    memory = NamedAllocation(space="full", buffer="k", layers=2, units=3, tokens=4)
    backend = AuditBackend(EagerBackend(), lambda name, shape: memory)
    words = backend.empty("k", (2, 12, 2), torch.int64, Place.DEVICE)
    reads, writes = (declared, ()) if verb == "reads" else ((), declared)
    operation = Operation("touch", (lambda: touch(words),))
    backend.submit(operation, lane=backend.lane("forward"), reads=reads, writes=writes)
    assert backend.judged > 0
    return [(each.verb, each.place) for each in backend.found if isinstance(each, Excess)]


TOUCHES: tuple[tuple[str, Touch, tuple[tuple[int, int, int, int], ...]], ...] = (
    ("reads", lambda w: w[0, 5:7].clone(), ((1, 1, 3, 0),)),
    ("reads", lambda w: w.index_select(1, ROWS), ((1, 1, 3, 0), (1, 1, 3, 1))),
    ("reads", lambda w: w[1][ROWS], ((1, 1, 3, 1),)),
    ("reads", lambda w: w[1].view(3, 4, 2)[torch.tensor([1, 1]), torch.tensor([1, 2])], ((1, 1, 3, 1),)),
    ("reads", lambda w: torch.cat([w[0, 5], w[0, 6]]), ((1, 1, 3, 0),)),
    ("reads", lambda w: torch.zeros(2, 2, dtype=torch.int64).copy_(w[1, 5:7]), ((1, 1, 3, 1),)),
    ("reads", lambda w: w.view(torch.int32)[0, 5:7, 1:2].sum(), ((1, 1, 3, 0),)),
    ("writes", lambda w: w[0, 5:7].fill_(1), ((1, 1, 3, 0),)),
    ("writes", lambda w: w[0].index_copy_(0, ROWS, torch.ones(2, 2, dtype=torch.int64)), ((1, 1, 3, 0),)),
    ("writes", lambda w: w[1, 5:7].copy_(torch.ones(2, 2, dtype=torch.int64)), ((1, 1, 3, 1),)),
    ("writes", lambda w: w[1].view(3, 4, 2).index_put_((torch.tensor([1, 1]), ROWS - 4), ROWS[:1]), ((1, 1, 3, 1),)),
)


@pytest.mark.parametrize(("verb", "touch", "spans"), TOUCHES)
def test_a_call_is_mapped_to_exactly_its_cells(
    verb: str, touch: Touch, spans: tuple[tuple[int, int, int, int], ...]
) -> None:
    assert excess(touch, declaring(*spans), verb) == []
    for index, (page, start, stop, layer) in enumerate(spans):
        for narrow, cell in (((page, start, stop - 1, layer), stop - 1), ((page, start + 1, stop, layer), start)):
            less = declaring(*spans[:index], narrow, *spans[index + 1 :])
            assert (verb, (layer * 3 + page) * 4 + cell) in excess(touch, less, verb)


def test_memory_that_is_not_in_the_table_is_named_by_its_own_name() -> None:
    backend = AuditBackend(EagerBackend(), naming(shape_named("llama-3-tiny")))
    lane = backend.lane("d2h")
    for name in ("offload.staging", "device.staging", "host.layer-first.full.staging", "staging"):
        staging = backend.empty(name, (4,), torch.int64, Place.PINNED)
        fill = Operation("fill", (partial(staging[1:3].fill_, 1),))
        backend.submit(fill, lane=lane, writes=(Footprint(name, ("",), (0, 1), np.array([1, 2])),))
        assert backend.found == []
        backend.submit(fill, lane=lane, writes=(Footprint(name, ("",), (0, 1), np.array([1])),))
        backend.submit(Operation("copy", (staging.clone,)), lane=lane)
        assert [each.finding().message for each in backend.found] == [
            f"fill writes {name}, layer 0, unit 2, which no footprint of it names",
            f"copy reads {name}, layer 0, unit 0, which no footprint of it names",
        ]
        backend.found.clear()


def test_released_memory_is_not_watched() -> None:
    memory = NamedAllocation(space="full", buffer="k", layers=1, units=1)
    backend = AuditBackend(EagerBackend(), lambda name, shape: memory)
    lane = backend.lane("forward")
    known = backend.empty("known", (4,), torch.int64, Place.DEVICE)
    fill = Operation("fill", (lambda: known.fill_(1),))
    backend.submit(fill, lane=lane)
    assert [each.finding().message for each in backend.found] == [
        "fill writes full.k, layer 0, unit 0, which no footprint of it names"
    ]
    backend.release("known")
    backend.submit(fill, lane=lane)
    assert len(backend.found) == 1


def test_memory_that_no_backend_handed_out_belongs_to_one_operation() -> None:
    backend = AuditBackend(EagerBackend(), lambda name, shape: None)
    lane = backend.lane("d2h")
    scratch, codes = torch.zeros(4), torch.ones(4)

    def own() -> None:
        torch.empty(4).copy_(codes)

    backend.submit(Operation("stage", (lambda: scratch.copy_(codes), lambda: scratch.add_(1))), lane=lane)
    backend.submit(Operation("read", (lambda: codes.clone(), own)), lane=lane)
    backend.submit(Operation("again", (lambda: codes.clone(), own)), lane=lane)
    assert backend.findings() == (), "its own scratch, what is read alone, and what a chunk makes"
    backend.submit(Operation("drain", (lambda: scratch.clone(),)), lane=lane)
    (found,) = backend.findings()
    assert (found.code, found.oracle) == ("KV306", "audit")
    assert found.message.startswith("drain reads 16 bytes that an earlier stage wrote, in memory that no backend")


def test_an_address_that_is_used_again_is_other_memory() -> None:
    backend = AuditBackend(EagerBackend(), lambda name, shape: None)
    lane = backend.lane("d2h")
    for _ in range(64):  # the allocator gives the same address again and again
        scratch = torch.zeros(4096)
        backend.submit(Operation("fill", (partial(scratch.fill_, 1),)), lane=lane)
        del scratch
    assert backend.findings() == ()


def test_the_snapshot_of_a_pageable_source_is_watched() -> None:
    backend = AuditBackend(SimulatedBackend(EagerStrategy()), lambda name, shape: None)
    lane = backend.lane("h2d")
    source, target = (backend.empty(name, (4,), torch.int64, Place.PAGEABLE) for name in ("source", "target"))

    def stage() -> tuple[Callable[[], object], ...]:
        taken = source[:2].clone()
        return (lambda: target[:2].copy_(taken),)

    def footprint(name: str, *rows: int, place: Place = Place.DEVICE) -> tuple[Footprint, ...]:
        return (Footprint(name, ("",), (0, 1), np.array(rows), place=place),)

    copy = Operation("copy", (), stage=stage)  # type: ignore[arg-type]
    for reads, writes, found in (((0, 1), (0, 1), []), ((0,), (0, 1), ["reads"]), ((0, 1), (1,), ["writes"])):
        declared = footprint("source", *reads, place=Place.PAGEABLE), footprint("target", *writes)
        backend.wait(backend.submit(copy, lane=lane, reads=declared[0], writes=declared[1]))
        assert [each.verb for each in backend.found] == found
        backend.found.clear()


def test_a_part_of_a_row_stands_for_the_row() -> None:
    part = Footprint("full", ("k/0", "k/1"), (0, 1), np.array([1]))
    assert excess(lambda w: w[0, 5:7].clone(), (part,), "reads") == []
    assert excess(lambda w: w[0, 5:7].clone(), (replace(part, buffers=("k2/0",)),), "reads") != []


# Which schedules, which operations


def test_one_schedule_in_seven_is_audited_and_its_replay_too() -> None:
    plan = Plan(scenario="hicache", shape="llama-3-tiny")
    audited = [number for number in range(24) if is_audited(replace(plan, schedule=number))]
    assert audited == [2, 9, 16, 23] and audited[0] < FLOOR
    third = replace(plan, schedule=2)
    for same in (replace(third, mutant="load-without-pin"), replace(third, strategy="replay", choices="x")):
        assert is_audited(same)
    for other in (replace(third, strategy="flip"), replace(third, backend="eager"), replace(third, transport="tcp")):
        assert not is_audited(other)


@pytest.mark.schedules
def test_the_audit_changes_nothing_but_what_is_judged() -> None:
    plan = parse_line("hicache:shape=llama-3-tiny,seed=1,schedule=2,requests=16")
    runner = ScheduleRunner(BuiltinTarget())
    some, again = runner.run(plan), runner.run(plan)
    every = ScheduleRunner(BuiltinTarget(), audit=True, workloads=runner.workloads).run(plan)
    assert some.digest == again.digest == every.digest and some.judged == again.judged
    assert 1000 < some.judged["audit"] < every.judged["audit"]
    assert "audit" not in runner.run(replace(plan, schedule=3)).judged


def test_of_one_name_the_first_operations_are_watched_and_then_one_in_so_many() -> None:
    backend = AuditBackend(EagerBackend(), lambda name, shape: None, every=8)
    words, lane = backend.empty("words", (4,), torch.int64, Place.DEVICE), backend.lane("forward")
    watched = []
    for number in range(1, WATCHED_FIRST + 25):
        backend.submit(Operation("fill", (lambda: words.fill_(1),)), lane=lane)
        watched += [number] if backend.found else []
        backend.found.clear()
    first, last = range(1, WATCHED_FIRST + 1), range(WATCHED_FIRST + 8, WATCHED_FIRST + 25, 8)
    assert watched == [*first, *last]


def test_a_table_is_watched_entry_by_entry() -> None:
    memory = NamedAllocation(space="table", buffer="t", layers=1, units=3, tokens=5)
    backend = AuditBackend(EagerBackend(), lambda name, shape: memory)
    table = IndexTable("t", rows=2, columns=5, backend=backend, lane=backend.lane("forward"))
    table.write(1, 2, np.array([7, 8]))
    assert backend.found == []
    assert table.read_view()[1].tolist() == [0, 0, 7, 8, 0]


def declared(span: tuple[int, int]) -> list[str]:
    """What the audit says of an operation that declares all of page 1 and this span of page 2, of 4 tokens."""
    memory = NamedAllocation(space="full", buffer="k", layers=1, units=3, tokens=4)
    backend = AuditBackend(EagerBackend(), lambda name, shape: memory)
    backend.empty("device.full.k", (1, 12, 1), torch.int64, Place.DEVICE)
    footprint = Footprint("full", ("k",), (0, 1), np.array([1, 2]), np.array([(0, 4), span]))
    backend.submit(Operation("copy", ()), lane=backend.lane("forward"), reads=(footprint,))
    return [found.message for found in backend.findings()]


@pytest.mark.parametrize(
    ("span", "is_named"), [((0, 4), 0), ((3, 4), 0), ((2, 2), 0), ((0, 5), 1), ((4, 5), 1), ((-1, 2), 1), ((3, 2), 1)]
)
def test_a_span_that_leaves_its_unit_is_named(span: tuple[int, int], is_named: int) -> None:
    where = f"unit 2, rows {span[0]} to {span[1]}, and a unit has 4"
    assert declared(span) == [f"copy declares that it reads full.k, {where}"] * is_named
