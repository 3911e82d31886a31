"""BufferSpec tables and BufferSet: the sole owner of a pool's tensors.

Invariants:
- Offload, transfer, clear, size and checks loop over the table, so none of them can forget a buffer.
- Tensors leave a BufferSet through `read_view`, which waits for the layer, or `write_view`.
- Row 0 (page 0, slot 0) is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Protocol

import numpy as np
import torch

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.backend.backend import Backend, Footprint, Lane, Operation, Place
from kvcheck.kernels.page_copy import fill_torch


class Granularity(Enum):
    TOKEN = "token"
    PAGE = "page"
    SLOT = "slot"


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one token inside a page row: token o has [offset + o * size_bytes, + size_bytes)."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """One physical buffer of a space, per layer: [rows, *item_shape]."""

    name: str
    rows: Granularity
    item_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = ()  # byte ranges of each token, for PAGE rows only
    shards: int = 1  # equal parts of a row that tensor parallelism distributes; 1: every rank keeps the whole row

    def __post_init__(self) -> None:
        if self.row_bytes % 8:
            raise LayoutMismatch(f"buffer {self.name}: a row must be a multiple of 8 bytes, got {self.row_bytes}")
        if (self.rows is Granularity.PAGE) != bool(self.pieces):
            raise LayoutMismatch(f"buffer {self.name}: PAGE rows, and only they, name the pieces of a token")
        if self.shards < 1 or self.row_bytes % (8 * self.shards):
            raise LayoutMismatch(
                f"buffer {self.name}: a row of {self.row_bytes} bytes must be at least one shard, each a multiple of 8 "
                f"bytes, got {self.shards} shards"
            )
        if self.shards > 1 and self.rows is Granularity.PAGE:
            raise LayoutMismatch(
                f"buffer {self.name}: a PAGE row packs whole tokens and is never dealt out, got {self.shards} shards"
            )

    @property
    def row_bytes(self) -> int:
        return prod(self.item_shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSpec:
    name: str
    unit: Granularity  # PAGE or SLOT, allocated as one id
    layers: tuple[int, ...]  # global ids in the order of the buffers' first dimension
    buffers: tuple[BufferSpec, ...]


class ReadGate(Protocol):
    """The gate of guarded reads, such as the host tier's layer gate, which pools never import."""

    def wait(self, layer: int, lane: Lane) -> None:
        """Make `lane` wait until the local `layer` may be read."""

    def wait_whole(self, lane: Lane) -> None:
        """Make `lane` wait until every layer may be read."""


class OpenGate:
    """The gate of a pool without a host tier: no load is ever pending."""

    def wait(self, layer: int, lane: Lane) -> None: ...

    def wait_whole(self, lane: Lane) -> None: ...


class BufferSet:
    """The tensors of one space: `units` usable pages or slots, plus row 0."""

    def __init__(
        self,
        spec: SpaceSpec,
        *,
        units: int,
        page_size: int,
        backend: Backend,
        label: str = "device",
        gate: ReadGate | None = None,
    ) -> None:
        self.spec = spec
        self.units = units
        self.page_size = page_size
        self.label = label
        self._backend = backend
        self._gate: ReadGate = gate or OpenGate()
        self._words: dict[str, torch.Tensor] = {}
        for buffer in spec.buffers:
            rows = (units + 1) * (page_size if buffer.rows is Granularity.TOKEN else 1)
            tensor = backend.empty(
                self.memory_name(buffer.name), (len(spec.layers), rows, *buffer.item_shape), buffer.dtype, Place.DEVICE
            )
            self._words[buffer.name] = tensor.view(len(spec.layers), rows, -1).view(torch.uint8).view(torch.int64)

    def connect(self, gate: ReadGate) -> None:
        self._gate = gate

    def memory_name(self, buffer: str) -> str:
        return f"{self.label}.{self.spec.name}.{buffer}"

    def buffer(self, name: str) -> BufferSpec:
        for buffer in self.spec.buffers:
            if buffer.name == name:
                return buffer
        raise LayoutMismatch(
            f"space {self.spec.name} has no buffer {name!r}; it has {[b.name for b in self.spec.buffers]}"
        )

    def read_view(self, name: str, layers: Sequence[int], lane: Lane, *, piece: str = "") -> torch.Tensor:
        """Return words of all layers, [L, R, W] int64, once `layers` (local) may be read on `lane`.

        piece: the piece of each token that the reader needs, if the buffer packs several; all by default. The view is
        valid for operations submitted to `lane` after this call, until the rows are freed.

        SGLang's get_index_k_continuous, get_index_k_scale_continuous and get_index_k_scale_buffer did not wait for the
        layer (#22811). (mutants: index-key-reader-without-wait, -scale-reader-, -pair-reader-)
        """
        for layer in layers:
            self._gate.wait(layer, lane)
        return self._words[name]

    def write_view(self, name: str) -> torch.Tensor:
        """Return words of all layers, [L, R, W] int64, to write rows that the caller owns; never to read."""
        return self._words[name]

    def zero(self, unit: int, lane: Lane) -> None:
        """Clear one slot or page before its first use by a new owner."""
        targets = [self._unit_rows(buffer, unit) for buffer in self.spec.buffers]

        def run() -> None:
            for target in targets:
                fill_torch(target, 0)

        cleared = Footprint(
            self.spec.name,
            tuple(buffer.name for buffer in self.spec.buffers),
            (0, len(self.spec.layers)),
            np.array([unit], dtype=np.int64),
        )
        self._backend.submit(Operation(f"{self.spec.name}.zero", (run,)), lane=lane, writes=(cleared,))

    def storage_ranges(self) -> dict[str, tuple[int, int]]:
        """First and one-past-last address of each buffer, for aliasing checks."""
        return {name: (words.data_ptr(), words.data_ptr() + words.numel() * 8) for name, words in self._words.items()}

    def free(self) -> None:
        """Free every buffer of the table. (mutant: free-keeps-index-buffer)"""
        for buffer in self.spec.buffers:
            self._backend.release(self.memory_name(buffer.name))
        self._words.clear()

    def _unit_rows(self, buffer: BufferSpec, unit: int) -> torch.Tensor:
        step = self.page_size if buffer.rows is Granularity.TOKEN else 1
        return self._words[buffer.name][:, unit * step : (unit + 1) * step]
