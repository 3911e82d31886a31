"""Stand-in: places of one size in a buffer, counted and pinned."""

from enum import Enum, auto
from types import SimpleNamespace

import torch
from lmcache import has_fault

UNIT = 4096


class MemoryFormat(Enum):
    """How a chunk is laid out."""

    KV_2LTD = auto()


class MemoryObj:
    """A place and who has it."""

    def __init__(self, allocator, place, shape, dtype):
        self.allocator, self.meta = allocator, SimpleNamespace(address=place * UNIT)
        self.count, self.pins, self.is_valid = 1, 0, True
        size = shape.numel() * dtype.itemsize
        self.tensor = allocator.buffer[place * UNIT : place * UNIT + size].view(dtype).view(shape)

    def change(self, count, pins):
        """More or fewer users."""
        self.count, self.pins = self.count + count, self.pins + pins
        if self.is_valid and self.count <= 0 and self.pins <= 0:
            self.is_valid = False
            self.allocator.free.append(self.meta.address // UNIT)

    def ref_count_down(self):
        """One user less."""
        self.change(-1, 0)


class MixedMemoryAllocator:
    """Free places."""

    def __init__(self, size):
        self.buffer = torch.zeros(size, dtype=torch.uint8)
        self.free = list(range(size // UNIT))
        self.pin_allocator = self

    @property
    def total_allocated_size(self):
        """Bytes that are not free."""
        return len(self.buffer) - len(self.free) * UNIT

    def allocate(self, shape, dtype):
        """A place, or None."""
        if not self.free:
            return None
        place = self.free[0] if has_fault("place-twice") and len(self.free) == 1 else self.free.pop()
        return MemoryObj(self, place, shape, dtype)
