"""Named memory of the CPU backends: poisoned when fresh and when released."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcheck.core.base.errors import DoubleFree, InternalError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import POISON_BYTE, Place


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
