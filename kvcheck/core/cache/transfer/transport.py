"""Transport: how a packed metadata row travels from the prefill end to the decode end.

Invariants:
- Sender completion, remote visibility and notification are three events; a receiver may rely on `notified` alone,
  and a transport notifies only what is visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.cache.backend.backend import Backend, Signal
from kvcheck.core.cache.transfer.metadata import MetadataBuffers


@dataclass(frozen=True, slots=True)
class Delivery:
    """sent: the source may be reused. visible: the bytes are at the target. notified: the receiver was told."""

    sent: Signal
    visible: Signal
    notified: Signal


class Transport(Protocol):
    """Carries metadata rows between two ends."""

    def __init__(self, backend: Backend, source: MetadataBuffers, target: MetadataBuffers) -> None: ...

    def send(self, *, request: int, source_slot: int, target_slot: int, after: Signal) -> Delivery:
        """Carry one row, once `after` is reached."""
