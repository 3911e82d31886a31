"""Memory: byte ranges of tensors by address, so that overlap is found across storages, shapes and types."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__tracebackhide__ = True

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_readable(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return is_plain and (tensor.element_size() in BITS or tensor.is_complex())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host copy of a tensor's bytes, flat uint8."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    bits = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
    return bits.view(torch.uint8).cpu().clone()


class ByteMap:
    """A number for each byte of some tensors, initially 0."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._runs: list[tuple[torch.device, int, int]] = []
        for device, start, end in sorted((_extent(each) for each in tensors), key=lambda run: (str(run[0]), *run[1:])):
            if self._runs and self._runs[-1][0] == device and start < self._runs[-1][2]:
                self._runs[-1] = (device, self._runs[-1][1], max(end, self._runs[-1][2]))
            else:
                self._runs.append((device, start, end))
        self._maps = [torch.zeros(end - start, dtype=torch.int16) for _, start, end in self._runs]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a tensor's bytes as a view: [*shape, bytes of an element]."""
        device, start, _ = _extent(tensor)
        at = next(at for at, run in enumerate(self._runs) if run[0] == device and run[1] <= start < run[2])
        size = tensor.element_size()
        strides = (*(stride * size for stride in tensor.stride()), 1)
        return self._maps[at].as_strided((*tensor.shape, size), strides, start - self._runs[at][1])


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (is_readable(one) and is_readable(other) and one.numel() and other.numel()):
        return False
    (device, start, end), (where, first, last) = _extent(one), _extent(other)
    if device != where or end <= first or last <= start:
        return False
    taken = ByteMap((one, other))
    taken.of(one).fill_(1)
    return bool(taken.of(other).any())


def has_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not overlap(one, other):
        return False
    taken = ByteMap((one, other))
    taken.of(one).fill_(1)
    return not bool(taken.of(other).all())


def rows_touched(tensor: torch.Tensor, rows: torch.Tensor, dims: int) -> frozenset[int]:
    """Return the rows that share a byte with a tensor. dims: leading dimensions of `rows` that number them."""
    if not overlap(tensor, rows):
        return frozenset()
    taken = ByteMap((tensor, rows))
    taken.of(tensor).fill_(1)
    return frozenset(torch.nonzero(taken.of(rows).flatten(0, dims - 1).flatten(1).any(1)).view(-1).tolist())


def _extent(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    start = tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, start, start + (steps + 1) * tensor.element_size()
