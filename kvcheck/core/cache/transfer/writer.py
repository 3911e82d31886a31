"""Writer: computes and writes the blocks of one prefill rank's rooms for each peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend, Footprint, Operation, Place, Signal
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.transfer.blocks import byte_blocks, group_contiguous
from kvcheck.core.cache.transfer.layout import EndLayout, Piece, routes, sources_of
from kvcheck.core.cache.transfer.messages import AuxData, Want
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.receiver import register_memory, room_footprints, room_units
from kvcheck.core.cache.transfer.seal import SEAL_BYTES, Content, Sealer, SealPlan, piece_of
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket, Wire
from kvcheck.kernels.page_copy import copy_bytes_torch


class Writer:
    def __init__(
        self,
        pool: KVPool,
        metadata: MetadataBuffers,
        wire: Wire,
        backend: Backend,
        *,
        layout: EndLayout,
        peers: Sequence[EndLayout],
        sealer: type[Sealer],
        aux_over_messages: bool,
    ) -> None:
        self._metadata = metadata
        self._wire = wire
        self._backend = backend
        self._layout = layout
        self._aux_over_messages = aux_over_messages
        self._sealer = sealer(pool, layout, backend)
        pairs = routes(layout, sources=layout.ranks, targets=len(peers))
        self.peers = {peer.name: peer for peer in peers if (layout.rank, peer.rank) in pairs}
        self._slices = {name: pairs[layout.rank, peer.rank] for name, peer in self.peers.items()}
        self._sources = {name: sources_of(pairs, peer.rank) for name, peer in self.peers.items()}
        self._order = {name: at for at, name in enumerate(self.peers)}
        self._seals = backend.empty(
            "seals", (metadata.slots.count * max(1, len(peers)), SEAL_BYTES), torch.uint8, Place.DEVICE
        )
        self._seal_lane = backend.lane("seal")
        register_memory(wire, pool, metadata, self._seals)

    def free(self) -> None:
        self._backend.release("seals")

    def write(
        self,
        want: Want,
        peer: str,
        leg: str,
        pairs: Mapping[str, IndexArray],
        *,
        after: Sequence[Signal],
    ) -> None:
        theirs = {(each.space, each.name): each for each in self.peers[peer].buffers}
        writes = []
        for buffer in self._layout.buffers:
            piece = self._slices[peer].get((buffer.space, buffer.name))
            if buffer.leg != leg or buffer.space not in pairs or piece is None:
                continue
            rows = pairs[buffer.space]
            other = theirs[buffer.space, buffer.name]
            names = (self._part_name(peer, (buffer.space, buffer.name)),)
            layers = (0, buffer.rows.layers)
            owners = np.full(len(rows), want.request, dtype=np.int64)
            writes.append(
                RegionWrite(
                    source=buffer.region,
                    target=other.region,
                    blocks=byte_blocks(buffer.rows, other.rows, group_contiguous(rows), piece),
                    reads=(Footprint(buffer.space, (buffer.name,), layers, rows[:, 0].copy(), owners=owners),),
                    writes=(Footprint(buffer.space, names, layers, rows[:, 1].copy(), owners=owners),),
                )
            )
        if writes:
            self._wire.write(peer, leg, writes, ticket=_ticket(want), after=after)

    def _part_name(self, peer: str, key: Piece) -> str:
        return part_name(key[1], self._layout.rank, len(self._sources[peer]))

    def write_row(self, want: Want, peer: str, slot: int, after: Sequence[Signal]) -> None:
        if self._sources[peer][0] != self._layout.rank:
            return
        if self._aux_over_messages:
            row = self._metadata.get(slot, want.request)
            data = bytes(row.packed.tolist()).hex()
            self._wire.send(peer, AuxData(room=want.room, generation=want.generation, slot=want.slot, row=data))
            return
        owners = np.array([want.request], dtype=np.int64)
        layout = self._layout
        write = RegionWrite(
            source="metadata",
            target="metadata",
            blocks=np.array([[slot * layout.row_bytes, self._stride(peer) * want.slot, layout.packed_bytes]]),
            reads=(self._metadata.footprint(slot, want.request),),
            writes=(Footprint("metadata-decode", ("metadata",), (0, 1), np.array([want.slot]), owners=owners),),
        )
        self._wire.write(peer, "aux", (write,), ticket=_ticket(want), after=after)

    def _stride(self, peer: str) -> int:
        """Bytes from slot to slot at the peer. (mutant: aux-stride-of-the-sender)"""
        return self.peers[peer].row_bytes

    def seal(
        self,
        want: Want,
        peer: str,
        *,
        holding: Holding,
        slot: int,
        after: Sequence[Signal],
    ) -> Signal:
        """Seal the bytes for the peer. The signal is reached when this end's memory has been read."""
        units = room_units(self._layout, holding, want.tokens)
        has_row = self._sources[peer][0] == self._layout.rank
        content = Content(
            ticket=_ticket(want),
            source_rank=self._layout.rank,
            units=units,
            pieces=piece_of(self._slices[peer], at_source=True),
            row=self._metadata.row_view(slot) if has_row else None,
        )
        plan = self._sealer.plan(content)
        at = self._seal_at(peer, slot)
        into = self._seals[at].view(torch.int64)
        row = (self._metadata.footprint(slot, want.request),) if has_row else ()
        return self._backend.submit(
            Operation("seal.make", (partial(self._make_seal, into, plan),), want.request),
            lane=self._seal_lane,
            reads=(*room_footprints(self._layout, units, want.request), *row),
            writes=(Footprint("seals", ("seal",), (0, 1), np.array([at])),),
            after=after,
        )

    def write_seal(self, want: Want, peer: str, slot: int, sealed: Signal) -> Signal:
        at = self._seal_at(peer, slot)
        row = want.slot * self._layout.ranks + self._layout.rank
        write = RegionWrite(
            source="seals",
            target="seals",
            blocks=np.array([[at * SEAL_BYTES, row * SEAL_BYTES, SEAL_BYTES]]),
            reads=(Footprint("seals", ("seal",), (0, 1), np.array([at])),),
            writes=(Footprint("seals", ("seal",), (0, 1), np.array([row])),),
        )
        return self._wire.write(peer, "seal", (write,), ticket=_ticket(want), after=(sealed,))

    def _seal_at(self, peer: str, slot: int) -> int:
        return slot * max(1, len(self.peers)) + self._order[peer]

    def _make_seal(self, into: torch.Tensor, plan: SealPlan) -> None:
        copy_bytes_torch(into, self._sealer.seal(plan))


def part_name(buffer: str, source_rank: int, sources: int) -> str:
    return buffer if sources == 1 else f"{buffer}/{source_rank}"


def _ticket(want: Want) -> Ticket:
    return Ticket(want.room, want.generation, want.request, want.attempt)
