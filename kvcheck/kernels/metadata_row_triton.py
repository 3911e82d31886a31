"""The metadata row copy as one Triton kernel; importing this module needs triton.

Invariants:
- It gives the result of `split_rows_torch` for any number of fields. Offsets and widths are constants of the kernel.
- Addresses are 64-bit and every load and store is masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvcheck.kernels.compilers import grid_of

BLOCK = 1024
"""4-byte units that one program copies."""


def split_rows_triton(
    outputs: Sequence[torch.Tensor], rows: torch.Tensor, slots: torch.Tensor, offsets: Sequence[int]
) -> None:
    """split_rows_torch."""
    units = tuple(output.view(torch.int32) for output in outputs)
    widths = tuple(unit.shape[1] for unit in units)
    if not len(slots) or not any(widths):
        return
    _KERNEL[grid_of(triton.cdiv(max(widths), BLOCK), len(units), len(slots))](
        units,
        rows.view(torch.int32),
        slots,
        rows.stride(0) // 4,
        slots.stride(0),
        WIDTHS=widths,
        OFFSETS=tuple(offset // 4 for offset in offsets),
        FIELDS=len(units),
        BLOCK=BLOCK,
        enable_fp_fusion=False,  # no floats here; a release that changes the default warns whoever does not say
    )


def _split_row(  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    outputs,
    rows,
    slots,
    row_stride,
    slot_stride,
    WIDTHS: tl.constexpr,
    OFFSETS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: some units of one field of one row.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.program_id(2).to(tl.int64)
    row = rows + tl.load(slots + number * slot_stride).to(tl.int64) * row_stride
    for field in tl.static_range(FIELDS):
        if tl.program_id(1) == field:
            inside = at < WIDTHS[field]
            seen = tl.load(row + OFFSETS[field] + at, mask=inside, other=0)
            tl.store(outputs[field] + number * WIDTHS[field] + at, seen, mask=inside)


_KERNEL = triton.jit(_split_row)
IS_INTERPRETED = not isinstance(_KERNEL, triton.JITFunction)
"""Whether triton was told (TRITON_INTERPRET=1) to run kernels on the CPU."""
