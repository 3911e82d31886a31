"""The host tier of a KV pool: the same buffer tables in pinned memory, in one of three layouts.

Invariants:
- Device to host to device is bit-exact for every layout and method; other units stay unchanged.
- A HostPool plans copies and never runs one: the caller submits the chunks with their footprints.
- Ids are copied when a copy is planned.
- The host has no padding: ids 0 .. units - 1 are all usable. Row 0 of the device is padding and raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Final

import numpy as np
import torch

from kvcheck.core.base.errors import LayoutMismatch, LengthMismatch, UsageError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import ChunkWork, Footprint, Memory, Place
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools.allocator import IdAllocator
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, SpaceSpec
from kvcheck.kernels.page_copy import copy_block_torch, copy_bytes_torch, copy_rows

CHUNK_UNITS = 64
"""Pages or slots copied by one chunk; the order of the chunks of a copy is free."""

# Memory of one buffer, for U units (pages or slots) of r rows (r = page_size for TOKEN rows, else 1) of W words on L
# layers, as axes of [L, U, r, W], outermost first:
#     layer-first          [L, U, r, W]    each layer as the device has it
#     page-first           [U, r, L, W]    all layers of a row side by side, token after token
#     page-first-direct    [U, L, r, W]    all layers of a page side by side, each layer contiguous
_ORDERS: Final[dict[str, tuple[int, int, int, int]]] = {
    "layer-first": (0, 1, 2, 3),
    "page-first": (1, 2, 0, 3),
    "page-first-direct": (1, 0, 2, 3),
}
HOST_LAYOUTS: Final = tuple(_ORDERS)
COPY_METHODS: Final = ("kernel", "direct")
"""kernel: one copy by row ids. direct: one copy a run of units, or a page."""


class HostPool:
    """units: usable pages or slots of each space."""

    def __init__(
        self,
        specs: Sequence[SpaceSpec],
        *,
        units: Mapping[str, int],
        page_size: int,
        layout: str,
        method: str,
        backend: Memory,
        emit: Emit | None = None,
    ) -> None:
        _require("host layout", layout, HOST_LAYOUTS)
        _require("copy method", method, COPY_METHODS)
        for spec in specs:
            if units.get(spec.name, 0) < 1:
                raise LayoutMismatch(
                    f"host space {spec.name} needs at least one page or slot, got {units.get(spec.name)}; "
                    f"sizes are given for {', '.join(units) or 'no space'}"
                )
        self.layout = layout
        self.method = method
        self.page_size = page_size
        self._backend = backend
        self._specs = {spec.name: spec for spec in specs}
        self._units = {spec.name: units[spec.name] for spec in specs}
        self.allocators: dict[str, IdAllocator] = {
            name: IdAllocator(f"host.{name}", count=count, first=0, emit=emit) for name, count in self._units.items()
        }
        self._pages: dict[tuple[str, str], torch.Tensor] = {}
        order = _ORDERS[layout]
        for spec in specs:
            for buffer in spec.buffers:
                shape = self._shape(spec, buffer)
                memory = backend.empty(
                    self._memory_name(spec, buffer), [shape[axis] for axis in order], torch.int64, Place.PINNED
                )
                self._pages[spec.name, buffer.name] = memory.permute([order.index(axis) for axis in range(4)])

    def backup_chunks(
        self,
        space: str,
        buffers: Sequence[str],
        *,
        host: IndexArray,
        device: IndexArray,
        words: Mapping[str, torch.Tensor],
    ) -> tuple[ChunkWork, ...]:
        """Chunks that copy all layers of whole units, device[i] to host[i]. words: by buffer, [L, R, W], to be read."""
        what = f"host.{space} backup"
        hosts, devices = _pairs(host, device, what=what)
        _check_ids(hosts, first=0, stop=self._count(space), what=f"{what}, host ids", is_target=True)
        chunks: list[ChunkWork] = []
        for name, target in self._views(space, buffers):
            source = self._device_view(space, name, words)
            _check_ids(devices, first=1, stop=source.shape[1], what=f"{what} of {name}, device ids", is_target=False)
            chunks += self._copies(target, hosts, source, devices)
        return tuple(chunks)

    def load_chunks(
        self,
        space: str,
        buffers: Sequence[str],
        *,
        layer: int,
        host: IndexArray,
        device: IndexArray,
        words: Mapping[str, torch.Tensor],
    ) -> tuple[ChunkWork, ...]:
        """Chunks that copy one local layer of whole units, host[i] to device[i]. words: [L, R, W], to be written."""
        what = f"host.{space} load"
        hosts, devices = _pairs(host, device, what=what)
        self._check_layers(space, (layer, layer + 1))
        _check_ids(hosts, first=0, stop=self._count(space), what=f"{what}, host ids", is_target=False)
        chunks: list[ChunkWork] = []
        for name, source in self._views(space, buffers):
            target = self._device_view(space, name, words)
            _check_ids(devices, first=1, stop=target.shape[1], what=f"{what} of {name}, device ids", is_target=True)
            chunks += self._copies(target[layer : layer + 1], devices, source[layer : layer + 1], hosts)
        return tuple(chunks)

    def footprint(
        self,
        space: str,
        buffers: Sequence[str],
        units: IndexArray,
        *,
        layers: tuple[int, int],
        owners: IndexArray | int | None = None,
    ) -> Footprint:
        """Footprint of units. layers: half-open, local to the space. owners: the request of each unit, or of all."""
        names = tuple(name for name, _ in self._views(space, buffers))
        self._check_layers(space, layers)
        ids = _owned(units, what=f"host.{space} footprint")
        _check_ids(ids, first=0, stop=self._count(space), what=f"host.{space} footprint", is_target=False)
        for_whom = np.full(len(ids), owners, dtype=np.int64) if isinstance(owners, int) else owners
        return Footprint(f"host.{space}", names, layers, ids, owners=for_whom, place=Place.PINNED)

    def unit_words(self, space: str, buffer: str, unit: int) -> torch.Tensor:
        """Copy one unit of one buffer, [L, r, W] int64."""
        ((_, words),) = self._unit_views(space, unit, (buffer,))
        return words.clone(memory_format=torch.contiguous_format)

    def pack(self, space: str, unit: int) -> torch.Tensor:
        """Copy one unit as bytes, [unit_bytes] uint8: the buffers in table order, each [L, r, W]."""
        return torch.cat([words.reshape(-1) for _, words in self._unit_views(space, unit)]).view(torch.uint8)

    def unpack(self, space: str, unit: int, payload: torch.Tensor) -> None:
        """Write one unit from the bytes of `pack`, of any layout."""
        expected = self.unit_bytes(space)
        if payload.dtype != torch.uint8 or payload.ndim != 1:
            raise LayoutMismatch(
                f"host.{space} unpack: expected a payload of bytes in one dimension, "
                f"got {payload.dtype} of shape {tuple(payload.shape)}"
            )
        if len(payload) != expected:
            raise LengthMismatch(
                f"host.{space} unpack of unit {unit}: expected {expected} bytes, got {len(payload)}; was it packed by "
                f"a pool of the same shape with pages of {self.page_size}?"
            )
        start = 0
        for _, words in self._unit_views(space, unit):
            target = words.view(torch.uint8)
            stop = start + target.numel()
            copy_bytes_torch(target, payload[start:stop].reshape(target.shape))
            start = stop

    def unit_bytes(self, space: str) -> int:
        spec = self._spec(space)
        return sum(prod(self._shape(spec, buffer)) // self._units[space] * 8 for buffer in spec.buffers)

    def free(self) -> None:
        for spec in self._specs.values():
            for buffer in spec.buffers:
                self._backend.release(self._memory_name(spec, buffer))
        self._pages.clear()

    def _copies(
        self, target: torch.Tensor, target_units: IndexArray, source: torch.Tensor, source_units: IndexArray
    ) -> Iterator[ChunkWork]:
        """target[:, target_units[i]] = source[:, source_units[i]], both [l, U, r, W]."""
        make = self._kernel_part if self.method == "kernel" else self._direct_part
        for start in range(0, len(target_units), CHUNK_UNITS):
            chunk = slice(start, start + CHUNK_UNITS)
            yield make(target, target_units[chunk], source, source_units[chunk])

    def _kernel_part(
        self, target: torch.Tensor, target_units: IndexArray, source: torch.Tensor, source_units: IndexArray
    ) -> ChunkWork:
        rows = [self._backend.index(_rows_of(units, target.shape[2])) for units in (target_units, source_units)]
        return partial(copy_rows, target, rows[0], source, rows[1])

    def _direct_part(
        self, target: torch.Tensor, target_units: IndexArray, source: torch.Tensor, source_units: IndexArray
    ) -> ChunkWork:
        # Axes go in the order of the host's memory, so that the host side of a block is one piece wherever it can be.
        order = _ORDERS[self.layout]
        blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start, stop in self._runs(target_units, source_units):
            to, at, count = int(target_units[start]), int(source_units[start]), stop - start
            blocks.append((target[:, to : to + count].permute(order), source[:, at : at + count].permute(order)))
        return partial(_copy_blocks, tuple(blocks))

    def _runs(self, target: IndexArray, source: IndexArray) -> Iterator[tuple[int, int]]:
        """Half-open intervals of pairs that form one block: maximal runs, or single pages if layers interleave."""
        breaks = (np.diff(target) != 1) | (np.diff(source) != 1) | (self.layout != "layer-first")
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(target)]
        return pairwise(edges)

    def _views(self, space: str, buffers: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """(name, [L, U, r, W]) of each buffer."""
        self._spec(space)
        for name in buffers:
            if (space, name) not in self._pages or buffers.count(name) > 1:
                held = [name for owner, name in self._pages if owner == space]
                raise LayoutMismatch(f"host.{space}: expected different buffers out of {held}, got {list(buffers)}")
        return [(name, self._pages[space, name]) for name in buffers]

    def _unit_views(
        self, space: str, unit: int, buffers: Sequence[str] | None = None
    ) -> list[tuple[str, torch.Tensor]]:
        """(name, [L, r, W]) of one unit in each buffer."""
        if not 0 <= unit < self._count(space):
            raise LayoutMismatch(f"host.{space}: expected a unit of 0 to {self._count(space) - 1}, got {unit}")
        named = [buffer.name for buffer in self._spec(space).buffers] if buffers is None else buffers
        return [(name, pages[:, unit]) for name, pages in self._views(space, named)]

    def _device_view(self, space: str, name: str, words: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Device words of a buffer as [L, V, r, W]."""
        layers, _, rows, width = self._pages[space, name].shape
        if name not in words:
            raise LayoutMismatch(f"host.{space}: no device words for buffer {name}, got words for {list(words)}")
        given = words[name]
        shape = tuple(given.shape)
        if given.dtype != torch.int64 or given.ndim != 3 or (shape[0], shape[1] % rows, shape[2]) != (layers, 0, width):
            raise LayoutMismatch(
                f"host.{space}.{name}: expected device words int64 [{layers}, a multiple of {rows}, {width}], "
                f"got {given.dtype} {list(shape)}"
            )
        return given.view(layers, shape[1] // rows, rows, width)

    def _shape(self, spec: SpaceSpec, buffer: BufferSpec) -> tuple[int, int, int, int]:
        rows = self.page_size if buffer.rows is Granularity.TOKEN else 1
        return len(spec.layers), self._units[spec.name], rows, buffer.row_bytes // 8

    def _memory_name(self, spec: SpaceSpec, buffer: BufferSpec) -> str:
        return f"host.{self.layout}.{spec.name}.{buffer.name}"

    def _spec(self, space: str) -> SpaceSpec:
        if space not in self._specs:
            raise LayoutMismatch(f"the host pool has no space {space!r}; it has {list(self._specs)}")
        return self._specs[space]

    def _count(self, space: str) -> int:
        return self._units[self._spec(space).name]

    def _check_layers(self, space: str, layers: tuple[int, int]) -> None:
        count = len(self._spec(space).layers)
        if not 0 <= layers[0] < layers[1] <= count:
            raise LayoutMismatch(f"host.{space}: expected layers within [0, {count}), got [{layers[0]}, {layers[1]})")


def layout_axes(layout: str) -> tuple[int, int, int]:
    """Positions of layers, units and rows in a layout's memory, from the outermost. Row words are always innermost."""
    _require("host layout", layout, HOST_LAYOUTS)
    order = _ORDERS[layout]
    return order.index(0), order.index(1), order.index(2)


def _copy_blocks(blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> None:
    for target, source in blocks:
        copy_block_torch(target, source)


def _rows_of(units: IndexArray, rows: int) -> IndexArray:
    return (units[:, None] * rows + np.arange(rows, dtype=np.int64)).reshape(-1)


def _owned(ids: IndexArray, *, what: str) -> IndexArray:
    owned = np.array(ids)
    if owned.ndim != 1 or (len(owned) and owned.dtype.kind not in "iu"):
        raise LayoutMismatch(f"{what}: expected ids [n] of whole numbers, got {owned.dtype} {list(owned.shape)}")
    return owned.astype(np.int64)


def _pairs(host: IndexArray, device: IndexArray, *, what: str) -> tuple[IndexArray, IndexArray]:
    hosts, devices = _owned(host, what=f"{what}, host ids"), _owned(device, what=f"{what}, device ids")
    if len(hosts) != len(devices):
        raise LengthMismatch(f"{what}: expected as many host ids as device ids, got {len(hosts)} and {len(devices)}")
    return hosts, devices


def _check_ids(ids: IndexArray, *, first: int, stop: int, what: str, is_target: bool) -> None:
    """Raise unless ids lie within [first, stop) and no target is written twice."""
    wrong = ids[(ids < first) | (ids >= stop)]
    if len(wrong):
        raise LayoutMismatch(f"{what}: expected {first} to {stop - 1}, got {wrong.tolist()}")
    if is_target and len(np.unique(ids)) != len(ids):
        raise LayoutMismatch(f"{what}: expected each target once, got {ids.tolist()}")


def _require(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UsageError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
