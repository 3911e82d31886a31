"""Misuse of the ends of a transfer: metadata slots, rooms, wires, and what ranks agree on.

Invariants:
- Both ends stand on the scene's pool and backend. Room 5 is open at both, and its source may still write.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvcheck.core.base.errors import (
    DoubleFree,
    ForeignAccess,
    FreeInFlight,
    LayoutMismatch,
    LengthMismatch,
    TransferError,
)
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.transfer.layout import EndLayout, end_layout
from kvcheck.core.cache.transfer.loopback_wire import LoopbackFabric
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.receiver import Receiver
from kvcheck.core.cache.transfer.sender import Sender
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket
from kvcheck.core.targets.misuse.call import Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import Scene, ids, varied

SLOTS, ROOM, PATIENCE = 2, 5, 9


class Ends:
    """A prefill rank and a decode rank, with one slot leased at the decode rank."""

    def __init__(self, scene: Scene, *, slots: int = SLOTS) -> None:
        self.scene = scene
        self.now = 0
        self.fabric = LoopbackFabric()
        self.metadata, self.backends, self.layouts = {}, {}, {}
        for end in ("prefill", "decode"):
            own = self.backends[end] = ScopedBackend(scene.backend, f"{end}-0")
            rows: MetadataBuffers = scene.parts.metadata(
                end, slots=slots, hidden_size=scene.shape.hidden_size, backend=own, lane=own.lane("forward")
            )
            self.metadata[end] = rows
            self.layouts[end] = end_layout(scene.pool, rows, whole=scene.shape, rank=0, ranks=1)
        self.wires = {end: self.fabric.end(own) for end, own in self.backends.items()}
        self.sender = self.make_sender(self.layouts["decode"])
        self.receiver = self.make_receiver(self.layouts["prefill"])
        self.slots = self.metadata["decode"]
        self.slot = self.slots.lease(1)
        tokens = scene.one.committed
        self.sender.open(ROOM, 1, tokens)
        self.room = self.receiver.expect(ROOM, scene.one, tokens, self.slot or 0)

    def make_sender(self, peer: EndLayout) -> Sender:
        """The sender of the prefill rank, with one peer."""
        return self.scene.parts.sender(
            self.scene.pool,
            self.metadata["prefill"],
            self.wires["prefill"],
            self.backends["prefill"],
            layout=self.layouts["prefill"],
            peers=(peer,),
            clock=lambda: self.now,
            patience=PATIENCE,
            sealer=self.scene.parts.sealer,
            writer=self.scene.parts.writer,
        )

    def make_receiver(self, peer: EndLayout) -> Receiver:
        """The receiver of the decode rank, with one peer."""
        return self.scene.parts.receiver(
            self.scene.pool,
            self.metadata["decode"],
            self.wires["decode"],
            self.backends["decode"],
            layout=self.layouts["decode"],
            peers=(peer,),
            clock=lambda: self.now,
            patience=PATIENCE,
            sealer=self.scene.parts.sealer,
        )

    def kept(self) -> object:
        """What no refused call may change."""
        rooms = (self.room.status, len(self.room.writers), self.sender.readiness(ROOM), len(self.sender.unopened))
        return self.scene.kept(), self.slots.slots.available, self.slots.slots.pins, rooms


def _slot(ends: Ends) -> int:
    return ends.room.slot


def _set(request: int = 1, **values: torch.Tensor) -> Callable[[Ends], object]:
    return lambda ends: ends.slots.set(_slot(ends), request, values)


def _leased(ends: Ends) -> bool:
    """The last slot can be leased once, and goes back."""
    slot = ends.slots.lease(2)
    if slot is None or ends.slots.lease(3) is not None:
        return False
    ends.slots.set(slot, 2, {"output_ids": torch.ones(16, dtype=torch.int32)})
    ends.slots.put(slot, 2, ends.slots.get(slot, 2).packed)
    ends.slots.release(slot, 2)
    return ends.slots.slots.available == 1


def _pinned(ends: Ends) -> None:
    """Release a slot that is pinned."""
    slot = ids(_slot(ends))
    ends.slots.slots.pin(slot)
    try:
        ends.slots.release(_slot(ends), 1)
    finally:
        ends.slots.slots.unpin(slot)


def _put(length: int, dtype: torch.dtype = torch.uint8) -> Callable[[Ends], object]:
    """Put a row that is so much longer than a right one."""
    return lambda ends: ends.slots.put(_slot(ends), 1, torch.zeros(ends.slots.packed_bytes + length, dtype=dtype))


def _free_slot(ends: Ends) -> int:
    return SLOTS - 1 - _slot(ends)


METADATA: tuple[Misuse[Ends], ...] = (
    Misuse("set of another request's slot", ForeignAccess, _set(2)),
    Misuse("set of a slot that nobody has", ForeignAccess, lambda ends: ends.slots.set(_free_slot(ends), 1, {})),
    Misuse("set of slot -1", ForeignAccess, lambda ends: ends.slots.set(-1, 1, {})),
    Misuse("set of a field that the row lacks", LayoutMismatch, _set(no_such_field=torch.zeros(1))),
    Misuse(
        "set of one value more than a field has", LengthMismatch, _set(output_ids=torch.zeros(17, dtype=torch.int32))
    ),
    Misuse("set of values of another dtype", LengthMismatch, _set(output_ids=torch.zeros(16))),
    Misuse("set of values in two rows", LengthMismatch, _set(output_ids=torch.zeros((1, 2), dtype=torch.int32))),
    Misuse(
        "put into another request's slot",
        ForeignAccess,
        lambda ends: ends.slots.put(_slot(ends), 2, torch.zeros(ends.slots.packed_bytes, dtype=torch.uint8)),
    ),
    Misuse("put of a row that is a byte short", LengthMismatch, _put(-1)),
    Misuse("put of a row that is a byte long", LengthMismatch, _put(1)),
    Misuse("put of signed bytes", LengthMismatch, _put(0, torch.int8)),
    Misuse("get of another request's slot", ForeignAccess, lambda ends: ends.slots.get(_slot(ends), 2)),
    Misuse("get of a slot that nobody has", ForeignAccess, lambda ends: ends.slots.get(_free_slot(ends), 1)),
    Misuse("the row of slot -1", ForeignAccess, lambda ends: ends.slots.row_view(-1)),
    Misuse("the row of a slot above the last", ForeignAccess, lambda ends: ends.slots.row_view(SLOTS)),
    Misuse(
        "the rows of the first and the last slot",
        None,
        lambda ends: len(ends.slots.row_view(0)) == len(ends.slots.row_view(SLOTS - 1)),
    ),
    Misuse("release of another request's slot", ForeignAccess, lambda ends: ends.slots.release(_slot(ends), 2)),
    Misuse("release of a slot that nobody has", DoubleFree, lambda ends: ends.slots.release(_free_slot(ends), 1)),
    Misuse("release of a pinned slot", FreeInFlight, _pinned),
    Misuse("lease, set, put, get and release", None, _leased),
)


def _misfit(ends: Ends, end: str) -> EndLayout:
    return varied(ends.layouts[end], model="another")


def _reopened(ends: Ends) -> bool:
    """Another room opens at both ends and is over."""
    ends.sender.open(ROOM + 1, 2, 1)
    ends.sender.fail(ROOM + 1, "misused")
    ends.sender.close(ROOM + 1)
    ends.sender.open(ROOM + 1, 2, 1, attempt=1)
    ends.sender.fail(ROOM + 1, "misused")
    ends.sender.close(ROOM + 1)
    return not ends.sender.is_open(ROOM + 1)


def _drained(ends: Ends) -> bool:
    """A room that nobody writes any more is forgotten, and its slot is free."""
    slot = ends.slots.lease(2)
    if slot is None:
        return False
    room = ends.receiver.expect(ROOM + 2, ends.scene.two, 1, slot)
    room.writers.clear()
    ends.receiver.forget(room)
    return not ends.receiver.is_open(ROOM + 2) and ends.slots.slots.available == 1


ROOMS: tuple[Misuse[Ends], ...] = (
    Misuse("open of a room that is open", ForeignAccess, lambda ends: ends.sender.open(ROOM, 1, 1, attempt=1)),
    Misuse("open and close of a room, and again", None, _reopened),
    Misuse(
        "expect of a room that is open",
        ForeignAccess,
        lambda ends: ends.receiver.expect(ROOM, ends.scene.one, 1, 0, attempt=1),
    ),
    Misuse("forget of a room that a source may write", ForeignAccess, lambda ends: ends.receiver.forget(ends.room)),
    Misuse("forget of a room that nobody writes", None, _drained),
    Misuse(
        "a sender with a peer that does not fit", LayoutMismatch, lambda ends: ends.make_sender(_misfit(ends, "decode"))
    ),
    Misuse(
        "a receiver with a peer that does not fit",
        LayoutMismatch,
        lambda ends: ends.make_receiver(_misfit(ends, "prefill")),
    ),
    Misuse(
        "a decode rank that comes back and does not fit",
        LayoutMismatch,
        lambda ends: ends.sender.rejoin(_misfit(ends, "decode")),
    ),
    Misuse(
        "a prefill rank that comes back and does not fit",
        LayoutMismatch,
        lambda ends: ends.receiver.rejoin(_misfit(ends, "prefill")),
    ),
    Misuse(
        "a decode rank that comes back as one of two",
        LayoutMismatch,
        lambda ends: ends.sender.rejoin(varied(ends.layouts["decode"], ranks=2)),
    ),
    Misuse(
        "a prefill rank that comes back as one of two",
        LayoutMismatch,
        lambda ends: ends.receiver.rejoin(varied(ends.layouts["prefill"], ranks=2)),
    ),
    Misuse(
        "ranks with other numbers of values", LengthMismatch, lambda ends: ends.scene.parts.group().agree([[1], [1, 2]])
    ),
    Misuse(
        "ranks with as many values",
        None,
        lambda ends: ends.scene.parts.group().agree([[1, 2], [2, 1]]) == [[1, 1], [1, 1]],
    ),
)


def _write(source: int, target: int, size: int, *, behind: str = "") -> Callable[[Ends], object]:
    """Write one block from the seals of one end to those of the other. behind: the end at whose last byte it is."""

    def call(ends: Ends) -> bool:
        memory = {name: len(ends.wires[name].regions["seals"]) for name in ("prefill", "decode")}
        first = source + (memory["prefill"] if behind == "source" else 0)
        to = target + (memory["decode"] if behind == "target" else 0)
        write = RegionWrite(source="seals", target="seals", blocks=np.array([[first, to, size]]), reads=(), writes=())
        ends.wires["prefill"].write("decode-0", "seal", (write,), ticket=Ticket(ROOM, 1 << 40, 1), after=())
        return True

    return call


WIRES: tuple[Misuse[Ends], ...] = (
    Misuse("write from byte -1", TransferError, _write(-1, 0, 8)),
    Misuse("write to byte -1", TransferError, _write(0, -1, 8)),
    Misuse("write of -1 bytes", TransferError, _write(0, 0, -1)),
    Misuse("write from behind the last byte", TransferError, _write(-7, 0, 8, behind="source")),
    Misuse("write to behind the last byte", TransferError, _write(0, -7, 8, behind="target")),
    Misuse("write from the last bytes", None, _write(-8, 0, 8, behind="source")),
    Misuse("write to the last bytes", None, _write(0, -8, 8, behind="target")),
    Misuse(
        "register of words",
        LayoutMismatch,
        lambda ends: ends.wires["decode"].register("seals", torch.zeros(1, dtype=torch.int64)),
    ),
)


def transfer_attempts(ends: Ends) -> list[Attempt]:
    """Of both ends of a transfer."""
    return on_each((*METADATA, *ROOMS, *WIRES), ends, Ends.kept)
