"""Wire: carries bytes and messages between a prefill and a decode rank.

Invariants:
- A write is one-sided: the peer learns of it only by a message.
- The signal of `write` is the sender's completion alone: bytes may land before it, after it, or never. Only `flush`, or
  a read by the receiver, shows that they have landed.
- Messages arrive in order, independently of writes. One may be lost, and a copy may come later, after any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcheck.core.base.errors import LayoutMismatch, TransferError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Footprint, Signal
from kvcheck.core.cache.transfer.messages import Message

LEGS = ("kv", "state", "aux", "seal")
"""The writes of a room, in the order of a healthy sender."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One attempt to transfer a room. generation: its number at its decode rank. attempt: of its request."""

    room: int
    generation: int
    request: int
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionWrite:
    """blocks: [n, 3] source offset, target offset, bytes. reads: in the writer's spaces; writes: in the peer's."""

    source: str
    target: str
    blocks: IndexArray
    reads: tuple[Footprint, ...]
    writes: tuple[Footprint, ...]


def check_region(name: str, memory: torch.Tensor) -> None:
    if memory.dtype != torch.uint8 or memory.ndim != 1 or not memory.is_contiguous():
        raise LayoutMismatch(f"region {name}: expected contiguous bytes in one dimension, got {memory.dtype}")


def check_blocks(write: RegionWrite, *, source: int, target: int, who: str) -> None:
    """Raise TransferError unless every block lies in both regions. source, target: their bytes."""
    blocks = write.blocks
    if len(blocks) and (
        blocks.min() < 0 or (blocks[:, 0] + blocks[:, 2]).max() > source or (blocks[:, 1] + blocks[:, 2]).max() > target
    ):
        ends = blocks[:, :2].max(axis=0) + blocks[:, 2].max()
        raise TransferError(
            f"{who}: a block of {write.source} ends at {ends.tolist()}; the regions have {source} and {target} bytes"
        )


class Wire(Protocol):
    name: str

    def register(self, region: str, memory: torch.Tensor) -> None:
        """Let peers write this memory, [bytes] uint8."""

    def write(
        self, peer: str, leg: str, writes: Sequence[RegionWrite], *, ticket: Ticket, after: Sequence[Signal]
    ) -> Signal:
        """Write once `after` is reached. Raise TransferError if the engine refuses."""

    def flush(self, peer: str) -> Signal:
        """Reached when everything written so far has landed, or can never land."""

    def send(self, peer: str, message: Message, *, after: Sequence[Signal] = ()) -> None:
        """Send once `after` is reached."""

    def receive(self) -> list[tuple[str, Message]]:
        """Messages that have arrived, oldest first, each with its sender."""

    def verified(self, peer: str, ticket: Ticket) -> None:
        """The caller has verified all bytes that the peer wrote for the ticket."""
