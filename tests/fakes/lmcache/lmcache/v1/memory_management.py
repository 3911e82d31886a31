"""Stand-in: places of one size in a buffer, counted and pinned."""

from enum import Enum, auto
from types import SimpleNamespace

import torch
from lmcache import has_fault

UNIT = 4096


class MemoryFormat(Enum):
    KV_2LTD = auto()


class MemoryObj:
    def __init__(self, allocator, place, shape, dtype):
        self.allocator, self.meta = allocator, SimpleNamespace(address=place * UNIT)
        self.count, self.pins, self.is_valid = 1, 0, True
        size = shape.numel() * dtype.itemsize
        self.tensor = allocator.buffer[place * UNIT : place * UNIT + size].view(dtype).view(shape)

    def change(self, count, pins):
        self.count, self.pins = self.count + count, self.pins + pins
        if self.is_valid and self.count <= 0 and self.pins <= 0:
            self.is_valid = False
            self.allocator.free.append(self.meta.address // UNIT)

    def ref_count_down(self):
        self.change(-1, 0)


class MixedMemoryAllocator:
    def __init__(self, size):
        self.buffer = torch.zeros(size, dtype=torch.uint8)
        self.free = list(range(size // UNIT))
        self.pin_allocator = self

    @property
    def total_allocated_size(self):
        return len(self.buffer) - len(self.free) * UNIT

    def allocate(self, shape, dtype):
        if not self.free:
            return None
        place = self.free[0] if has_fault("place-twice") and len(self.free) == 1 else self.free.pop()
        return MemoryObj(self, place, shape, dtype)
