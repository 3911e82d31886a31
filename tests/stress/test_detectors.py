"""Targets broken in one place: each must be found, by the oracle and with the code named beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Lane
from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.buffers import BufferSet, BufferSpec
from kvcheck.core.cache.pools.pool import Extent, Holding, KVPool
from kvcheck.core.cache.pools.request_table import IndexTable
from kvcheck.core.run.plan import parse_line
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED, TargetParts


class UnzeroedSet(BufferSet):
    """A slot is cleared for its first owner only."""

    def zero(self, unit: int, lane: Lane) -> None:
        cleared: set[int] = self.__dict__.setdefault("cleared", set())
        if unit not in cleared:
            super().zero(unit, lane)
        cleared.add(unit)


class ForgetfulTable(IndexTable):
    """Entries are made and never taken back."""

    def assign(self, columns: IndexArray, values: IndexArray) -> None:
        if len(values) and values.any():
            super().assign(columns, values)


class ForgetfulPool(KVPool):
    """A pool whose window map keeps entries of pages that were freed."""

    def grow(self, holding: Holding, tokens: int, *, query: int) -> bool:
        self.tables["full_to_window"].__class__ = ForgetfulTable
        return super().grow(holding, tokens, query=query)


class WritesPadding(Offload):
    """Rows of a restore include the padding row, which gets the last row's words."""

    def _restored_rows(self, extent: Extent, space: str, buffer: BufferSpec) -> IndexArray:
        rows = super()._restored_rows(extent, space, buffer)
        if buffer.name not in ("v", "index_k_with_scale", "ssm") or len(rows) < 1:
            return rows
        return np.concatenate((rows[:-1], np.zeros(1, dtype=np.int64)))


class ForgetsTree(HiCache):
    """The prefix tree keeps its pages at close."""

    def close(self) -> None:
        self.settle()


BROKEN: dict[str, tuple[TargetParts, str, str]] = {
    "state not zeroed": (replace(FIXED, buffers=UnzeroedSet), "shape=qwen3-next-tiny,requests=24", "content KV102"),
    "map not zeroed": (replace(FIXED, pool=ForgetfulPool), "shape=gpt-oss-tiny,requests=16", "accounting KV401"),
    "padding written": (replace(FIXED, offload=WritesPadding), "shape=llama-3-tiny,requests=16", "content KV403"),
    "tree not emptied": (replace(FIXED, cache=ForgetsTree), "shape=llama-3-tiny,requests=32", "accounting KV401"),
}


@pytest.mark.schedules
@pytest.mark.parametrize("what", BROKEN)
def test_a_target_that_is_broken_in_one_place_is_found(what: str) -> None:
    parts, fields, wanted = BROKEN[what]
    plan = parse_line(f"{'hicache' if parts.cache is ForgetsTree else 'retract-resume'}:{fields},seed=1")
    engine, found = ScheduleRunner(BuiltinTarget(parts)), set[str]()
    for schedule in range(8):
        found |= {f"{each.oracle} {each.code}" for each in engine.run(replace(plan, schedule=schedule)).findings}
        if wanted in found:
            return
    pytest.fail(f"expected {wanted}, found {sorted(found)}")
