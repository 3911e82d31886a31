"""Case: send a metadata row to a decode rank over peer memory with a seal, a socket, and peer memory without a seal.

    unproved  row -> peer's slot, status at once                  fast, and wrong if bytes are late
    sealed    row -> peer's slot, seal -> peer, peer verifies     this project's way
    socket    row -> host -> TCP -> host -> slot                  the fallback

Without two devices the peer's memory is host memory, and the note states it. The socket is always a real one.
"""

from __future__ import annotations

import socket
from functools import partial

import torch

from kvcheck.core.base.errors import WrongOutput
from kvcheck.core.bench.arms import Arm, ArmComparison, BenchSetting, Point, same
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.metadata import metadata_fields
from kvcheck.core.cache.transfer.seal import SEAL_BYTES, Seal, known_words, parse, sealed_words
from kvcheck.kernels.digest import digest

KEY = 0xA0C5
ROOM, GENERATION = 5, 1


def points(setting: BenchSetting) -> tuple[Point, ...]:
    shape = setting.shape
    return (
        Point(
            case="nvlink-aux",
            size="row",
            shape=shape.name,
            bytes=_row_bytes(shape),
            makers={
                "unproved": partial(_sealed, shape=shape, is_sealed=False),
                "sealed": partial(_sealed, shape=shape, is_sealed=True),
                "socket": partial(_socket, shape=shape),
            },
            comparisons=(
                ArmComparison(arm="sealed", baseline="unproved"),
                ArmComparison(arm="sealed", baseline="socket", name="sealed-to-socket"),
                ArmComparison(arm="socket", baseline="unproved"),
            ),
            note=None if _has_peer(setting.kind) else "simulated: the peer's memory is memory of this machine",
        ),
    )


def _row_bytes(shape: ModelShape) -> int:
    last = metadata_fields(shape.hidden_size)[-1]
    return last.offset + last.size_bytes


def _peer(memory: FreshMemory) -> torch.device:
    return torch.device("cuda", int((memory.device.index or 0) == 0)) if _has_peer(memory.kind) else memory.device


def _has_peer(kind: str) -> bool:
    return kind == "cuda" and torch.cuda.device_count() > 1


def _sealed(memory: FreshMemory, *, shape: ModelShape, is_sealed: bool) -> Arm:
    row = memory.empty((_row_bytes(shape),), torch.uint8)
    slot = memory.empty((_row_bytes(shape),), torch.uint8).to(_peer(memory))
    landed = memory.words(SEAL_BYTES // 8).to(_peer(memory))
    accepted: list[bool] = []

    def fits() -> bool:
        return not (landed ^ _seal(slot)).cpu().any()

    def call() -> None:
        slot.copy_(row)
        if is_sealed:
            landed.copy_(_seal(row))
            found = parse(landed.cpu().view(torch.uint8))
            accepted[:] = [found is not None and found.generation == GENERATION and fits()]

    def check() -> None:
        same("metadata row at the peer", slot.cpu(), row.cpu())
        if is_sealed:
            slot[3] ^= 1
            if accepted != [True] or fits():
                raise WrongOutput(f"seal: expected it to fit the row and no other, got {accepted}")

    return Arm(call=call, check=check)


def _seal(row: torch.Tensor) -> torch.Tensor:
    known = known_words(Seal(room=ROOM, generation=GENERATION, bytes=row.numel(), digest=0))
    return sealed_words(torch.from_numpy(known).to(row.device), digest(row.view(torch.int64), key=KEY))


def _socket(memory: FreshMemory, *, shape: ModelShape) -> Arm:
    size = _row_bytes(shape)
    row = memory.empty((size,), torch.uint8)
    slot = memory.empty((size,), torch.uint8).to(_peer(memory))
    host = memory.empty((size,), torch.uint8, is_host=True)
    arrived = memory.empty((size,), torch.uint8, is_host=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        into, _ = server.accept()
    for each in (out, into):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.settimeout(20.0)
    sent, taken = host.numpy().data, arrived.numpy().data

    def call() -> None:
        host.copy_(row)
        done = 0
        begun = out.send(sent)
        while done < size:
            done += into.recv_into(taken[done:])
            if begun < size:
                begun += out.send(sent[begun:])
        slot.copy_(arrived)

    def close() -> None:
        out.close()
        into.close()

    return Arm(call=call, check=lambda: same("metadata row at the peer", slot.cpu(), row.cpu()), close=close)
