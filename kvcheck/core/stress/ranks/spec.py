"""RankSpec and RankSummary: input and report of a rank's process, as lines of JSON.

    to the rank      RankSpec, then {"addresses": ...} for a prefill rank, then {"close": true}; end of input: the end
    from the rank    listening, ready, finished, failed, aborted, faulted, stalled, fenced, lost, idle, closed, error

Invariants:
- The plan's line alone decides the work: every rank makes the same jobs from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence, Finding, to_plain
from kvcheck.core.cache.backend.region_backend import RegionBackend
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.run.plan import PROCESS_RANKS, Plan, parse_ranks, workload_seed
from kvcheck.core.stress.plan_scenario import scenario_of, variant_of
from kvcheck.core.stress.scenarios.pd_transfer import MESSAGES, PDTransfer
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.scenarios.variants import Variant
from kvcheck.core.stress.workload.shapes import shape as shape_named


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """key: of the run; links without it are refused. patience_s: for a room. lease_s: for the silence of a peer.
    network: where its engine's process is; None: with all others. extra: for test programs, such as ending half-way."""

    line: str
    end: str
    rank: int
    prefill: int
    decode: int
    key: str
    meeting: str
    patience_s: int
    lease_s: float
    network: str | None = None
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.end}-{self.rank}"

    @property
    def peers(self) -> list[str]:
        other, count = ("decode", self.decode) if self.end == "prefill" else ("prefill", self.prefill)
        return [f"{other}-{rank}" for rank in range(count)]

    def to_json(self) -> str:
        return json.dumps(to_plain(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """counts: space -> (free, total), when idle. returned: the same after close. decisions: a checksum of its rounds'
    decisions; equal on all ranks of an end. sealed: verified bytes by request."""

    counts: dict[str, tuple[int, ...]]
    returned: dict[str, tuple[int, ...]]
    decisions: int
    sealed: dict[str, int]
    quarantined: int
    findings: tuple[Finding, ...]
    evidence: Evidence


def pair_scenario(plan: Plan) -> PDTransfer:
    """Raises UsageError unless the plan's scenario has a prefill and a decode end."""
    scenario = scenario_of(plan)
    if not isinstance(scenario, PDTransfer):
        raise UsageError(f"{plan.scenario} runs in one process, over loopback; got transport={plan.transport}")
    return scenario


def work_of(plan: Plan) -> tuple[ModelShape, Load]:
    shape = shape_named(plan.shape)
    load = pair_scenario(plan).load(
        shape, seed=workload_seed(plan), requests=plan.requests, trace=plan.trace, variant=variant_of(plan)
    )
    return shape, load


def ranks_of(plan: Plan) -> tuple[int, int]:
    return parse_ranks(plan.ranks or PROCESS_RANKS)


def ways_of(scenario: PDTransfer, variant: Variant, *, takes_paths: bool) -> tuple[dict[str, str], bool]:
    """Paths by leg, none if the wire has only one; and whether metadata rows are messages."""
    if takes_paths:
        return scenario.paths(variant), variant["metadata path"] == MESSAGES
    return {}, scenario.sends_rows


def rank_backend(plan: Plan, end: str) -> RegionBackend:
    """On "cuda", the ends have a device each if there are two; "cuda:N" names one. Raises UnknownVerdict if there is
    none."""
    kind, _, number = plan.device.partition(":")
    if kind != "cuda":
        return RegionBackend()
    from kvcheck.core.cache.backend.device_region import DeviceRegionBackend

    is_other = end == "decode" and not number and torch.cuda.device_count() > 1
    return DeviceRegionBackend(1 if is_other else int(number or 0))
