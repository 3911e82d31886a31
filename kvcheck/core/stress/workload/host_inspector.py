"""HostInspector: compares the host tier with the computed words.

Invariants:
- A page's words are those of one request that computed its prefix. A page that no known request has computed is
  reported, never skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvcheck.core.base import content
from kvcheck.core.base.content import Site
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.events import Emit, Event, LookedUp
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, Piece, SpaceSpec
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.workload.events import Saw, Verified
from kvcheck.core.stress.workload.mismatch import Mismatch
from kvcheck.kernels.content_rows import differing


class UnitReader(Protocol):
    def unit_words(self, space: str, buffer: str, unit: int) -> torch.Tensor:
        """An owned copy of one page or slot of a buffer: [L, r, W] int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DifferingRow:
    piece: str
    layer: int
    row: int
    words: tuple[int, ...]
    half: bool
    count: int


class HostInspector:
    def __init__(self, shape: ModelShape, codes_of: Callable[[int], torch.Tensor], emit: Emit) -> None:
        self._size = shape.page_size
        self._specs = {spec.name: spec for spec in POOLS.load(shape.family)(shape)}
        self._codes_of = codes_of
        self._emit = emit
        self._authors: dict[bytes, list[tuple[int, int, torch.Tensor]]] = {}

    def computed(self, request: int, chain: tuple[bytes, ...]) -> None:
        codes = self._codes_of(request).cpu()
        for page, each in enumerate(chain):
            wanted = codes[page * self._size : (page + 1) * self._size]
            known = self._authors.setdefault(each, [])
            if not any(torch.equal(wanted, codes) for _, _, codes in known):
                known.append((request, page, wanted))

    def inspect(
        self, host: UnitReader, space: str, chain: tuple[bytes, ...], units: IndexArray, *, tier: str = "host"
    ) -> None:
        spec = self._specs[space]
        nobody = (0, 0, torch.zeros(self._size, dtype=torch.int64))
        for each, unit in zip(chain, units.tolist(), strict=True):
            found: list[Mismatch] = []
            words = [host.unit_words(space, buffer.name, unit) for buffer in spec.buffers]
            for buffer, rows in zip(spec.buffers, words, strict=True):
                self._emit(Verified(f"{tier}:{buffer.name}", rows.numel()))
            for request, page, codes in reversed(self._authors.get(each, [nobody])):
                # A cached state stands behind the last token of its page.
                wanted = codes[-1:] if space == "state" else codes
                found = [
                    Mismatch(
                        request=request,
                        space=space,
                        buffer=buffer.name,
                        piece=row.piece,
                        layer=row.layer,
                        page=unit,
                        row=row.row,
                        position=page * self._size + (self._size - 1 if space == "state" else row.row),
                        author=request,
                        words=row.words,
                        half=row.half,
                        count=row.count,
                        tier=tier,
                    )
                    for buffer, rows in zip(spec.buffers, words, strict=True)
                    for row in self._differing(spec, buffer, rows, wanted)
                ]
                if not found:
                    break
            for mismatch in found:
                self._emit(Saw(mismatch))

    def _differing(
        self, spec: SpaceSpec, buffer: BufferSpec, words: torch.Tensor, codes: torch.Tensor
    ) -> Iterator[_DifferingRow]:
        for local, layer in enumerate(spec.layers):
            for name, rows in token_rows(buffer, words[local], self._size):
                bad = differing(rows, codes, content.mask(Site(spec.name, buffer.name, name, layer), rows.shape[-1]))
                if bool(bad.any()):
                    first = int(torch.nonzero(bad)[0])
                    seen = tuple(int(word) for word in np.asarray(rows[first])[:64])
                    yield _DifferingRow(
                        piece=name,
                        layer=layer,
                        row=first,
                        words=seen,
                        half=rows.dtype == torch.int32,
                        count=int(bad.sum()),
                    )


def token_rows(buffer: BufferSpec, words: torch.Tensor, size: int) -> list[tuple[str, torch.Tensor]]:
    """Token-addressed rows [P, W] of a page: the buffer's own, or each piece's of a packed page. words: of the page in
    one layer, [r, W] int64."""
    if buffer.rows is not Granularity.PAGE:
        return [("", words)]
    return [(piece.name, _of_piece(words, piece, size)) for piece in buffer.pieces]


def _of_piece(words: torch.Tensor, piece: Piece, size: int) -> torch.Tensor:
    first, last = piece.offset // 8, (piece.offset + size * piece.size_bytes) // 8
    block = words[0, first:last].contiguous()
    if piece.size_bytes % 8:
        block = block.view(torch.int32)
    return block.view(size, -1)


class HostHits:
    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._found: dict[int, LookedUp] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, LookedUp):
            self._found[event.request] = event
        self._emit(event)

    def pages(self, request: int, first: int) -> range:
        """Logical pages that were loaded for a request. first: the first page it computes."""
        found = self._found.get(request)
        return range(found.device_pages, first) if found is not None and found.pages == first else range(0)
