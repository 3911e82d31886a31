"""The CUDA backend: streams, events, graphs and memory of one device, by torch.

Invariants:
- Each stream has one use: a lane, allocation and uploads, or captures. Two lanes on one stream would be ordered.
- Holds are loaded before the first is placed. Loading one later may wait for the device, and so for a held lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress

import torch

from kvcheck.core.base.cuda_hold import cuda_holds
from kvcheck.core.base.errors import InternalError, UnknownVerdict
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import POISON_BYTE, ChunkWork, Place
from kvcheck.core.cache.backend.delays import Delay
from kvcheck.core.cache.backend.device import WATCHDOG_NS, DeviceHold
from kvcheck.core.cache.backend.streamed import StreamedBackend
from kvcheck.core.cache.events import Emit

STREAMS_MOST = 64
"""Streams requested of one priority before the next is tried. torch has 32 of each and returns them in turn."""

ORDINARY, URGENT = 0, -1

GRACE_S = 0.002
"""How long a waiting process leaves held lanes held: many times the length of a test's operation on a device."""


def cuda_device(index: int) -> torch.device:
    """Raise UnknownVerdict if there is no such device."""
    if not torch.cuda.is_available():
        raise UnknownVerdict(
            f"backend cuda needs a CUDA device; torch {torch.__version__} sees none; see `kvcheck doctor`"
        )
    if not 0 <= index < torch.cuda.device_count():
        raise UnknownVerdict(
            f"backend cuda has no device {index}; expected 0 to {torch.cuda.device_count() - 1}; see `kvcheck doctor`"
        )
    return torch.device("cuda", index)


class CudaBackend(StreamedBackend[torch.cuda.Stream, torch.cuda.Event]):
    name = "cuda"

    def __init__(self, device_index: int = 0, emit: Emit | None = None, delays: Sequence[Delay] = ()) -> None:
        super().__init__(CudaDevice(device_index), emit, delays)


class CudaDevice:
    def __init__(self, index: int) -> None:
        self.device = cuda_device(index)
        self.grace_s = GRACE_S
        self._is_named = torch.version.cuda is not None  # a build without CUDA has no NVTX
        self._taken: set[int] = set()
        # Allocation, poison and index uploads have a stream of their own, so that they never queue behind a lane. It
        # comes from torch's other pool: a pool starts over after 32 streams, and a run has more lanes.
        self._service = self._stream_of_its_own(URGENT)
        self._capturing = self._stream_of_its_own(URGENT)

    def stream(self) -> torch.cuda.Stream:
        return self._stream_of_its_own()

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self, stream: torch.cuda.Stream, work: Sequence[ChunkWork], name: str = "") -> None:
        with torch.cuda.stream(stream), torch.cuda.nvtx.range(name) if self._is_named else nullcontext():
            for chunk in work:
                chunk()

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def has_run(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def join(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def capture(self, work: Sequence[ChunkWork], last: object | None) -> torch.cuda.CUDAGraph:
        """Capture the closures. torch.cuda.graph is not used: it synchronises the device and empties the allocator's
        cache, so loads in flight would land and held lanes would be waited for. The mode is relaxed, because closures
        may load a kernel."""
        made, pool = torch.cuda.CUDAGraph(), None if last is None else _graph(last).pool()
        with torch.cuda.stream(self._capturing):
            made.capture_begin(pool=pool, capture_error_mode="relaxed")
            is_whole = False
            try:
                for chunk in work:
                    chunk()
                is_whole = True
            finally:
                # The end of a failed capture fails too, with a less useful error than the first.
                with nullcontext() if is_whole else suppress(RuntimeError):
                    made.capture_end()
        return made

    def replay(self, stream: torch.cuda.Stream, captured: object) -> None:
        self.run(stream, (_graph(captured).replay,), "graph")

    def holds(self, count: int) -> Sequence[DeviceHold[torch.cuda.Stream]]:
        """Raise UnknownVerdict without triton, whose kernel holds a stream."""
        made = cuda_holds(count, self.device, self._service, limit_ns=WATCHDOG_NS, read=self._outcome)
        if isinstance(made, str):
            raise UnknownVerdict(
                f"delays on a device need triton, which holds a lane, and {made}; pip install 'kvcheck[triton]'"
            )
        return made

    def empty(self, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        if place is not Place.DEVICE:
            tensor = torch.empty(tuple(shape), dtype=dtype, pin_memory=place is Place.PINNED)
            tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)
            return tensor
        with torch.cuda.stream(self._service):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)
        self._service.synchronize()
        return tensor

    def upload(self, values: IndexArray) -> torch.Tensor:
        with torch.cuda.stream(self._service):
            ids = torch.from_numpy(values.copy()).to(self.device)
        self._service.synchronize()
        return ids

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def is_lost(self) -> bool:
        """Synchronise twice: a lost context raises at every wait, but the first may raise an older error."""
        for _ in range(2):
            try:
                self.synchronize()
            except RuntimeError:
                continue
            return False
        return True

    def close(self) -> None: ...

    def _stream_of_its_own(self, *priorities: int) -> torch.cuda.Stream:
        """Return an unused stream, of these priorities first. Raise UnknownVerdict if torch has no more."""
        for priority in (*priorities, ORDINARY, URGENT):
            for _ in range(STREAMS_MOST):
                stream = torch.cuda.Stream(self.device, priority)  # type: ignore[no-untyped-call]
                if stream.cuda_stream not in self._taken:
                    self._taken.add(stream.cuda_stream)
                    return stream
        raise UnknownVerdict(
            f"backend cuda needs a stream for each lane, and torch has no more than {len(self._taken)}; "
            "next: fewer ranks, such as --ranks 1x1"
        )

    def _outcome(self, outcome: torch.Tensor) -> int:
        with torch.cuda.stream(self._service):
            return int(outcome[0])


def _graph(captured: object) -> torch.cuda.CUDAGraph:
    if isinstance(captured, torch.cuda.CUDAGraph):
        return captured
    raise InternalError(f"expected a graph of backend cuda, got one that holds a {type(captured).__name__}")
