"""HostInspector: compares what the host tier holds with what was computed, word by word.

Invariants:
- A page is known by the hash of its prefix; whoever computed that prefix first says what its words must be.
- A page that nobody is known to have computed is reported, never skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from kvcheck.core.paging import IndexArray
from kvcheck.core.pools import POOLS
from kvcheck.core.pools.buffers import BufferSpec, Granularity, Piece, SpaceSpec
from kvcheck.core.pools.shape import ModelShape
from kvcheck.core.workload import content
from kvcheck.core.workload.mismatch import Mismatch
from kvcheck.kernels.content import differing_torch


class UnitReader(Protocol):
    """A tier that can be looked into."""

    def unit_words(self, space: str, buffer: str, unit: int) -> torch.Tensor:
        """An owned copy of one page or slot of a buffer: [L, r, W] int64."""


class InspectionSink(Protocol):
    """Where an inspector reports."""

    def verified(self, buffer: str, words: int) -> None:
        """So many words were compared."""

    def mismatch(self, found: Mismatch) -> None:
        """A row differed."""


class HostInspector:
    """Knows whose pages are whose by their hashes. codes_of: codes of every position of a request, padded to pages."""

    def __init__(self, shape: ModelShape, codes_of: Callable[[int], torch.Tensor], sink: InspectionSink) -> None:
        self._size = shape.page_size
        self._specs = {spec.name: spec for spec in POOLS.load(shape.family)(shape)}
        self._codes_of = codes_of
        self._sink = sink
        self._first: dict[bytes, tuple[int, int]] = {}

    def computed(self, request: int, chain: tuple[bytes, ...]) -> None:
        """The first pages of a request have these hashes."""
        for page, each in enumerate(chain):
            self._first.setdefault(each, (request, page))

    def inspect(
        self, host: UnitReader, space: str, chain: tuple[bytes, ...], units: IndexArray, *, tier: str = "host"
    ) -> None:
        """Compare every word of these host pages or slots. tier: host after a backup, storage after a fetch."""
        spec = self._specs[space]
        for each, unit in zip(chain, units.tolist(), strict=True):
            request, page = self._first.get(each, (0, 0))
            codes = self._codes_of(request).cpu() if request else torch.zeros(self._size, dtype=torch.int64)
            start = page * self._size
            wanted = codes[start : start + self._size] if request else codes
            if space == "state":
                wanted = wanted[-1:]  # a cached state stands behind the last token of its page
            for buffer in spec.buffers:
                words = host.unit_words(space, buffer.name, unit)
                self._sink.verified(f"{tier}:{buffer.name}", words.numel())
                for local, layer in enumerate(spec.layers):
                    self._compare(spec, buffer, layer, words[local], wanted, request=request, unit=unit, start=start)

    def _compare(
        self,
        spec: SpaceSpec,
        buffer: BufferSpec,
        layer: int,
        words: torch.Tensor,
        codes: torch.Tensor,
        *,
        request: int,
        unit: int,
        start: int,
    ) -> None:
        """One buffer of one layer of one page: [r, W] words."""
        for name, rows in self._pieces(buffer, words):
            site = content.Site(spec.name, buffer.name, name, layer)
            bad = differing_torch(rows, codes, content.mask(site, rows.shape[-1]))
            if not bool(bad.any()):
                continue
            first = int(torch.nonzero(bad)[0])
            offset = self._size - 1 if spec.name == "state" else first
            self._sink.mismatch(
                Mismatch(
                    request=request,
                    space=f"host.{spec.name}",
                    buffer=buffer.name,
                    piece=name,
                    layer=layer,
                    page=unit,
                    row=first,
                    position=start + offset,
                    author=request,
                    words=tuple(int(word) for word in np.asarray(rows[first])[:64]),
                    half=rows.dtype == torch.int32,
                    count=int(bad.sum()),
                )
            )

    def _pieces(self, buffer: BufferSpec, words: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Token-addressed rows [P, W] of a page: the buffer's own, or those of each piece of a packed page."""
        if buffer.rows is not Granularity.PAGE:
            return [("", words)]
        return [(piece.name, self._piece(words, piece)) for piece in buffer.pieces]

    def _piece(self, words: torch.Tensor, piece: Piece) -> torch.Tensor:
        first, last = piece.offset // 8, (piece.offset + self._size * piece.size_bytes) // 8
        block = words[0, first:last].contiguous()
        if piece.size_bytes % 8:
            block = block.view(torch.int32)
        return block.view(self._size, -1)
