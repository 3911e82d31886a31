"""What the ends of a transfer refuse: slots, rooms, blocks, regions, layouts of peers, and values of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rigs.pair import Rig

from kvcheck.core.base.errors import (
    ForeignAccess,
    FreeInFlight,
    LayoutMismatch,
    LengthMismatch,
    TargetError,
    TransferError,
)
from kvcheck.core.base.record import to_plain
from kvcheck.core.cache.scheduler.process_group import RankGroup
from kvcheck.core.cache.transfer.layout import EndLayout, layout_from_json
from kvcheck.core.cache.transfer.receiver import Receiver
from kvcheck.core.cache.transfer.sender import Sender
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket, check_region

ROOM = 5


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    assert made.expect(ROOM, 9).slot == 0
    made.sender.open(ROOM, 1, 9)
    return made


def kept(rig: Rig) -> object:
    room, metadata = rig.rooms[ROOM], rig.decode.metadata
    held = (metadata.slots.available, metadata.slots._pins.tolist(), metadata.memory().numpy().tobytes())
    return held, room.status, len(room.writers), rig.sender.readiness(ROOM)


def put(rig: Rig, *, slot: int = 0, request: int = 1, more: int = 0, dtype: torch.dtype = torch.uint8) -> None:
    """Put a row of ones that is so much longer than a right one."""
    metadata = rig.decode.metadata
    metadata.put(slot, request, torch.ones(metadata.packed_bytes + more, dtype=dtype))


def release_pinned(rig: Rig) -> None:
    slots, slot = rig.decode.metadata.slots, np.array([0])
    slots.pin(slot)
    try:
        rig.decode.metadata.release(0, 1)
    finally:
        slots.unpin(slot)


def another(layout: EndLayout) -> EndLayout:
    return replace(layout, model="another")


def sender_of(rig: Rig, peer: EndLayout) -> Sender:
    one = rig.prefill
    return Sender(
        one.pool, one.metadata, one.wire, one.backend, layout=one.layout, peers=[peer], clock=lambda: 0, patience=9
    )


def receiver_of(rig: Rig, peer: EndLayout) -> Receiver:
    one = rig.decode
    return Receiver(
        one.pool, one.metadata, one.wire, one.backend, layout=one.layout, peers=[peer], clock=lambda: 0, patience=9
    )


def write(rig: Rig, source: int, target: int, size: int = 8, *, behind: str = "") -> None:
    """Write a block from the seals of one end to those of the other. behind: the end from whose last byte it counts."""
    ends = {name: len(each.wire.regions["seals"]) for name, each in (("source", rig.prefill), ("target", rig.decode))}
    first, to = (at + (ends[name] if behind == name else 0) for name, at in (("source", source), ("target", target)))
    block = RegionWrite(source="seals", target="seals", blocks=np.array([[first, to, size]]), reads=(), writes=())
    rig.prefill.wire.write("decode-0", "seal", (block,), ticket=Ticket(ROOM, 1 << 40, 1), after=())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda rig: put(rig, request=2), ForeignAccess),
        (lambda rig: put(rig, slot=1), ForeignAccess),
        (lambda rig: put(rig, slot=-1), ForeignAccess),
        (lambda rig: put(rig, more=-1), LengthMismatch),
        (lambda rig: put(rig, more=1), LengthMismatch),
        (lambda rig: put(rig, dtype=torch.int8), LengthMismatch),
        (lambda rig: rig.decode.metadata.set(0, 1, {"no_such_field": torch.zeros(1)}), LayoutMismatch),
        (release_pinned, FreeInFlight),
        (lambda rig: rig.receiver.forget(rig.rooms[ROOM]), ForeignAccess),
        (lambda rig: sender_of(rig, another(rig.decode.layout)), LayoutMismatch),
        (lambda rig: receiver_of(rig, another(rig.prefill.layout)), LayoutMismatch),
        (lambda rig: write(rig, -1, 0), TransferError),
        (lambda rig: write(rig, 0, -1), TransferError),
        (lambda rig: write(rig, 0, 0, -1), TransferError),
        (lambda rig: write(rig, -7, 0, behind="source"), TransferError),
        (lambda rig: write(rig, 0, -7, behind="target"), TransferError),
        (lambda rig: rig.decode.wire.register("seals", torch.zeros(1, dtype=torch.int64)), LayoutMismatch),
    ],
)
def test_an_end_refuses_what_is_not_its_own(call: Callable[[Rig], object], error: type[TargetError], rig: Rig) -> None:
    before = kept(rig)
    with pytest.raises(error):
        call(rig)
    assert kept(rig) == before


def test_the_last_slot_the_last_bytes_and_another_room_are_accepted(rig: Rig) -> None:
    metadata = rig.decode.metadata
    assert [metadata.lease(request) for request in (2, 3, 4, 5)] == [1, 2, 3, None]
    put(rig, slot=3, request=4)
    assert bool((metadata.get(3, 4).packed == 1).all()) and not metadata.row_view(2).any()
    metadata.release(3, 4)
    assert metadata.slots.available == 1
    write(rig, -8, 0, behind="source")
    write(rig, 0, -8, behind="target")
    for attempt in (0, 1):
        rig.sender.open(ROOM + 1, 2, 1, attempt=attempt)
        rig.sender.fail(ROOM + 1, "over")
        rig.sender.close(ROOM + 1)
    assert not rig.sender.is_open(ROOM + 1)
    rig.rooms[ROOM].writers.clear()
    rig.receiver.forget(rig.rooms[ROOM])
    assert not rig.receiver.is_open(ROOM) and metadata.slots.available == 2


@pytest.mark.parametrize(
    "memory",
    [torch.zeros(2, dtype=torch.int64), torch.zeros((2, 2), dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)[::2]],
)
def test_a_region_is_bytes_side_by_side(memory: torch.Tensor) -> None:
    check_region("right", torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(LayoutMismatch):
        check_region("wrong", memory)


def test_ranks_bring_equally_many_values() -> None:
    assert RankGroup().agree([[1, 2], [2, 1]]) == [[1, 1], [1, 1]]
    with pytest.raises(LengthMismatch):
        RankGroup().agree([[1], [1, 2]])


# Layouts of peers


SOURCE, TARGET = Rig().prefill.layout, Rig().decode.layout


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in plain().items() if key != name}


def plain(**changes: object) -> dict[str, Any]:
    raw = to_plain(SOURCE)
    assert isinstance(raw, dict)
    return raw | changes


FIELDS: tuple[list[object], ...] = (
    *(["a", 1, "b"], [1, 1, "b", 1], ["a", "1", "b", 1]),
    *(["a", 1, 1, 1], ["a", 1, "b", True], ["a", 1, "b", 1, 1]),
)


@pytest.mark.parametrize(
    "raw",
    [
        [],
        *(without(name) for name in ("end", "rank", "buffers", "fields", "slots")),
        *(plain(**{name: "1"}) for name in ("rank", "ranks", "page_size", "window", "row_bytes", "slots")),
        *(plain(**{name: 1}) for name in ("end", "model", "buffers", "fields")),
        *(plain(fields=[["right", 1, "b", 1], row]) for row in FIELDS),
    ],
)
def test_a_layout_that_lacks_a_value_or_has_another_type_is_refused(raw: object) -> None:
    with pytest.raises(LayoutMismatch):
        layout_from_json(raw)
    assert layout_from_json(plain()) == SOURCE
