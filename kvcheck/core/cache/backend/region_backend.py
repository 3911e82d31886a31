"""RegionBackend: the eager backend over memory that another process can map whole.

Invariants:
- Every name has a region of its own, so that a buffer is registered whole and alone.
- Operations run when they are submitted. Copies of a CopyLane land later; a signal can stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from kvcheck.core.base.errors import InternalError, LayoutMismatch, TransferError
from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.cache.backend.backend import POISON_BYTE, Footprint, Lane, Operation, Place, Signal
from kvcheck.core.cache.backend.copy_lane import Landing
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.shared_memory import RegionHandle, SharedRegion
from kvcheck.kernels.page_copy import fill_torch


class Region(Protocol):
    """Memory that another process can map while its holder lives."""

    size_bytes: int

    @property
    def handle(self) -> object:
        """For `attach` in another process: a dataclass of plain values."""

    def bytes_view(self) -> torch.Tensor:
        """The memory itself, [size_bytes] uint8. It stays valid after the release."""


class RegionBackend(EagerBackend):
    def __init__(self) -> None:
        super().__init__()
        self._regions: dict[str, Region] = {}
        self._made = 0

    # Memory

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        size = prod(shape) * dtype.itemsize
        if place is not Place.DEVICE or not size:
            return super().empty(name, shape, dtype, place)
        if name in self._tensors:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        self._made += 1
        region = self._make_region(size)
        memory = region.bytes_view()
        fill_torch(memory, POISON_BYTE)
        self._regions[name] = region
        self._tensors[name] = memory.view(dtype).view(tuple(shape))
        return self._tensors[name]

    def release(self, name: str) -> None:
        super().release(name)
        region = self._regions.pop(name, None)
        if isinstance(region, SharedRegion):  # the driver frees memory of a device when this process ends
            region.close()

    def region_of(self, memory: torch.Tensor) -> Region:
        for name, region in self._regions.items():
            if self._tensors[name].data_ptr() == memory.data_ptr() and region.size_bytes == memory.numel():
                return region
        raise LayoutMismatch(f"{memory.numel()} bytes at {memory.data_ptr():#x} are no whole region")

    def share(self, memory: torch.Tensor) -> object:
        return to_plain(self.region_of(memory).handle)

    def attach(self, raw: object) -> torch.Tensor:
        """Map a shared region: [bytes] uint8. Raise TransferError if it is gone, or for an invalid handle."""
        try:
            return self._map(raw)
        except ValueError as error:
            raise TransferError(f"not the handle of a region: {error}") from error

    def _make_region(self, size: int) -> Region:
        return SharedRegion(f"memory-{self._made}", size)

    def _map(self, raw: object) -> torch.Tensor:
        handle: RegionHandle = value_from(RegionHandle, raw, "region")
        with SharedRegion.attach(handle) as region:
            return region.bytes_view()

    # Signals of copy lanes

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        for signal in after:
            self.wait(signal)
        return super().submit(operation, lane=lane, reads=reads, writes=writes, after=after)

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        if isinstance(signal.handle, Landing):
            signal.handle.wait()
        super().wait(signal, lane=lane)

    def query(self, signal: Signal) -> bool:
        return signal.handle.is_reached if isinstance(signal.handle, Landing) else super().query(signal)
