"""Fresh memory for every arm of every round, at a random offset, and a backend that allocates from it.

The position of buffers changes a ratio by more than most code changes do, so many rounds at one position are one
sample.

Invariants:
- Memory is filled with random bytes, never zeros, and starts at a random multiple of 64 bytes into its allocation.
- The backend reuses released pinned memory, as serving engines do. It does not poison memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from kvcheck.core.base.cells import STREAMED, kind_of, number_of
from kvcheck.core.base.errors import DoubleFree, InternalError
from kvcheck.core.cache.backend.backend import Backend, Lane, Place
from kvcheck.core.cache.backend.cuda import CudaBackend
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.threads import ThreadsBackend

ALIGN_BYTES = 64
PADDING_BYTES = 16384
PATTERN_BYTES = 1 << 20
FORWARD = "forward"


class BenchBackend(Backend, Protocol):
    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        """Put work on the lane without a footprint or a signal, as an engine launches kernels on its stream."""

    def close(self) -> None:
        """Wait for all lanes and end them. Raises an error of a lane that was not raised before."""


class FreshMemory:
    def __init__(self, random: np.random.Generator, device: str) -> None:
        self.random = random
        self.kind = kind_of(device)
        self.device = tensor_device(device)
        self._lanes_of: list[BenchBackend] = []  # of those whose lanes go on beside the process
        self._pattern = torch.from_numpy(np.frombuffer(random.bytes(PATTERN_BYTES + 8), dtype=np.uint8).copy())

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, is_host: bool = False) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        start = int(self.random.integers(PADDING_BYTES // ALIGN_BYTES)) * ALIGN_BYTES
        is_cpu = is_host or self.device.type == "cpu"
        whole = torch.empty(
            size + PADDING_BYTES,
            dtype=torch.uint8,
            device="cpu" if is_cpu else self.device,
            pin_memory=is_host and self.device.type != "cpu",
        )
        block = whole[start : start + size]
        self._fill(block)
        return block.view(dtype).view(tuple(shape))

    def words(self, *shape: int, is_host: bool = False) -> torch.Tensor:
        return self.empty(shape, torch.int64, is_host=is_host)

    def permutation(self, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return first + self.random.permutation(count).astype(np.int64)

    def backend(self) -> BenchBackend:
        made = LEAN[self.kind](self)
        if self.kind in STREAMED:
            self._lanes_of.append(made)
        return made

    def join(self) -> None:
        for each in self._lanes_of:
            each.drain()

    def close(self) -> None:
        while self._lanes_of:
            self._lanes_of.pop().close()

    def _fill(self, block: torch.Tensor) -> None:
        shift = int(self.random.integers(8))
        pattern = self._pattern[shift : shift + PATTERN_BYTES]
        for start in range(0, len(block), PATTERN_BYTES):
            part = block[start : start + PATTERN_BYTES]
            part.copy_(pattern[: len(part)])


class _FreshNames:
    def __init__(self, memory: FreshMemory) -> None:
        self._memory = memory
        self._held: dict[str, tuple[torch.Tensor, Place]] = {}
        self._spare: dict[int, list[torch.Tensor]] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        if name in self._held:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        size = math.prod(shape) * dtype.itemsize
        spare = self._spare.get(size) if place is Place.PINNED else None
        whole = spare.pop() if spare else self._memory.empty((size,), torch.uint8, is_host=place is not Place.DEVICE)
        self._held[name] = whole, place
        return whole.view(dtype).view(tuple(shape))

    def release(self, name: str) -> None:
        if name not in self._held:
            raise DoubleFree(f"memory {name!r} is not allocated")
        whole, place = self._held.pop(name)
        if place is Place.PINNED:
            self._spare.setdefault(whole.numel(), []).append(whole)

    def allocated(self) -> dict[str, int]:
        return {name: whole.numel() for name, (whole, _) in self._held.items()}


class LeanBackend(_FreshNames, EagerBackend):
    def __init__(self, memory: FreshMemory) -> None:
        EagerBackend.__init__(self)
        _FreshNames.__init__(self, memory)

    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        work(*args)

    def close(self) -> None:
        """Do nothing: no work is pending."""


class LeanThreadsBackend(_FreshNames, ThreadsBackend):
    def __init__(self, memory: FreshMemory) -> None:
        ThreadsBackend.__init__(self)
        _FreshNames.__init__(self, memory)

    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        self._machine.run(self._streams[lane.index], (partial(work, *args),))

    def close(self) -> None:
        self.settle()


class LeanCudaBackend(_FreshNames, CudaBackend):
    """Lane "forward" is the process's current stream: all buffer sets of an arm compute on it in turn, and the clock
    records its events there."""

    def __init__(self, memory: FreshMemory) -> None:
        CudaBackend.__init__(self, memory.device.index or 0)
        _FreshNames.__init__(self, memory)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        made = super().empty(name, shape, dtype, place)
        if place is Place.DEVICE:
            torch.cuda.synchronize(self.device)  # it was filled on another stream than those of the lanes
        return made

    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        """Launch directly: entering a stream takes as long as a launch."""
        if lane.name != FORWARD:
            raise InternalError(f"expected to compute on lane {FORWARD}, the process's current stream, got {lane.name}")
        work(*args)

    def close(self) -> None:
        self.settle()

    def _stream_for(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if name == FORWARD else super()._stream_for(name)


LEAN: dict[str, Callable[[FreshMemory], BenchBackend]] = {
    "cpu": LeanBackend,
    "threads": LeanThreadsBackend,
    "cuda": LeanCudaBackend,
}


def memcpy(target: torch.Tensor, source: torch.Tensor, *, waits: bool = False) -> Callable[[], object]:
    """Return a call that copies as many bytes at once. waits: on a device, for their arrival.

    In host memory it is the C library's copy: torch's stores go through the caches, which takes 1.5 times as long for a
    large block.
    """
    if target.device.type == source.device.type == "cpu":
        return partial(np.copyto, target.numpy(), source.numpy())
    return partial(target.copy_, source, non_blocking=not waits)


def tensor_device(device: str) -> torch.device:
    return torch.device("cuda", number_of(device)) if kind_of(device) == "cuda" else torch.device("cpu")
