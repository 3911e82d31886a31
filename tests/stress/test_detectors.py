"""Targets broken in one place: each must be found, by the oracle and with the code named beside it.

Invariants:
- A broken part restates nothing but the line it breaks; the unbroken target passes the same plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.base.record import Verdict
from kvcheck.core.cache.backend.backend import Lane, Signal
from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.buffers import BufferSet, BufferSpec
from kvcheck.core.cache.pools.pool import Extent, Holding, KVPool
from kvcheck.core.cache.pools.request_table import IndexTable
from kvcheck.core.cache.scheduler.request import RunningRequest
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED, TargetParts


class UnzeroedSet(BufferSet):
    """A slot is cleared for its first owner only."""

    def zero(self, unit: int, lane: Lane) -> None:
        """Whoever comes later finds the state of whoever was there."""
        cleared: set[int] = self.__dict__.setdefault("cleared", set())
        if unit not in cleared:
            super().zero(unit, lane)
        cleared.add(unit)


class ForgetfulTable(IndexTable):
    """Entries are made and never taken back."""

    def assign(self, columns: IndexArray, values: IndexArray) -> None:
        """Zeros are not written."""
        if len(values) and values.any():
            super().assign(columns, values)


class ForgetfulPool(KVPool):
    """A pool whose window map keeps entries of pages that were freed."""

    def grow(self, holding: Holding, tokens: int, *, query: int) -> bool:
        """From here on zeros are not written."""
        self.tables["full_to_window"].__class__ = ForgetfulTable
        return super().grow(holding, tokens, query=query)


class ReleasesOnceSaved(Offload):
    """Host memory goes back before anybody has restored from it."""

    def save(self, holding: Holding) -> OffloadedKV:
        """The backend's memory is released; the value lives on."""
        value = super().save(holding)
        self._backend.wait(value.saved)
        for kept in value.buffers:
            self._backend.release(kept.memory)
        return value

    def discard(self, offloaded: OffloadedKV) -> None:
        """There is nothing left to give back."""


class DiscardsOnceSubmitted(Offload):
    """A value is dropped while its restore is pending."""

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        """Dropped too early."""
        done = super().restore(offloaded, holding)
        super().discard(offloaded)
        return done

    def discard(self, offloaded: OffloadedKV) -> None:
        """It has been done."""


class WritesPadding(Offload):
    """Rows of a restore include the padding row, which gets the last row's words."""

    def _restored_rows(self, extent: Extent, space: str, buffer: BufferSpec) -> IndexArray:
        rows = super()._restored_rows(extent, space, buffer)
        if buffer.name not in ("v", "index_k_with_scale", "ssm") or len(rows) < 1:
            return rows
        return np.concatenate((rows[:-1], np.zeros(1, dtype=np.int64)))


class SavesWithoutSignal(Offload):
    """Whoever waits for a save waits for nothing, so pages are freed while they are read."""

    def save(self, holding: Holding) -> OffloadedKV:
        """The signal is one that was never recorded."""
        return replace(super().save(holding), saved=Signal())


class KeepsLocks(Scheduler):
    """The prefix tree is left locked when one of the last requests finishes."""

    def _finish(self, active: RunningRequest) -> None:
        """One lock too many."""
        if self.parts.cache is not None and active.lease is not None and not self._waiting:
            self.parts.cache.tree.lock(active.lease.node)
        super()._finish(active)


class ForgetsTree(HiCache):
    """The prefix tree keeps its pages at close."""

    def close(self) -> None:
        """Transfers are finished, and nothing is given back."""
        self.settle()


RETRACT, MORE, CACHED = ("retract-resume", 16), ("retract-resume", 24), ("hicache", 32)
"""Scenarios that decode under pressure, and beside a prefix tree; with their requests. MORE: than there are slots."""

# (part, scenario, shape, oracle, code)
BROKEN: dict[str, tuple[TargetParts, tuple[str, int], str, str, str]] = {
    "state not zeroed": (replace(FIXED, buffers=UnzeroedSet), MORE, "qwen3-next-tiny", "content", "KV102"),
    "map not zeroed": (replace(FIXED, pool=ForgetfulPool), RETRACT, "gpt-oss-tiny", "accounting", "KV401"),
    "value released": (replace(FIXED, offload=ReleasesOnceSaved), RETRACT, "llama-3-tiny", "content", "KV104"),
    "value discarded": (replace(FIXED, offload=DiscardsOnceSubmitted), RETRACT, "llama-3-tiny", "liveness", "KV202"),
    "padding written, tokens": (replace(FIXED, offload=WritesPadding), RETRACT, "llama-3-tiny", "content", "KV403"),
    "padding written, pages": (replace(FIXED, offload=WritesPadding), RETRACT, "glm-5.1-tiny", "content", "KV403"),
    "padding written, slots": (replace(FIXED, offload=WritesPadding), MORE, "qwen3-next-tiny", "content", "KV403"),
    "save not waited for": (replace(FIXED, offload=SavesWithoutSignal), RETRACT, "llama-3-tiny", "liveness", "KV202"),
    "lock left": (replace(FIXED, scheduler=KeepsLocks), CACHED, "llama-3-tiny", "accounting", "KV401"),
    "tree not emptied": (replace(FIXED, cache=ForgetsTree), CACHED, "llama-3-tiny", "accounting", "KV401"),
}


def outcomes(parts: TargetParts, cell: tuple[str, int], name: str, schedules: int = 8) -> Iterator[Outcome]:
    """The first schedules of a small cell."""
    engine = ScheduleRunner(BuiltinTarget(parts))
    scenario, requests = cell
    for schedule in range(schedules):
        yield engine.run(Plan(scenario=scenario, shape=name, seed=1, schedule=schedule, requests=requests))


@pytest.mark.schedules
@pytest.mark.parametrize("what", BROKEN)
def test_a_target_that_is_broken_in_one_place_is_found(what: str) -> None:
    parts, cell, name, oracle, code = BROKEN[what]
    found: set[tuple[str, str]] = set()
    for outcome in outcomes(parts, cell, name):
        found |= {(each.oracle, each.code) for each in outcome.findings}
        if (oracle, code) in found:
            return
    pytest.fail(f"expected {oracle} {code}, found {sorted(found)}")


@pytest.mark.schedules
@pytest.mark.parametrize(("cell", "name"), sorted({(cell, name) for _, cell, name, _, _ in BROKEN.values()}))
def test_the_unbroken_target_passes_the_same_plans(cell: tuple[str, int], name: str) -> None:
    resumes = 0
    for outcome in outcomes(FIXED, cell, name, schedules=2):
        assert (outcome.findings, outcome.broken_oracles) == ((), ())
        assert outcome.verdict is Verdict.PASS
        resumes += outcome.evidence.resumes or 0
    assert resumes
