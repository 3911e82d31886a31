"""StreamDevice: streams, events, holds and memory of a machine that works beside the process.

Invariants:
- A wait of a stream binds to the event's latest record when the wait is queued.
- A hold ends by itself, so that a forgotten release never stops a stream for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import ChunkWork, Place
from kvcheck.core.cache.backend.delays import Hold

WATCHDOG_NS = 250_000_000
"""Length of a hold that is not released."""

Stream = TypeVar("Stream")
Event = TypeVar("Event")
InStream = TypeVar("InStream", contravariant=True)


class DeviceHold(Hold, Protocol[InStream]):
    """One hold, reusable once it has ended. Its release never waits."""

    def place(self, stream: InStream) -> None: ...


class DeviceMemory(Protocol):
    """device: of tensors of Place.DEVICE."""

    device: torch.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """A tensor filled with POISON_BYTE; the fill has run."""

    def upload(self, values: IndexArray) -> torch.Tensor:
        """A copy of the ids on the device; the upload is complete."""


class WholeDevice(Protocol):
    def synchronize(self) -> None: ...

    def is_lost(self) -> bool:
        """True if nothing runs on the device any more in this process. Called after an error; waits."""

    def close(self) -> None:
        """Free this backend's resources; all its work has run."""


class StreamDevice(DeviceMemory, WholeDevice, Protocol[Stream, Event]):
    """grace_s: how long a waiting process leaves held streams held, in case its wait ends anyway."""

    grace_s: float

    def stream(self) -> Stream:
        """A stream that nothing else of this backend has. Raise UnknownVerdict if none is left."""

    def event(self) -> Event:
        """An event that was never recorded; it counts as reached."""

    def run(self, stream: Stream, work: Sequence[ChunkWork], name: str = "") -> None:
        """Queue work on a stream. name: for profilers."""

    def record(self, event: Event, stream: Stream) -> None:
        """Record the event. Earlier waits keep their record."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of the stream wait for the event's current record."""

    def has_run(self, event: Event) -> bool: ...

    def join(self, event: Event) -> None:
        """Make the process wait for the event."""

    def capture(self, work: Sequence[ChunkWork], last: object | None) -> object:
        """Capture work. last: a capture that is not replayed again, whose memory may be reused."""

    def replay(self, stream: Stream, captured: object) -> None: ...

    def holds(self, count: int) -> Sequence[DeviceHold[Stream]]:
        """Make holds, ready to be placed. Raise UnknownVerdict if this machine cannot hold a stream."""
