"""Requests, their state in the scheduler, and its settings.

Invariants:
- committed = prompt + outputs - 1 between decode passes: the last sampled token has no KV yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcheck.core.cache.hicache.cache import Lease
from kvcheck.core.cache.offload import OffloadedKV
from kvcheck.core.cache.pools.pool import Holding
from kvcheck.core.cache.transfer.metadata import MetadataRow
from kvcheck.core.cache.transfer.receiver import InboundRoom

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: [n >= 1] token ids."""

    request_id: int
    prompt: Tokens
    output_tokens: int  # at least 1
    priority: int = 0  # cached prefixes of higher ones are evicted later, with order priority
    attempt: int = 0  # failed attempts before this one
    is_urgent: bool = False  # queued before all that are not; waits for no store


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    request: Request
    holding: Holding
    lease: Lease | None
    output: list[int] = field(default_factory=list)
    room: InboundRoom | None = None  # on a decode rank; it has the metadata slot
    metadata: MetadataRow | None = None  # transferred with the prompt
    offloaded: OffloadedKV | None = None
    rested_at: int = 0  # the round from which it may be resumed
    starts_at: int = 0  # the round of its first pass, one after its load started

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    def committed_tokens(self) -> Tokens:
        """Token ids whose KV is written: the prompt and all outputs that were fed back."""
        fed = self.holding.committed - self.prompt_length
        return np.concatenate((self.request.prompt, np.array(self.output[: max(0, fed)], dtype=np.int64)))


@dataclass(slots=True)
class StepReport:
    """Request ids by event of one scheduling round. failed: with the reason."""

    admitted: list[int] = field(default_factory=list)
    loading: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    retracted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    finished: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_running: int  # requests that decode together
    max_prefilling: int = 4
    chunk_tokens: int = 128  # prefill tokens a round and request
    resume_delay: int = 0  # rounds before a retracted request goes first; new ones may take its pages meanwhile
    retract_steps: int = 1  # decode steps that must fit after a retraction
