"""Buffer views: finds every tensor below an object of an engine, and views it as rows of bytes.

Invariants:
- Buffers are found, not listed: a list would have the same omissions as the engine.
- Rows share the engine's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

MAX_DEPTH = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferView:
    """One layer of a buffer. unit: the unit of a row. rows: [units, bytes of one] uint8. tier: device or host."""

    name: str
    layer: int
    unit: str
    rows: torch.Tensor
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class Inventory:
    """Buffers of an object. unknown: tensors that fit no unit, as "name[layer]: shape"."""

    buffers: tuple[BufferView, ...]
    unknown: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.name for each in self.buffers))


def inventory(thing: object, package: str, units: Mapping[str, int]) -> Inventory:
    """Return the buffers below an object of the engine. units: unit -> number of rows of its buffers."""
    held: list[BufferView] = []
    unknown: list[str] = []
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, layer, tensor in _tensors(thing, package, "", 0, set()):
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.dim() < 2 or not tensor.numel() or key in seen:
            continue  # pointers, strides, index maps and scalars are no content
        seen.add(key)
        rows = _rows(name, layer, tensor, units)
        if rows:
            held += rows
        else:
            unknown.append(f"{name}[{layer}]: {list(tensor.shape)}")
    return Inventory(tuple(held), tuple(unknown))


def among(found: Inventory, named: Iterable[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> Inventory:
    """Keep the buffers that the engine registers for transfers. The others become unknown: they may hold no content.

    named: (start addresses, sizes in bytes, bytes of an item) of each registration.
    """
    ranges = [pair for starts, sizes, _ in named for pair in zip(starts, sizes, strict=True)]
    held: list[BufferView] = []
    unknown = list(found.unknown)
    for each in found.buffers:
        if any(start <= each.rows.data_ptr() < start + size for start, size in ranges):
            held.append(each)
        else:
            unknown.append(f"{each.name}[{each.layer}], {each.unit} by {each.unit}, which it does not transfer")
    return Inventory(tuple(held), tuple(unknown))


def memories(thing: object, package: str) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield (name, index in its list, tensor) of each storage below an object: the largest tensor on it."""
    largest: dict[int, tuple[str, int, torch.Tensor]] = {}
    for name, at, tensor in _tensors(thing, package, "", 0, set()):
        start = tensor.untyped_storage().data_ptr()
        if tensor.dim() > 1 and tensor.numel() and (start not in largest or tensor.numel() > largest[start][2].numel()):
            largest[start] = (name, at, tensor)
    yield from largest.values()


def _rows(name: str, layer: int, tensor: torch.Tensor, units: Mapping[str, int]) -> list[BufferView]:
    if not tensor.is_contiguous():
        return []
    for unit, count in units.items():
        if tensor.shape[0] == count:
            return [BufferView(name=name, layer=layer, unit=unit, rows=_bytes(tensor))]
    for unit, count in units.items():
        if tensor.dim() > 2 and tensor.shape[1] == count:
            return [
                BufferView(name=f"{name}[{layer}]" if layer else name, layer=at, unit=unit, rows=_bytes(part))
                for at, part in enumerate(tensor)
            ]
    return []


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten(1).view(torch.uint8)


def _tensors(
    thing: object, package: str, path: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    if id(thing) in seen or depth > MAX_DEPTH:
        return
    seen.add(id(thing))
    for name, value in _members(thing):
        where = f"{path}.{name}" if path else name
        for layer, each in _spread(value):
            if isinstance(each, torch.Tensor):
                yield where, layer, each
            elif type(each).__module__.partition(".")[0] == package:
                yield from _tensors(each, package, f"{where}[{layer}]" if layer else where, depth + 1, seen)


def _members(thing: object) -> Iterator[tuple[str, object]]:
    yield from vars(thing).items() if hasattr(thing, "__dict__") else ()
    for kind in type(thing).__mro__:
        for name in (getattr(kind, "__slots__", None) or ()) if isinstance(kind, type) else ():
            if hasattr(thing, name):
                yield name, getattr(thing, name)


def _spread(value: object) -> Iterator[tuple[int, object]]:
    """Yield (index, member) of a list, tuple or mapping, which may be nested."""
    if isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from ((at, inner) for _, inner in _spread(each))
    elif isinstance(value, Mapping):
        for at, each in enumerate(value.values()):
            yield from ((at, inner) for _, inner in _spread(each))
    else:
        yield 0, value
