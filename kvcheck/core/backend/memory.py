"""Named memory of the CPU backends: poisoned when fresh, counted until released.

Invariants:
- A name is allocated once at a time; its bytes count until it is released.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcheck.core.backend.backend import POISON_BYTE, Place
from kvcheck.core.errors import DoubleFree, InternalError
from kvcheck.core.paging import IndexArray


class HostMemory:
    """CPU tensors by name. One thread, so no locks."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._places: dict[str, Place] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """A poisoned tensor of that name."""
        if name in self._bytes:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)
        self._bytes[name] = tensor.numel() * tensor.element_size()
        self._places[name] = place
        return tensor

    def release(self, name: str) -> None:
        """Forget the name and its bytes."""
        if name not in self._bytes:
            raise DoubleFree(f"memory {name!r} is not allocated; allocated: {', '.join(sorted(self._bytes)) or 'none'}")
        del self._bytes[name], self._places[name]

    def allocated(self) -> dict[str, int]:
        """Bytes by name."""
        return dict(self._bytes)

    @staticmethod
    def index(values: IndexArray) -> torch.Tensor:
        """A copy of the ids as a tensor."""
        return torch.from_numpy(values.copy())
