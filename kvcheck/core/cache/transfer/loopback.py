"""The in-process transport: a packed row crosses a fabric whose three events the schedule orders.

Invariants:
- The source is read once, before `sent`; the pieces of a row land in any order, before `visible`; the receiver is
  told after `visible`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.backend.backend import Backend, Footprint, Operation, Signal
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.transport import Delivery
from kvcheck.kernels.page_copy import copy_bytes_torch

WIRE_BYTES = 512
"""Bytes that land together; a row of several such pieces can be seen torn by a reader that does not wait."""


class LoopbackTransport:
    """Carries rows between two MetadataBuffers of one process."""

    def __init__(self, backend: Backend, source: MetadataBuffers, target: MetadataBuffers) -> None:
        if source.fields != target.fields:
            raise LayoutMismatch(f"metadata rows differ: {source.row_bytes} bytes sent, {target.row_bytes} expected")
        self._backend = backend
        self._source = source
        self._target = target
        self._wire = backend.lane("fabric")
        self._notify = backend.lane("notify")

    def send(self, *, request: int, source_slot: int, target_slot: int, after: Signal) -> Delivery:
        """Read the source row, land it piece by piece, notify."""
        source, target = self._source.row_view(source_slot), self._target.row_view(target_slot)
        wire = torch.empty_like(source)
        sent = self._backend.submit(
            Operation("loopback.read", (partial(copy_bytes_torch, wire, source),), request),
            lane=self._wire,
            reads=(self._footprint(self._source.space, source_slot, request),),
            after=(after,),
        )
        pieces = tuple(
            partial(copy_bytes_torch, target[at : at + WIRE_BYTES], wire[at : at + WIRE_BYTES])
            for at in range(0, len(source), WIRE_BYTES)
        )
        visible = self._backend.submit(
            Operation("loopback.land", pieces, request),
            lane=self._wire,
            writes=(self._footprint(self._target.space, target_slot, request),),
        )
        notified = self._backend.submit(
            Operation("loopback.notify", (lambda: None,), request), lane=self._notify, after=(visible,)
        )
        return Delivery(sent, visible, notified)

    def _footprint(self, space: str, slot: int, request: int) -> Footprint:
        ids = np.array([slot], dtype=np.int64)
        return Footprint(space, ("metadata",), (0, 1), ids, owners=np.array([request], dtype=np.int64))
