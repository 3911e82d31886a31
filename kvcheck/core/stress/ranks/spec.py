"""RankSpec and RankSummary: what a rank's process is told at its start and what it reports, as lines of JSON.

    to the rank      RankSpec, then {"addresses": ...} for a prefill rank, and again when a decode rank was started
                     again, then {"close": true}; end of input: the end
    from the rank    listening, ready, finished, failed, aborted, faulted, stalled, fenced, refused, rejoined, lost,
                     idle, closed, error

Invariants:
- Lines are plain values; nothing in them is executed or unpickled.
- The plan's line is all that decides the work: every rank makes the same jobs from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence, Finding, to_plain, value_from


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One rank. key: of the run; links without it are refused. meeting: where the ranks of an end find one another.

    patience_s: seconds a room may take. lease_s: seconds a peer may be silent.
    extra: for programs of tests that do more than the worker, such as ending half-way.

    incarnation: 1, or more for a rank that was started again, with over: the requests that ended at the one before it.
    network: where its engine's process is, None: with all others.
    returns: peers that are started again when they die.
    """

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
        """Its name on the wire."""
        return f"{self.end}-{self.rank}"

    @property
    def peers(self) -> list[str]:
        """Names of the ranks of the other end."""
        other, count = ("decode", self.decode) if self.end == "prefill" else ("prefill", self.prefill)
        return [f"{other}-{rank}" for rank in range(count)]

    def to_json(self) -> str:
        return json.dumps(to_plain(self))


def read_spec(line: str) -> RankSpec:
    """The spec that a line holds. Raises ValueError."""
    spec: RankSpec = value_from(RankSpec, json.loads(line), "spec")
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """The last report of a rank. counts: space -> (free, total), when idle. returned: the same after it has closed.

    decisions: a checksum of what its rounds decided; equal on all ranks of an end. sealed: bytes that it read and that
    fit their seals, by request. quarantined: pages and slots that were freed after a peer had been asked to write them.
    """

    counts: dict[str, tuple[int, ...]]
    returned: dict[str, tuple[int, ...]]
    decisions: int
    sealed: dict[str, int]
    quarantined: int
    findings: tuple[Finding, ...]
    evidence: Evidence


def read_summary(raw: Mapping[str, object]) -> RankSummary:
    """The summary that an event holds. Raises ValueError."""
    summary: RankSummary = value_from(RankSummary, raw, "summary")
    return summary
