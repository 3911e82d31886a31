"""RoomInspector: compares the memory of a failed room with the words of its sources.

Invariants:
- The mark of unwritten memory is no difference in a drained room: a failed room is never whole.
- The unused rest of a last page is not compared: its words follow no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcheck.core.base import content
from kvcheck.core.base.content import Site
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.transfer.layout import BufferLayout, EndLayout, routes, sources_of
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataRow
from kvcheck.core.cache.transfer.receiver import InboundRoom, mark_of, needed_pages, room_units
from kvcheck.core.cache.transfer.seal import piece_of
from kvcheck.core.stress.workload.decoder import ContentDecoder
from kvcheck.core.stress.workload.events import RoomDrained, Unsealed
from kvcheck.core.stress.workload.host_inspector import token_rows
from kvcheck.core.stress.workload.mismatch import Mismatch
from kvcheck.kernels.content import rows_torch
from kvcheck.kernels.content_rows import differing

MAX_ROWS = 64
"""Rows that are described; one of each buffer, layer and source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenPart:
    """The words [first, last) of each row, written by one source or by all."""

    source: str
    buffer: BufferLayout
    spec: BufferSpec
    first: int
    last: int


class WordInspector:
    def __init__(self, decoder: ContentDecoder, emit: Emit) -> None:
        self._decoder = decoder
        self._emit = emit

    def inspect(
        self, room: InboundRoom, pool: KVPool, metadata: MetadataBuffers, layout: EndLayout, peers: Sequence[EndLayout]
    ) -> None:
        pairs = routes(layout, sources=len(peers), targets=layout.ranks)
        late = [peer for peer in peers if (peer.rank, layout.rank) in pairs and peer.name not in room.verified]
        rows: list[tuple[str, Mismatch]] = []
        words = 0
        for peer in late:
            slices = piece_of(pairs[peer.rank, layout.rank], at_source=False)
            for part in _parts(peer.name, slices, pool, layout):
                compared, found = self._compared((part,), room, pool, layout, marks=())
                words += compared
                rows += [(peer.name, each) for each in found]
        row_sender = sources_of(pairs, layout.rank)[0]
        if any(peer.rank == row_sender for peer in late):
            packed = metadata.row_view(room.slot).cpu().clone()
            request = room.ticket.request
            words += packed.numel() // 8
            found = self._decoder.metadata_mismatches(request, MetadataRow(packed, metadata.fields))
            rows += [(f"{peers[0].end}-{row_sender}", each) for each in found]
        sources = tuple(peer.name for peer in late)
        self._emit(Unsealed(layout.name, room.ticket.request, sources, words, tuple(rows[:MAX_ROWS])))

    def look_back(self, room: InboundRoom, pool: KVPool, metadata: MetadataBuffers, layout: EndLayout) -> None:
        mark, request = mark_of(room.ticket.generation), room.ticket.request
        words, rows = self._compared(_whole(pool, layout), room, pool, layout, marks=(mark,))
        packed = metadata.row_view(room.slot).cpu().clone()
        if not bool((packed.view(torch.int64) == mark).all()):
            words += packed.numel() // 8
            rows += self._decoder.metadata_mismatches(request, MetadataRow(packed, metadata.fields))
        self._emit(RoomDrained(layout.name, request, words, tuple(rows[:MAX_ROWS])))

    def _compared(
        self,
        parts: Iterable[_WrittenPart],
        room: InboundRoom,
        pool: KVPool,
        layout: EndLayout,
        *,
        marks: tuple[int, ...],
    ) -> tuple[int, list[Mismatch]]:
        compared = [each for part in parts for each in self._compare(part, room, pool, layout, marks)]
        return sum(size for size, _ in compared), [found for _, found in compared if found is not None]

    def _compare(
        self, part: _WrittenPart, room: InboundRoom, pool: KVPool, layout: EndLayout, marks: tuple[int, ...]
    ) -> Iterator[tuple[int, Mismatch | None]]:
        """Words compared, and the first differing row, by layer and piece. marks: words that count as right."""
        units, size, request = room_units(layout, room.holding, room.tokens), layout.page_size, room.ticket.request
        space, buffer = part.buffer.space, part.buffer
        codes = self._decoder.codes_of(request)
        memory = pool.sets[space].write_view(buffer.name)
        memory = memory.view(memory.shape[0], -1, buffer.rows.rows_per_unit, memory.shape[2])  # [L, units, r, W]
        ids = units[buffer.leg, space]
        if space == "state":
            first, wanted = 0, codes[room.tokens - 1 : room.tokens].view(1, 1)
        else:
            pages = needed_pages(layout, space, room.tokens)
            first, wanted = pages.start * size, codes[pages.start * size : pages.stop * size].view(-1, size)
        for local, layer in enumerate(buffer.layers):
            held = memory[local][torch.from_numpy(np.asarray(ids)).to(memory.device)].cpu()
            by_piece: dict[str, list[torch.Tensor]] = {}
            for unit in held:
                for piece, rows in token_rows(part.spec, unit, size):
                    by_piece.setdefault(piece, []).append(rows)
            for piece, of_units in by_piece.items():
                site = self._decoder.site(space, part.spec, layer, piece)
                # Pieces of packed pages are whole on every rank; rows are dealt out by words.
                span = slice(None) if piece else slice(part.first, part.last)
                seen = torch.stack(of_units)
                masks = content.mask(site, seen.shape[-1])[span]
                of_span = seen[..., span].contiguous()
                bad = _unlike(of_span, wanted, masks, marks) if marks else differing(of_span, wanted, masks)
                if space != "state":
                    bad &= torch.arange(bad.numel()).view(bad.shape) + first < room.tokens
                yield bad.numel() * masks.numel(), self._first(bad, seen, site, span, ids, request, first, room.tokens)

    def _first(
        self,
        bad: torch.Tensor,
        seen: torch.Tensor,
        site: Site,
        span: slice,
        ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        request: int,
        first: int,
        tokens: int,
    ) -> Mismatch | None:
        """bad: [units, r]; seen: [units, r, W]."""
        if not bool(bad.any()):
            return None
        unit, row = (int(each) for each in torch.nonzero(bad)[0])
        position = tokens - 1 if site.space == "state" else first + unit * bad.shape[1] + row
        return Mismatch(
            request=request,
            space=site.space,
            buffer=site.buffer,
            piece=site.piece,
            layer=site.layer,
            page=int(ids[unit]),
            row=row,
            position=position,
            author=self._decoder.author_of(request, position),
            words=tuple(int(word) for word in seen[unit, row, span][:64]),
            half=seen.dtype == torch.int32,
            count=int(bad.sum()),
            first_word=site.first_word + (span.start or 0),
        )


def _unlike(rows: torch.Tensor, codes: torch.Tensor, masks: torch.Tensor, marks: tuple[int, ...]) -> torch.Tensor:
    known = torch.tensor(marks, dtype=torch.int64).view(rows.dtype)
    return ((rows != rows_torch(codes, masks, rows.dtype)) & ~torch.isin(rows, known)).any(-1)


def _whole(pool: KVPool, layout: EndLayout) -> Iterator[_WrittenPart]:
    for buffer in layout.buffers:
        spec = _spec_of(pool, buffer)
        yield _WrittenPart(source="", buffer=buffer, spec=spec, first=0, last=spec.row_bytes // 8)


def _spec_of(pool: KVPool, buffer: BufferLayout) -> BufferSpec:
    (spec,) = (each for each in pool.sets[buffer.space].spec.buffers if each.name == buffer.name)
    return spec


def _parts(
    source: str, slices: Mapping[tuple[str, str], tuple[int, int]], pool: KVPool, layout: EndLayout
) -> Iterator[_WrittenPart]:
    for buffer in layout.buffers:
        if (buffer.space, buffer.name) not in slices:
            continue
        spec = _spec_of(pool, buffer)
        first, count = (each * buffer.rows.shard_bytes // 8 for each in slices[buffer.space, buffer.name])
        whole = spec.rows is Granularity.PAGE
        last = spec.row_bytes // 8 if whole else first + count
        yield _WrittenPart(source=source, buffer=buffer, spec=spec, first=0 if whole else first, last=last)
