"""The audit: every operation of the product declares what it touches, and one that declares less is named.

Invariants:
- A tensor call is judged by the bytes it really names, so a footprint that is merely near is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcheck.core.cache.backend.backend import Footprint, Operation, Place
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.buffers import BufferSpec
from kvcheck.core.cache.pools.pool import Extent
from kvcheck.core.cache.pools.request_table import IndexTable
from kvcheck.core.stress.audit import AuditBackend, Memory
from kvcheck.core.stress.runner import Outcome, ScheduleRunner
from kvcheck.core.stress.schedule import parse_line
from kvcheck.core.targets.builtin import BuiltinTarget
from kvcheck.core.targets.mutants import mutant
from kvcheck.core.targets.parts import FIXED, TargetParts
from kvcheck.core.workload.shapes import TINY_SHAPES


def audited(shape: str, parts: TargetParts = FIXED) -> Outcome:
    """One short schedule, watched. A look at a seal may race with the writes, so it declares no footprint."""
    plan = parse_line(f"retract-resume:shape={shape},seed=1,schedule=0,requests=12,strategy=random")
    outcome = ScheduleRunner(BuiltinTarget(parts), audit=True).run(plan)
    return replace(outcome, findings=tuple(each for each in outcome.findings if "seal.verify " not in each.message))


@pytest.mark.schedules
@pytest.mark.parametrize("shape", TINY_SHAPES)
def test_every_operation_of_the_product_declares_what_it_touches(shape: str) -> None:
    outcome = audited(shape)
    assert [found.message for found in outcome.findings] == []
    assert outcome.evidence.retractions and outcome.judged["audit"] > 1000


@pytest.mark.schedules
@pytest.mark.parametrize("schedule", [0, 1])
@pytest.mark.parametrize(
    ("scenario", "shape"),
    [("hicache", "deepseek-v3.2-tiny"), ("hicache-hybrid", "gpt-oss-tiny"), ("hicache-hybrid", "qwen3-next-tiny")],
)
def test_every_operation_of_the_prefix_cache_declares_what_it_touches(scenario: str, shape: str, schedule: int) -> None:
    requests = 16 if scenario == "hicache" else 24  # fewer load nothing in hybrid models; index pages are large
    plan = parse_line(f"{scenario}:shape={shape},seed=1,schedule={schedule},requests={requests}")
    outcome = ScheduleRunner(BuiltinTarget(), audit=True).run(plan)
    assert [found.message for found in outcome.findings] == []
    assert outcome.evidence.loads and outcome.evidence.backups and outcome.judged["audit"] > 1000


class SaveDeclaresOnePageLess(Offload):
    """The footprint of a copy leaves out the last page."""

    def _footprint(self, extent: Extent, space: str, buffer: BufferSpec, *, whole: bool = False) -> Footprint:
        declared = super()._footprint(extent, space, buffer, whole=whole)
        spans = None if declared.spans is None else declared.spans[:-1]
        assert declared.owners is not None
        return replace(declared, rows=declared.rows[:-1], spans=spans, owners=declared.owners[:-1])


class SaveDeclaresOneRowLess(Offload):
    """The last page is declared one token too short."""

    def _footprint(self, extent: Extent, space: str, buffer: BufferSpec, *, whole: bool = False) -> Footprint:
        declared = super()._footprint(extent, space, buffer, whole=whole)
        if declared.spans is not None:
            declared.spans[-1, 1] -= 1
        return declared


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("parts", "shape", "operation", "buffer"),
    [
        (replace(FIXED, offload=SaveDeclaresOnePageLess), "glm-5.1-tiny", "offload.save reads", "latent"),
        (replace(FIXED, offload=SaveDeclaresOnePageLess), "qwen3-next-tiny", "offload.restore writes", "ssm"),
        (replace(FIXED, offload=SaveDeclaresOneRowLess), "llama-3-tiny", "offload.restore writes", "k"),
        (mutant("offload-saves-wrong-pages").parts, "glm-5.1-tiny", "offload.save reads", "index_k_with_scale"),
    ],
)
def test_an_operation_that_declares_less_is_named(parts: TargetParts, shape: str, operation: str, buffer: str) -> None:
    found = [each for each in audited(shape, parts).findings if each.oracle == "audit"]
    assert {each.code for each in found} == {"KV306"}
    assert any(each.message.startswith(operation) and each.buffer == buffer for each in found)


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
    memory = Memory(space="full", buffer="k", layers=2, units=3, tokens=4)
    backend = AuditBackend(EagerBackend(), lambda name, shape: memory)
    words = backend.empty("k", (2, 12, 2), torch.int64, Place.DEVICE)
    reads, writes = (declared, ()) if verb == "reads" else ((), declared)
    operation = Operation("touch", (lambda: touch(words),))
    backend.submit(operation, lane=backend.lane("forward"), reads=reads, writes=writes)
    assert backend.judged > 0
    return [(each.verb, each.place) for each in backend.found]


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


def test_memory_of_no_name_and_released_memory_are_not_watched() -> None:
    memory = Memory(space="full", buffer="k", layers=1, units=1)
    backend = AuditBackend(EagerBackend(), lambda name, shape: memory if name == "known" else None)
    lane = backend.lane("forward")
    unknown = backend.empty("unknown", (4,), torch.int64, Place.DEVICE)
    known = backend.empty("known", (4,), torch.int64, Place.DEVICE)
    backend.submit(Operation("fill", (lambda: unknown.fill_(1),)), lane=lane)
    assert (backend.found, backend.judged) == ([], 0)
    backend.submit(Operation("fill", (lambda: known.fill_(1),)), lane=lane)
    assert [each.finding().message for each in backend.found] == [
        "fill writes full.k, layer 0, unit 0, which no footprint of it names"
    ]
    backend.release("known")
    backend.submit(Operation("fill", (lambda: known.fill_(1),)), lane=lane)
    assert len(backend.found) == 1


def test_a_table_is_watched_entry_by_entry() -> None:
    memory = Memory(space="table", buffer="t", layers=1, units=3, tokens=5)
    backend = AuditBackend(EagerBackend(), lambda name, shape: memory)
    table = IndexTable("t", rows=2, columns=5, backend=backend, lane=backend.lane("forward"))
    table.write(1, 2, np.array([7, 8]))
    assert backend.found == []
    assert table.read_view()[1].tolist() == [0, 0, 7, 8, 0]
