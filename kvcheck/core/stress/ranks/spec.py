"""RankSpec and RankSummary: input and report of a rank's process, as lines of JSON.

    to the rank      RankSpec, then {"addresses": ...} for a prefill rank, and again after the restart of a decode rank,
                     then {"close": true}; end of input: the end
    from the rank    listening, ready, finished, failed, aborted, faulted, stalled, fenced, refused, rejoined, lost,
                     idle, closed, error

Invariants:
- The plan's line alone decides the work: every rank makes the same jobs from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence, Finding, to_plain, value_from


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """key: of the run; links without it are refused. meeting: rendezvous of the ranks of the end. patience_s: seconds a
    room may take. lease_s: seconds a peer may be silent. incarnation: 1, or more after a restart; over: requests that
    ended before it. returns: peers that are started again when they die. network: where its engine's process is; None:
    with all others. extra: for test programs, such as ending half-way."""

    line: str
    end: str
    rank: int
    prefill: int
    decode: int
    key: str
    meeting: str
    patience_s: int
    lease_s: float
    incarnation: int = 1
    network: str | None = None
    over: tuple[int, ...] = ()
    returns: tuple[str, ...] = ()
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


def read_spec(line: str) -> RankSpec:
    """Parse a spec. Raises ValueError."""
    spec: RankSpec = value_from(RankSpec, json.loads(line), "spec")
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """counts: space -> (free, total), when idle. returned: the same after close. decisions: a checksum of its rounds'
    decisions; equal on all ranks of an end. sealed: verified bytes by request. quarantined: pages and slots freed after
    a Want."""

    counts: dict[str, tuple[int, ...]]
    returned: dict[str, tuple[int, ...]]
    decisions: int
    sealed: dict[str, int]
    quarantined: int
    findings: tuple[Finding, ...]
    evidence: Evidence


def read_summary(raw: Mapping[str, object]) -> RankSummary:
    """Parse a summary. Raises ValueError."""
    summary: RankSummary = value_from(RankSummary, raw, "summary")
    return summary
