"""The ordering oracle on the product: green as it is, and every wait that is taken out is missed, in one eager run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvcheck.core.cache.backend.backend import Backend, Lane, Signal
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.pool import Extent, Holding, KVPool
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import parse_line
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED, TargetParts
from kvcheck.core.stress.workload.shapes import TINY_SHAPES


def run(shape: str, parts: TargetParts = FIXED, strategy: str = "eager") -> Outcome:
    """One short schedule."""
    backend = ",backend=eager" if strategy == "eager" else f",strategy={strategy}"
    plan = parse_line(f"retract-resume:shape={shape},seed=1,schedule=0,requests=12{backend}")
    return ScheduleRunner(BuiltinTarget(parts)).run(plan)


@pytest.mark.schedules
@pytest.mark.parametrize(("shape", "strategy"), [*((name, "eager") for name in TINY_SHAPES), ("llama-3-tiny", "lazy")])
def test_the_fixed_build_is_ordered_and_was_judged(shape: str, strategy: str) -> None:
    outcome = run(shape, strategy=strategy)
    assert [found.message for found in outcome.findings] == []
    assert outcome.evidence.retractions
    assert outcome.evidence.orderings_checked == outcome.judged["ordering"] > 100


class RestoreTellsNobody(Offload):
    """The signal of a restore was never recorded, so that whoever waits for it does not wait."""

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        super().restore(offloaded, holding)
        return self._backend.signal()


class SaveTellsNobody(Offload):
    """A save's signal was never recorded, and nothing pins what it reads: asking whether a pin is gone is an edge."""

    def _hold(self, kept: object, extent: Extent, done: Signal) -> None:
        return

    def save(self, holding: Holding) -> OffloadedKV:
        return replace(super().save(holding), saved=self._backend.signal())


class RestoreMarksTooEarly(Offload):
    """The signal of a restore is recorded before its copies are queued."""

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        done = self._backend.signal()
        self._backend.record(done, lane=self._h2d)
        super().restore(offloaded, holding)
        return done


class RestoreMarksTheOtherLane(Offload):
    """The signal of a restore is recorded in the lane of the saves."""

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        done = super().restore(offloaded, holding)
        self._backend.record(done, lane=self._d2h)
        return done


class ClearsBesides(MetadataBuffers):
    """Metadata slots are cleared on a lane of their own, and nobody waits."""

    def clear(self, slot: int) -> None:
        forward, self._lane = self._lane, self._backend.lane("clear")
        wait, self._backend.wait = self._backend.wait, lambda signal, *, lane=None: None  # type: ignore[method-assign]
        super().clear(slot)
        self._backend.wait = wait  # type: ignore[method-assign]
        self._lane = forward


class ZeroesBesides(KVPool):
    """State slots are zeroed on the lane of the loads."""

    def open(self, request: int) -> Holding | None:
        forward, self.forward = self.forward, self.backend.lane("h2d")
        holding = super().open(request)
        self.forward = forward
        return holding


class TablesBesides(KVPool):
    """Table entries are written on a lane of their own."""

    def __init__(self, *args: object, backend: Backend, **kwargs: object) -> None:
        super().__init__(*args, backend=_OtherLane(backend), **kwargs)  # type: ignore[arg-type]
        self.forward = backend.lane("forward")


class _OtherLane:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def lane(self, name: str) -> Lane:
        return self._backend.lane("tables" if name == "forward" else name)


LOAD = "forward does not wait for h2d #"
MISSING: tuple[tuple[TargetParts, str, str, str, str], ...] = (
    (replace(FIXED, offload=RestoreTellsNobody), "llama-3-tiny", "KV201", "k", LOAD),
    (replace(FIXED, offload=RestoreTellsNobody), "glm-5.1-tiny", "KV201", "index_k_with_scale", LOAD),
    (replace(FIXED, offload=RestoreMarksTooEarly), "deepseek-v3-tiny", "KV201", "latent", LOAD),
    (replace(FIXED, offload=RestoreMarksTheOtherLane), "qwen3-next-tiny", "KV201", "ssm", LOAD),
    (replace(FIXED, offload=SaveTellsNobody), "llama-3-tiny", "KV202", "k", "forward does not wait for d2h #"),
    (replace(FIXED, offload=SaveTellsNobody), "llama-3-tiny", "KV201", "full.k", "h2d does not wait for d2h #"),
    (replace(FIXED, metadata=ClearsBesides), "llama-3-tiny", "KV202", "metadata", "does not wait for "),
    (replace(FIXED, pool=ZeroesBesides), "qwen3-next-tiny", "KV201", "conv", LOAD),
    (replace(FIXED, pool=TablesBesides), "gpt-oss-tiny", "KV201", "req_to_token", "forward does not wait for tables #"),
)


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("parts", "shape", "code", "buffer", "edge"), MISSING, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wait_that_is_taken_out_is_missed(parts: TargetParts, shape: str, code: str, buffer: str, edge: str) -> None:
    found = [each for each in run(shape, parts).findings if each.oracle == "ordering"]
    said = [each.message for each in found if (each.code, each.buffer) == (code, buffer)]
    assert said, [each.message for each in found]
    assert edge in re.sub("(prefill|decode)-0:", "", said[0])


@pytest.mark.schedules
def test_both_requests_and_the_host_tier_are_named() -> None:
    found = run("llama-3-tiny", replace(FIXED, offload=SaveTellsNobody)).findings
    reuse = next(each for each in found if each.oracle == "ordering" and each.code == "KV202")
    value = next(each for each in found if each.oracle == "ordering" and each.code == "KV201")
    assert reuse.request != reuse.seen_request and None not in (reuse.request, reuse.seen_request)
    assert (reuse.tier, value.tier, value.request) == ("device", "host", value.seen_request)
