"""RegionBackend: the eager backend over memory that another process can map whole.

Invariants:
- Every name has a region of its own, so that a buffer is registered whole and nothing else with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from kvcheck.core.base.errors import InternalError, LayoutMismatch
from kvcheck.core.cache.backend.backend import POISON_BYTE, Place
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.shared_memory import SharedRegion
from kvcheck.kernels.page_copy import fill_torch


class RegionBackend(EagerBackend):
    """An EagerBackend whose device memory lies in shared regions."""

    def __init__(self) -> None:
        super().__init__()
        self._regions: dict[str, SharedRegion] = {}
        self._made = 0

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """A poisoned tensor of that name; on the device, a region of its own."""
        size = prod(shape) * dtype.itemsize
        if place is not Place.DEVICE or not size:
            return super().empty(name, shape, dtype, place)
        if name in self._tensors:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        self._made += 1
        region = SharedRegion(f"memory-{self._made}", size)
        memory = region.bytes_view()
        fill_torch(memory, POISON_BYTE)
        self._regions[name] = region
        self._tensors[name] = memory.view(dtype).view(tuple(shape))
        return self._tensors[name]

    def release(self, name: str) -> None:
        """Poison the bytes and forget the name."""
        super().release(name)
        if (region := self._regions.pop(name, None)) is not None:
            region.close()

    def region_of(self, memory: torch.Tensor) -> SharedRegion:
        """The region that is all of this memory, [bytes] uint8."""
        for name, region in self._regions.items():
            if self._tensors[name].data_ptr() == memory.data_ptr() and region.size_bytes == memory.numel():
                return region
        raise LayoutMismatch(f"{memory.numel()} bytes at {memory.data_ptr():#x} are no whole region")
