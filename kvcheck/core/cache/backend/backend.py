"""Backend: the only interface through which product code uses streams, events and memory.

Invariants:
- Two lanes are ordered only by a wait. SEMANTICS.md states every rule and names its litmus test.
- Operations and Footprints never change. They are not frozen, because a run makes thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from kvcheck.core.base.errors import DoubleFree, InternalError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.events import Event

ChunkWork = Callable[[], None]
POISON_BYTE = 0xA5
"""Fill of fresh memory in stress runs; no content word contains it by design."""


class Place(Enum):
    """Copies from or to PAGEABLE memory are not asynchronous for the process."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"


@dataclass(frozen=True, slots=True)
class Lane:
    """An in-order queue of operations: a CUDA stream, a copy engine, a network queue."""

    index: int
    name: str


class Signal:
    """A re-recordable event. handle: the backend's; None: never recorded, which counts as reached."""

    __slots__ = ("handle",)

    def __init__(self, handle: object | None = None) -> None:
        self.handle = handle


class Graph:
    """Captured operations of one lane. handle: the backend's."""

    __slots__ = ("handle", "lane", "operations")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.operations: list[Captured] = []
        self.handle: object | None = None


@dataclass(slots=True, unsafe_hash=True)
class Operation:
    name: str  # the call site, such as "offload.save"
    chunks: tuple[ChunkWork, ...]  # they run in any order, each once
    request: int | None = None  # None if it is not for a single one
    # For a copy from pageable host memory: takes a snapshot of the source and returns chunks that copy from it.
    stage: Callable[[], tuple[ChunkWork, ...]] | None = None
    joins_host: bool = False  # a chunk makes the process wait for the device, for example to read a value


@dataclass(slots=True, unsafe_hash=True)
class Footprint:
    """Memory that one operation reads or writes."""

    space: str  # id space of rows: "full", "window", "state", "metadata" ...
    buffers: tuple[str, ...]
    layers: tuple[int, int]  # half-open, local to the space
    rows: IndexArray  # [n] page or slot ids
    spans: IndexArray | None = None  # [n, 2] half-open token interval inside each page; None: whole rows
    owners: IndexArray | None = None  # [n] request ids
    place: Place = Place.DEVICE
    is_checked: bool = False  # may race, since incomplete bytes are discarded, as by a poll for a seal


@dataclass(frozen=True, slots=True)
class Captured:
    operation: Operation
    reads: tuple[Footprint, ...]
    writes: tuple[Footprint, ...]


# Events of a backend. Records are numbered from 1.


@dataclass(slots=True, unsafe_hash=True)
class Submitted(Event):
    """ordinal: counts submissions from 1. record: its signal, reached when the operation has run."""

    ordinal: int
    name: str
    lane: str
    reads: tuple[Footprint, ...]
    writes: tuple[Footprint, ...]
    record: int | None = None
    request: int | None = None

    @staticmethod
    def of(
        ordinal: int,
        operation: Operation,
        lane: Lane,
        reads: Sequence[Footprint],
        writes: Sequence[Footprint],
        record: int,
    ) -> Submitted:
        return Submitted(ordinal, operation.name, lane.name, tuple(reads), tuple(writes), record, operation.request)


@dataclass(slots=True, unsafe_hash=True)
class Completed(Event):
    """Every chunk has run (on CUDA: is known to have run)."""

    ordinal: int


@dataclass(slots=True, unsafe_hash=True)
class Recorded(Event):
    """The signal covers everything queued in the lane so far."""

    record: int
    lane: str


@dataclass(slots=True, unsafe_hash=True)
class LaneWaited(Event):
    """Operations queued in the lane from now on run after the record is reached."""

    record: int
    lane: str


@dataclass(slots=True, unsafe_hash=True)
class ProcessJoined(Event):
    """The process waited for the record, or polled it and found it reached."""

    record: int


@dataclass(frozen=True, slots=True)
class ProcessDrained(Event):
    """The process joined every lane."""


class Memory(Protocol):
    """Named memory of one device, for code that only allocates or uploads."""

    device: torch.device

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """Uninitialised memory. Stress backends fill it with POISON_BYTE."""

    def release(self, name: str) -> None: ...

    def allocated(self) -> dict[str, int]:
        """Bytes of all unreleased memory, by name."""

    def index(self, values: IndexArray) -> torch.Tensor:
        """An int64 index tensor on the device, owned by the caller; its upload is complete."""


class Backend(Memory, Protocol):
    name: str

    def lane(self, name: str) -> Lane:
        """Return the lane of that name; the first call makes it."""

    def signal(self) -> Signal: ...

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        """Queue the operation behind the lane and behind `after`; the signal records its end."""

    def record(self, signal: Signal, *, lane: Lane) -> None:
        """Record the signal behind everything queued in the lane so far."""

    def capture(self, lane: Lane) -> AbstractContextManager[Graph]:
        """Capture the operations submitted to `lane` in the block. None runs, and waits of the lane are dropped."""

    def replay(self, graph: Graph) -> None:
        """Queue a graph in its lane. It is valid until the next capture of its lane."""

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        """Make the process, or `lane`, wait for the signal's latest record. Raise Hang if nothing pending can end a
        process's wait."""

    def query(self, signal: Signal) -> bool:
        """True if the latest record is known to be reached. It may have been reached a little earlier."""

    def drain(self) -> None:
        """Make the process wait for every lane."""

    def idle(self) -> None:
        """Let time pass while the process has nothing to do."""


class HostMemory:
    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        if name in self._tensors:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)
        self._tensors[name] = tensor
        return tensor

    def release(self, name: str) -> None:
        if name not in self._tensors:
            known = ", ".join(sorted(self._tensors)) or "none"
            raise DoubleFree(f"memory {name!r} is not allocated; allocated: {known}")
        self._tensors.pop(name).view(-1).view(torch.uint8).fill_(POISON_BYTE)

    def allocated(self) -> dict[str, int]:
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self._tensors.items()}

    @staticmethod
    def index(values: IndexArray) -> torch.Tensor:
        return torch.from_numpy(values.copy())
