"""Metadata rows: copies each field of packed rows to memory of its own, with one launch for all fields and rows.

rows: [R, S] bytes, a slot a row; a field is the bytes [offset, offset + width) of every row.

Invariants:
- Bytes are moved, never converted; offsets and widths are multiples of 4.
- Outputs have memory of their own, so later writes to the rows do not change them.
- Slot ids are read when the copy runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcheck.kernels.compilers import asks_triton


def split_rows_torch(
    outputs: Sequence[torch.Tensor], rows: torch.Tensor, slots: torch.Tensor, *, offsets: Sequence[int]
) -> None:
    """outputs[f][i] = the bytes of field f in rows[slots[i]].

    outputs: one for each field, [n, values] of any dtype, contiguous. slots: [n]. offsets: of the fields, in bytes.
    """
    _check(outputs, rows, slots, offsets)
    for output, offset in zip(outputs, offsets, strict=True):
        packed = output.view(torch.uint8)
        packed.copy_(rows[:, offset : offset + packed.shape[1]].index_select(0, slots))


def split_rows(
    outputs: Sequence[torch.Tensor], rows: torch.Tensor, slots: torch.Tensor, *, offsets: Sequence[int]
) -> None:
    """split_rows_torch with one kernel."""
    if asks_triton(rows):
        from kvcheck.kernels import metadata_row_triton

        if rows.is_cuda or metadata_row_triton.IS_INTERPRETED:
            _check(outputs, rows, slots, offsets)
            metadata_row_triton.split_rows_triton(outputs, rows, slots, offsets)
            return
    split_rows_torch(outputs, rows, slots, offsets=offsets)


def _check(outputs: Sequence[torch.Tensor], rows: torch.Tensor, slots: torch.Tensor, offsets: Sequence[int]) -> None:
    assert rows.dtype == torch.uint8 and rows.ndim == 2 and rows.stride(1) == 1, "rows are bytes [R, S] side by side"
    assert rows.stride(0) % 4 == 0 and rows.storage_offset() % 4 == 0, "rows begin at multiples of 4 bytes"
    assert len(outputs) == len(offsets), f"an offset a field, got {len(offsets)} for {len(outputs)}"
    for output, offset in zip(outputs, offsets, strict=True):
        assert output.ndim == 2 and len(output) == len(slots) and output.is_contiguous(), (
            f"an output is [{len(slots)}, values] in one piece, got {[*output.shape]}"
        )
        width = output.shape[1] * output.element_size()
        assert offset % 4 == width % 4 == 0 and 0 <= offset <= rows.shape[1] - width, (
            f"a field is whole 4-byte units within {rows.shape[1]} bytes, got {width} bytes at {offset}"
        )
