"""Devices of streams: what a backend of lanes needs of a machine whose work goes on beside the process.

    a stream     runs what is put on it, in order; two streams are ordered by events alone
    an event     is recorded on a stream again and again, and asked or waited for
    a hold       stands on a stream until the process releases it, or until its watchdog fires

StreamDevice makes them, and has memory. cuda.py is one over torch.cuda, threads.py one over threads of this process.

Invariants:
- A wait of a stream binds to what the event means when the wait is put on the stream.
- A hold ends without help: nothing that the process forgets makes a stream stand still for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import ChunkWork, Place
from kvcheck.core.cache.backend.delays import Hold

WATCHDOG_NS = 250_000_000
"""A hold ends by itself after so long."""

Stream = TypeVar("Stream")
Event = TypeVar("Event")
InStream = TypeVar("InStream", contravariant=True)


class DeviceHold(Hold, Protocol[InStream]):
    """One hold, which can be used again once it has ended. Its release never waits."""

    def place(self, stream: InStream) -> None:
        """Stand in the stream from here on."""


class DeviceMemory(Protocol):
    """Memory of a machine. device: where tensors of Place.DEVICE lie."""

    device: torch.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """A tensor filled with POISON_BYTE; the fill has run when this returns."""

    def upload(self, values: IndexArray) -> torch.Tensor:
        """A copy of the ids on the device, complete when this returns."""


class WholeDevice(Protocol):
    """What is asked of all streams at once."""

    def synchronize(self) -> None:
        """Make the process wait for all streams."""

    def is_lost(self) -> bool:
        """True if nothing runs on the device any more in this process. It is asked behind an error, and waits."""

    def close(self) -> None:
        """Give up what the machine keeps for this backend, all of whose work has run."""


class StreamDevice(DeviceMemory, WholeDevice, Protocol[Stream, Event]):
    """A machine with streams.

    grace_s: so long a process that waits leaves the held streams held, in case what it waits for comes all the same.
    """

    grace_s: float

    def stream(self) -> Stream:
        """A stream that nothing else of this backend has. Raises UnknownVerdict where there is none left."""

    def event(self) -> Event:
        """An event that was never recorded; it counts as reached."""

    def run(self, stream: Stream, work: Sequence[ChunkWork], name: str = "") -> None:
        """Put work on a stream. name: of its operation, for those who look from outside."""

    def record(self, event: Event, stream: Stream) -> None:
        """The event means all that the stream has been given so far. Earlier waits keep what they were given."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on runs after what the event means now."""

    def has_run(self, event: Event) -> bool:
        """True once what the event means is reached."""

    def join(self, event: Event) -> None:
        """Make the process wait for what the event means."""

    def capture(self, work: Sequence[ChunkWork], last: object | None) -> object:
        """Captured work, which has not run. last: a capture that is not replayed again, whose memory it may take."""

    def replay(self, stream: Stream, captured: object) -> None:
        """Put captured work on a stream."""

    def holds(self, count: int) -> Sequence[DeviceHold[Stream]]:
        """So many holds, ready to be placed. Raises UnknownVerdict where this machine cannot hold a stream."""
