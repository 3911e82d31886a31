"""Case: read a request's metadata row as one packed copy that the caller owns, as ten views, and as ten clones.

The upstream method slices a row of each of ten tensors (ten views); "ten clones" copies each slice.
"""

from __future__ import annotations

import torch

from kvcheck.core.bench.arms import Arm, ArmComparison, BenchSetting, Point, same
from kvcheck.core.bench.memory import FreshMemory, memcpy
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataRow, metadata_fields
from kvcheck.core.stress.targets.mutants.retract_resume import ViewMetadata

SLOTS = 64
REQUEST = 7


def points(setting: BenchSetting) -> tuple[Point, ...]:
    hidden = setting.shape.hidden_size
    fields = metadata_fields(hidden)
    return (
        Point(
            case="metadata-read",
            size="row",
            shape=setting.shape.name,
            bytes=fields[-1].offset + fields[-1].size_bytes,
            makers={
                "ten-views": lambda memory: _table(memory, hidden, clones=False),
                "ten-clones": lambda memory: _table(memory, hidden, clones=True),
                "view-get": lambda memory: _product(memory, hidden, ViewMetadata),
                "packed-get": lambda memory: _product(memory, hidden, MetadataBuffers),
                "packed-get-unpacked": lambda memory: _product(memory, hidden, MetadataBuffers, every_field=True),
                "memcpy": lambda memory: _memcpy(memory, hidden),
            },
            comparisons=(
                ArmComparison(arm="packed-get", baseline="ten-views", limit="memcpy"),
                ArmComparison(arm="packed-get", baseline="ten-clones", limit="memcpy", name="packed-get-to-clones"),
                ArmComparison(arm="packed-get", baseline="view-get", limit="memcpy", name="packed-get-to-mutant"),
                ArmComparison(arm="packed-get-unpacked", baseline="ten-clones"),
                ArmComparison(arm="ten-clones", baseline="ten-views"),
            ),
        ),
    )


def _table(memory: FreshMemory, hidden: int, *, clones: bool) -> Arm:
    tensors = [memory.empty((SLOTS, field.width), field.dtype) for field in metadata_fields(hidden)]
    slot = int(memory.random.integers(SLOTS))
    got: list[torch.Tensor] = []

    def views() -> None:
        got[:] = [tensor[slot] for tensor in tensors]

    def copies() -> None:
        got[:] = [tensor[slot].clone() for tensor in tensors]

    def check() -> None:
        for number, (each, tensor) in enumerate(zip(got, tensors, strict=True)):
            same(f"metadata field {number}", each.view(torch.uint8), tensor[slot].view(torch.uint8))

    return Arm(call=copies if clones else views, check=check)


def _product(memory: FreshMemory, hidden: int, kind: type[MetadataBuffers], *, every_field: bool = False) -> Arm:
    backend = memory.backend()
    metadata = kind("decode", slots=SLOTS, hidden_size=hidden, backend=backend, lane=backend.lane("forward"))
    taken = [metadata.lease(REQUEST) for _ in range(1 + int(memory.random.integers(SLOTS)))]
    slot = taken[-1]
    assert slot is not None, "there are as many slots as were leased"
    written = memory.empty((metadata.packed_bytes,), torch.uint8)
    metadata.put(slot, REQUEST, written)
    got: list[MetadataRow] = []

    def read() -> None:
        got[:] = [metadata.get(slot, REQUEST)]

    def unpack() -> None:
        row = metadata.get(slot, REQUEST)
        got[:] = [row]
        row.fields()

    return Arm(call=unpack if every_field else read, check=lambda: same("metadata row", got[0].packed, written.cpu()))


def _memcpy(memory: FreshMemory, hidden: int) -> Arm:
    fields = metadata_fields(hidden)
    size = fields[-1].offset + fields[-1].size_bytes
    source, target = memory.empty((size,), torch.uint8), memory.empty((size,), torch.uint8, is_host=True)
    return Arm(call=memcpy(target, source, waits=True), check=lambda: same("memcpy", target, source.cpu()))
