"""Fresh memory for every arm of every round, at a random offset, and a backend that allocates from it.

The position of buffers changes a ratio by more than most code changes do. So many rounds with buffers in one position
are one sample.

Invariants:
- Memory is filled with random bytes, never zeros, and starts at a random multiple of 64 bytes into its allocation.
- The backend reuses pinned memory that was released, as serving engines do. It does not poison memory, which only
  checks need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvcheck.core.base.errors import DoubleFree, InternalError
from kvcheck.core.cache.backend.backend import Backend, OperationObserver, Place
from kvcheck.core.cache.backend.cuda import CudaBackend
from kvcheck.core.cache.backend.eager import EagerBackend

ALIGN_BYTES = 64
PADDING_BYTES = 16384
PATTERN_BYTES = 1 << 20


class FreshMemory:
    """Allocates for one arm of one round."""

    def __init__(self, random: np.random.Generator, device: torch.device) -> None:
        self.random = random
        self.device = device
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

    def backend(self, observer: OperationObserver | None = None) -> Backend:
        """A backend that allocates from this memory."""
        return LeanCudaBackend(self, observer) if self.device.type == "cuda" else LeanBackend(self, observer)

    def _fill(self, block: torch.Tensor) -> None:
        """Fill with one random pattern, shifted and repeated. This costs no more than a copy."""
        shift = int(self.random.integers(8))
        pattern = self._pattern[shift : shift + PATTERN_BYTES]
        for start in range(0, len(block), PATTERN_BYTES):
            part = block[start : start + PATTERN_BYTES]
            part.copy_(pattern[: len(part)])


class LeanBackend(EagerBackend):
    """The eager backend over fresh memory."""

    def __init__(self, memory: FreshMemory, observer: OperationObserver | None = None) -> None:
        super().__init__(observer)
        self._memory = memory
        self._places: dict[str, Place] = {}
        self._spare: dict[int, list[torch.Tensor]] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """Memory of that name, recycled where it is pinned."""
        if name in self._tensors:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        spare = self._spare.get(math.prod(shape) * dtype.itemsize) if place is Place.PINNED else None
        whole = spare.pop() if spare else self._memory.empty((math.prod(shape),), dtype).view(torch.uint8)
        self._tensors[name], self._places[name] = whole, place
        return whole.view(dtype).view(tuple(shape))

    def release(self, name: str) -> None:
        """Forget the name; pinned memory is kept for reuse."""
        if name not in self._tensors:
            raise DoubleFree(f"memory {name!r} is not allocated")
        whole, place = self._tensors.pop(name), self._places.pop(name)
        if place is Place.PINNED:
            self._spare.setdefault(whole.numel(), []).append(whole)


class LeanCudaBackend(CudaBackend):
    """The CUDA backend over fresh memory."""

    def __init__(self, memory: FreshMemory, observer: OperationObserver | None = None) -> None:
        super().__init__(memory.device.index or 0, observer)
        self._memory = memory
        self._held: dict[str, torch.Tensor] = {}
        self._spare: dict[int, list[torch.Tensor]] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """Memory of that name, recycled where it is pinned."""
        if name in self._bytes:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        size = math.prod(shape) * dtype.itemsize
        spare = self._spare.get(size) if place is Place.PINNED else None
        fresh = spare.pop() if spare else self._memory.empty((size,), torch.uint8, is_host=place is not Place.DEVICE)
        if place is Place.DEVICE:
            torch.cuda.synchronize(self.device)  # it was filled on another stream than those of the lanes
        self._bytes[name] = size
        if place is Place.PINNED:
            self._held[name] = fresh
        return fresh.view(dtype).view(tuple(shape))

    def release(self, name: str) -> None:
        """Forget the name; pinned memory is kept for reuse."""
        super().release(name)
        if name in self._held:
            whole = self._held.pop(name)
            self._spare.setdefault(whole.numel(), []).append(whole)
