"""Fresh memory for every arm of every round, at a random offset, and a backend that allocates from it.

The position of buffers changes a ratio by more than most code changes do. So many rounds with buffers in one position
are one sample.

Invariants:
- Memory is filled with random bytes, never zeros, and starts at a random multiple of 64 bytes into its allocation.
- The backend reuses pinned memory that was released, as serving engines do. It does not poison memory, which only
  checks need.
- An arm computes on a lane, by `launch`. What it computes is ordered by the waits of that lane and by nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from kvcheck.core.base.devices import STREAMED, kind_of, number_of
from kvcheck.core.base.errors import DoubleFree, InternalError
from kvcheck.core.cache.backend.backend import Backend, Lane, Place
from kvcheck.core.cache.backend.cuda import CudaBackend
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.threads import ThreadsBackend

ALIGN_BYTES = 64
PADDING_BYTES = 16384
PATTERN_BYTES = 1 << 20
FORWARD = "forward"
"""The lane on which a model's forward pass computes."""


class BenchBackend(Backend, Protocol):
    """A backend over fresh memory, on whose lanes arms compute."""

    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        """Give the lane work without a footprint or a signal, as an engine gives kernels to its stream."""

    def close(self) -> None:
        """Wait for all lanes and end them. Raises what was not told of an error on one of them."""


class FreshMemory:
    """Allocates for one arm of one round. device: cpu, threads, cuda or cuda:N; `device` is where its tensors lie."""

    def __init__(self, random: np.random.Generator, device: str) -> None:
        self.random = random
        self.kind = kind_of(device)
        self.device = tensor_device(device)
        self._lanes_of: list[BenchBackend] = []  # of those whose lanes go on beside the process
        self._pattern = torch.from_numpy(np.frombuffer(random.bytes(PATTERN_BYTES + 8), dtype=np.uint8).copy())

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, is_host: bool = False) -> torch.Tensor:
        """A tensor of random bytes on the device, or in host memory, which is pinned if there is a device."""
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
        """Random int64 words."""
        return self.empty(shape, torch.int64, is_host=is_host)

    def permutation(self, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The ids first .. first + count - 1 in a random order."""
        return first + self.random.permutation(count).astype(np.int64)

    def backend(self) -> BenchBackend:
        """A backend that allocates from this memory."""
        made = LEAN[self.kind](self)
        if self.kind in STREAMED:
            self._lanes_of.append(made)
        return made

    def join(self) -> None:
        """Make the process wait for all lanes of the backends over this memory."""
        for each in self._lanes_of:
            each.drain()

    def close(self) -> None:
        """End the lanes of those backends."""
        while self._lanes_of:
            self._lanes_of.pop().close()

    def _fill(self, block: torch.Tensor) -> None:
        """Fill with one random pattern, shifted and repeated. This costs no more than a copy."""
        shift = int(self.random.integers(8))
        pattern = self._pattern[shift : shift + PATTERN_BYTES]
        for start in range(0, len(block), PATTERN_BYTES):
            part = block[start : start + PATTERN_BYTES]
            part.copy_(pattern[: len(part)])


class _FreshNames:
    """Named memory of a backend. Pinned memory that was released is used again."""

    def __init__(self, memory: FreshMemory) -> None:
        self._memory = memory
        self._held: dict[str, tuple[torch.Tensor, Place]] = {}
        self._spare: dict[int, list[torch.Tensor]] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """Memory of that name, recycled where it is pinned."""
        if name in self._held:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        size = math.prod(shape) * dtype.itemsize
        spare = self._spare.get(size) if place is Place.PINNED else None
        whole = spare.pop() if spare else self._memory.empty((size,), torch.uint8, is_host=place is not Place.DEVICE)
        self._held[name] = whole, place
        return whole.view(dtype).view(tuple(shape))

    def release(self, name: str) -> None:
        """Forget the name; pinned memory is kept for reuse."""
        if name not in self._held:
            raise DoubleFree(f"memory {name!r} is not allocated")
        whole, place = self._held.pop(name)
        if place is Place.PINNED:
            self._spare.setdefault(whole.numel(), []).append(whole)

    def allocated(self) -> dict[str, int]:
        """Bytes by name."""
        return {name: whole.numel() for name, (whole, _) in self._held.items()}


class LeanBackend(_FreshNames, EagerBackend):
    """The eager backend over fresh memory."""

    def __init__(self, memory: FreshMemory) -> None:
        EagerBackend.__init__(self)
        _FreshNames.__init__(self, memory)

    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        """Run it: everything that was queued has run."""
        work(*args)

    def close(self) -> None:
        """Nothing is pending."""


class LeanThreadsBackend(_FreshNames, ThreadsBackend):
    """The threads backend over fresh memory."""

    def __init__(self, memory: FreshMemory) -> None:
        ThreadsBackend.__init__(self)
        _FreshNames.__init__(self, memory)

    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        self._machine.run(self._streams[lane.index], (partial(work, *args),))

    def close(self) -> None:
        self.settle()


class LeanCudaBackend(_FreshNames, CudaBackend):
    """The CUDA backend over fresh memory. Lane "forward" is the current stream of the process: all buffer sets of an
    arm compute on it, one after another, and the clock's events are recorded there."""

    def __init__(self, memory: FreshMemory) -> None:
        CudaBackend.__init__(self, memory.device.index or 0)
        _FreshNames.__init__(self, memory)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        made = super().empty(name, shape, dtype, place)
        if place is Place.DEVICE:
            torch.cuda.synchronize(self.device)  # it was filled on another stream than those of the lanes
        return made

    def launch(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        """Launch it. To enter a stream for each launch would take as long as a launch."""
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
    """A call that copies as many bytes at once. waits: on a device, for their arrival.

    In host memory it is the C library's copy. Torch's own stores go through the caches, so that a large block takes
    half as long again, and what bypasses them would reach more than all of it.
    """
    if target.device.type == source.device.type == "cpu":
        return partial(np.copyto, target.numpy(), source.numpy())
    return partial(target.copy_, source, non_blocking=not waits)


def tensor_device(device: str) -> torch.device:
    """Where the tensors of a device of that name lie."""
    return torch.device("cuda", number_of(device)) if kind_of(device) == "cuda" else torch.device("cpu")
