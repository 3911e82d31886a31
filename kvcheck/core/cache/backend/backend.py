"""Backend: the only interface through which product code uses streams, events and memory.

Invariants:
- Product code submits operations with their footprint and never touches a stream, an event or a copy itself.
- A Lane runs its operations one after another. Two lanes are ordered only by a wait.
- A Signal is a re-recordable event: a wait binds to its latest record when the wait is called, and waiting on a
  signal that was never recorded does nothing. SEMANTICS.md states every rule and names its litmus test.
- Nobody changes an Operation or a Footprint. They are not frozen, because a run makes thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from kvcheck.core.base.paging import IndexArray

ChunkWork = Callable[[], None]
"""The work of one chunk of an operation."""


class Place(Enum):
    """Where memory lies. Copies from or to PAGEABLE memory are not asynchronous for the process."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"


@dataclass(frozen=True, slots=True)
class Lane:
    """One in-order queue of operations: a CUDA stream, a copy engine, a network queue."""

    index: int
    name: str


class Signal:
    """A re-recordable event. `handle` belongs to the backend that made it; None means never recorded."""

    __slots__ = ("handle",)

    def __init__(self, handle: object | None = None) -> None:
        self.handle = handle


class Graph:
    """Operations of one lane, captured and not run. `handle` belongs to the backend that replays it."""

    __slots__ = ("handle", "lane", "operations")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.operations: list[Captured] = []
        self.handle: object | None = None


@dataclass(slots=True, unsafe_hash=True)
class Operation:
    """Work for a lane.

    name: the site, such as "offload.save". chunks: run in any order, each once; one chunk unless the copy is large.
    request: the request that it works for; None if it is not one request's. stage: for a copy that reads pageable host
    memory; takes a snapshot of that source and returns the chunks that copy from the snapshot.
    joins_host: a chunk makes the process wait for the device, as one does that reads a value there.
    """

    name: str
    chunks: tuple[ChunkWork, ...]
    request: int | None = None
    stage: Callable[[], tuple[ChunkWork, ...]] | None = None
    joins_host: bool = False


@dataclass(slots=True, unsafe_hash=True)
class Footprint:
    """What one operation reads or writes.

    space: id space of `rows` ("full", "window", "state", "metadata" ...). buffers: names of the buffers touched.
    layers: half-open range of layers local to the space. rows: [n] page or slot ids.
    spans: [n, 2] half-open token interval inside each page; None is the whole row.
    owners: [n] request ids that `rows` are touched for; None where no request is named.
    is_checked: a read whose bytes count only if the operation finds them whole, such as a look for a seal. It may race.
    """

    space: str
    buffers: tuple[str, ...]
    layers: tuple[int, int]
    rows: IndexArray
    spans: IndexArray | None = None
    owners: IndexArray | None = None
    place: Place = Place.DEVICE
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """One operation of a graph, with what it touches."""

    operation: Operation
    reads: tuple[Footprint, ...]
    writes: tuple[Footprint, ...]


class OperationObserver(Protocol):
    """Gets every act of a backend. It must not call the backend.

    Every record of a signal has a number, counted by the backend from 1. Both `submit` and `record` make records.
    """

    def submitted(
        self,
        ordinal: int,
        operation: Operation,
        lane: Lane,
        reads: Sequence[Footprint],
        writes: Sequence[Footprint],
        record: int,
    ) -> None:
        """An operation was queued. `ordinal` counts submissions from 1; `record` is reached when it has run."""

    def recorded(self, record: int, lane: Lane) -> None:
        """A signal now means everything queued in the lane so far."""

    def lane_waited(self, record: int, lane: Lane) -> None:
        """What is queued in the lane from now on runs after that record, which may be reached already."""

    def process_joined(self, record: int) -> None:
        """The calling process waited for that record, or asked for it and found it reached."""

    def process_drained(self) -> None:
        """The calling process joined every lane."""

    def completed(self, ordinal: int) -> None:
        """Every chunk of that operation has run (on CUDA: is known to have run)."""


class Memory(Protocol):
    """Named memory of one device, for code that only allocates or uploads."""

    device: torch.device

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """Uninitialised memory. Stress backends fill it with POISON_BYTE so that unwritten bytes are recognised."""

    def release(self, name: str) -> None:
        """Give the memory of that name back; `allocated()` no longer lists it, and its content is gone."""

    def allocated(self) -> dict[str, int]:
        """Bytes of all memory handed out by `empty` and not released, by name."""

    def index(self, values: IndexArray) -> torch.Tensor:
        """An int64 index tensor on the device, owned by the caller, complete when this returns."""


class Backend(Memory, Protocol):
    """Lanes over that memory: eager (at once), simulated (a strategy picks what runs next), cuda (streams)."""

    name: str

    def lane(self, name: str) -> Lane:
        """The lane of that name, made when first asked for."""

    def signal(self) -> Signal:
        """A signal that was never recorded."""

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        """Queue the operation behind everything in the lane and behind `after`; the signal records its end."""

    def record(self, signal: Signal, *, lane: Lane) -> None:
        """Re-arm the signal: it now means everything queued in the lane so far."""

    def capture(self, lane: Lane) -> AbstractContextManager[Graph]:
        """Capture what is submitted to `lane` inside the block as a graph. None of it runs, and waits of the lane are
        dropped."""

    def replay(self, graph: Graph) -> None:
        """Queue all of a graph in its lane, after everything there. A graph can be replayed until the next capture of
        its lane."""

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        """Make the calling process wait, or make `lane` wait. Raises Hang if nothing pending can end a process's
        wait."""

    def query(self, signal: Signal) -> bool:
        """True if the latest record is known to be reached. It may have been reached a little earlier."""

    def drain(self) -> None:
        """Make the calling process wait for every lane."""

    def idle(self) -> None:
        """The calling process has nothing to do. Time passes, and it waits for nothing."""


POISON_BYTE = 0xA5
"""Fresh memory of a stress run is filled with it: a byte value that no content word is made of by design."""
