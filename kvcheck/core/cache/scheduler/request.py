"""What the scheduler is asked for, and what it keeps of a request while it lives.

Invariants:
- committed = prompt + outputs - 1 whenever a request is between forward passes of the decode phase: the last sampled
  token has no KV yet.
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
    """A request as a user sends it. prompt: [n >= 1] token ids. output_tokens: how many to generate, at least 1.

    priority: cached prefixes of higher ones are evicted later, where eviction goes by priority. attempt: how often it
    was sent before, in vain. is_urgent: it goes ahead of all that wait and are not, and waits for no store.
    """

    request_id: int
    prompt: Tokens
    output_tokens: int
    priority: int = 0
    attempt: int = 0
    is_urgent: bool = False


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A request inside the scheduler. starts_at: the round of its first pass, one after its load started.

    room: on a decode rank, what its prompt arrives in; its metadata slot is the room's. metadata: what came with it.
    """

    request: Request
    holding: Holding
    lease: Lease | None
    output: list[int] = field(default_factory=list)
    room: InboundRoom | None = None
    metadata: MetadataRow | None = None
    offloaded: OffloadedKV | None = None
    rested_at: int = 0
    starts_at: int = 0

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    def committed_tokens(self) -> Tokens:
        """Token ids whose KV is written: the prompt and all outputs but those not yet fed back."""
        fed = self.holding.committed - self.prompt_length
        return np.concatenate((self.request.prompt, np.array(self.output[: max(0, fed)], dtype=np.int64)))


@dataclass(slots=True)
class StepReport:
    """What one scheduling round did, by request id. failed: with the reason."""

    admitted: list[int] = field(default_factory=list)
    loading: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    retracted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    finished: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """max_running: requests that decode together. chunk_tokens: prefill tokens a round and request.

    retract_policy: "fewest-outputs" (fewest outputs, then longest prompt, goes first) or "latest" (last admitted).
    retract_steps: decode steps that must fit without another retraction once there was one.
    resume_delay: rounds a retracted request rests, in which new requests may take its pages; then it goes first.
    """

    max_running: int
    max_prefilling: int = 4
    chunk_tokens: int = 128
    retract_policy: str = "fewest-outputs"
    resume_delay: int = 0
    retract_steps: int = 1
