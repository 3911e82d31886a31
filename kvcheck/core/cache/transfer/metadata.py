"""Metadata buffers: the ten fields that a prefill hands over with a request, packed as one row for each slot.

Invariants:
- All fields of a freed slot, not only the room, are cleared before its next lease. (mutant: metadata-slot-not-cleared)
- A slot is read, written and released only for the request that leased it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvcheck.core.base.errors import ForeignAccess, LayoutMismatch, LengthMismatch
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend, Footprint, Lane, Operation, Place, Signal
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools.allocator import SlotAllocator
from kvcheck.kernels.page_copy import copies_to_host, copy_bytes_torch, fill_torch


@dataclass(frozen=True, slots=True)
class MetadataField:
    """offset: bytes from the row's start, a multiple of 8."""

    name: str
    width: int
    dtype: torch.dtype
    offset: int

    @property
    def size_bytes(self) -> int:
        return self.width * self.dtype.itemsize


def metadata_fields(hidden_size: int) -> tuple[MetadataField, ...]:
    """The ten fields, in the order of SGLang's table; narrow rows are 64 bytes, the RDMA minimum."""
    rows: tuple[tuple[str, int, torch.dtype], ...] = (
        ("output_ids", 16, torch.int32),
        ("cached_tokens", 16, torch.int32),
        ("output_token_logprobs_val", 16, torch.float32),
        ("output_token_logprobs_idx", 16, torch.int32),
        ("output_top_logprobs_val", 128, torch.float32),
        ("output_top_logprobs_idx", 128, torch.int32),
        ("output_topk_p", 16, torch.float32),
        ("output_topk_index", 16, torch.int64),
        ("output_hidden_states", hidden_size, torch.float32),
        ("bootstrap_room", 8, torch.int64),
    )
    fields: list[MetadataField] = []
    offset = 0
    for name, width, dtype in rows:
        fields.append(MetadataField(name, width, dtype, offset))
        offset += -(-width * dtype.itemsize // 8) * 8
    return tuple(fields)


class MetadataRow:
    """A request's packed row. From a bytearray the tensor is made on first use, since that costs as much as a copy."""

    __slots__ = ("_fields", "_packed")

    def __init__(self, packed: torch.Tensor | bytearray, fields: tuple[MetadataField, ...]) -> None:
        self._packed = packed
        self._fields = fields

    @property
    def packed(self) -> torch.Tensor:
        """The row, [packed_bytes] uint8."""
        if isinstance(self._packed, bytearray):
            self._packed = torch.frombuffer(self._packed, dtype=torch.uint8)
        return self._packed

    def field(self, name: str) -> torch.Tensor:
        (field,) = (each for each in self._fields if each.name == name)
        return self._values(field)

    def fields(self) -> tuple[torch.Tensor, ...]:
        return tuple(map(self._values, self._fields))

    def _values(self, field: MetadataField) -> torch.Tensor:
        if isinstance(self._packed, bytearray):
            return torch.frombuffer(self._packed, dtype=field.dtype, count=field.width, offset=field.offset)
        return self._packed[field.offset : field.offset + field.size_bytes].view(field.dtype)


class _Reading:
    """The read of one slot for its request, made once and submitted for each `get`, which waits for it."""

    __slots__ = ("_copied", "_packed", "operation", "reads", "request")

    def __init__(self, source: torch.Tensor, touched: Footprint, request: int) -> None:
        self.request = request
        self.reads = (touched,)
        self.operation = Operation("metadata.get", (self._run,), request)
        self._copied = copies_to_host(source)
        self._packed: torch.Tensor | bytearray | None = None

    def taken(self) -> torch.Tensor | bytearray:
        packed, self._packed = self._packed, None
        assert packed is not None, "a read that was waited for has run"
        return packed

    def _run(self) -> None:
        self._packed = self._copied()


class MetadataBuffers:
    """Slots of packed rows at one end ("prefill" or "decode"). align: of slots, in bytes."""

    def __init__(
        self,
        end: str,
        *,
        slots: int,
        hidden_size: int,
        backend: Backend,
        lane: Lane,
        emit: Emit | None = None,
        align: int = 8,
    ) -> None:
        self.end = end
        self.space = f"metadata-{end}"
        self.fields = metadata_fields(hidden_size)
        self.packed_bytes = self.fields[-1].offset + self.fields[-1].size_bytes
        self.row_bytes = -(-self.packed_bytes // align) * align
        self._backend = backend
        self._lane = lane
        self._slots = SlotAllocator(self.space, count=slots, first=0, emit=emit)
        self._rows = backend.empty(self.space, (slots, self.row_bytes), torch.uint8, Place.DEVICE)
        self._row_views = tuple(self._rows[slot, : self.packed_bytes] for slot in range(slots))
        self._readings: dict[int, _Reading] = {}
        rows = self._rows
        # Waited for: otherwise the first lease of a slot could come before the clear.
        backend.wait(
            backend.submit(
                Operation("metadata.clear", (lambda: fill_torch(rows, 0),)),
                lane=lane,
                writes=(self._footprint(np.arange(slots), None),),
            )
        )

    @property
    def slots(self) -> SlotAllocator:
        return self._slots

    def lease(self, request: int) -> int | None:
        ids = self._slots.allocate(1, request)
        return None if ids is None else int(ids[0])

    def set(self, slot: int, request: int, values: Mapping[str, torch.Tensor]) -> Signal:
        """Write fields of a slot; the others stay zero. values: [n <= width], unchanged until the signal is reached."""
        self._slots.check_owner(slot, request)
        if unknown := values.keys() - {field.name for field in self.fields}:
            raise LayoutMismatch(
                f"metadata: no field {', '.join(sorted(unknown))}; the row has ten, see metadata_fields"
            )
        pairs = []
        for field in self.fields:
            if (value := values.get(field.name)) is None:
                continue
            if value.dtype != field.dtype or value.ndim != 1 or len(value) > field.width:
                raise LengthMismatch(
                    f"metadata field {field.name}: expected at most {field.width} values of {field.dtype} in one row, "
                    f"got {tuple(value.shape)} of {value.dtype}"
                )
            start = field.offset
            packed = value.contiguous().view(torch.uint8)
            pairs.append((self._rows[slot, start : start + packed.numel()], packed))

        def run() -> None:
            for target, source in pairs:
                copy_bytes_torch(target, source)

        return self._backend.submit(
            Operation("metadata.set", (run,), request),
            lane=self._lane,
            writes=(self._footprint(np.array([slot]), request),),
        )

    def put(self, slot: int, request: int, row: torch.Tensor) -> None:
        """Write a whole row, [packed_bytes] uint8, and wait."""
        self._slots.check_owner(slot, request)
        if row.dtype != torch.uint8 or row.shape != (self.packed_bytes,):
            raise LengthMismatch(f"metadata: expected {self.packed_bytes} bytes, got {tuple(row.shape)} of {row.dtype}")
        target = self.row_view(slot)
        self._backend.wait(
            self._backend.submit(
                Operation("metadata.put", (lambda: copy_bytes_torch(target, row),), request),
                lane=self._lane,
                writes=(self._footprint(np.array([slot]), request),),
            )
        )

    def get(self, slot: int, request: int) -> MetadataRow:
        """Copy the slot's row and wait for the copy. (mutant: metadata-get-returns-views)

        SGLang's get_buf returned views of the slot, which its next owner overwrote (#23346).
        """
        self._slots.check_owner(slot, request)
        reading = self._readings.get(slot)
        if reading is None or reading.request != request:
            touched = self._footprint(np.array([slot]), request)
            reading = self._readings[slot] = _Reading(self.row_view(slot), touched, request)
        self._backend.wait(self._backend.submit(reading.operation, lane=self._lane, reads=reading.reads))
        return MetadataRow(reading.taken(), self.fields)

    def row_view(self, slot: int) -> torch.Tensor:
        """The slot's row, [packed_bytes]; valid until the slot is freed. For transports, not for requests."""
        if not 0 <= slot < self._slots.count:
            raise ForeignAccess(f"{self.space}: expected a slot of 0 to {self._slots.count - 1}, got {slot}")
        return self._row_views[slot]

    def memory(self) -> torch.Tensor:
        return self._rows.view(-1)

    def release(self, slot: int, request: int) -> None:
        ids = np.array([slot], dtype=np.int64)
        self._slots.check_freeable(ids)
        self._slots.check_owned(ids, request)
        self.clear(slot)
        self._slots.free(ids)

    def clear(self, slot: int) -> None:
        row = self._rows[slot]
        self._backend.wait(
            self._backend.submit(
                Operation("metadata.clear", (lambda: fill_torch(row, 0),)),
                lane=self._lane,
                writes=(self._footprint(np.array([slot]), None),),
            )
        )

    def footprint(self, slot: int, request: int) -> Footprint:
        return self._footprint(np.array([slot], dtype=np.int64), request)

    def storage_range(self) -> tuple[int, int]:
        return self._rows.data_ptr(), self._rows.data_ptr() + self._rows.numel()

    def free(self) -> None:
        self._backend.release(self.space)

    def _footprint(self, slots: IndexArray, request: int | None) -> Footprint:
        owners = None if request is None else np.full(len(slots), request, dtype=np.int64)
        return Footprint(self.space, ("metadata",), (0, 1), slots, owners=owners)
