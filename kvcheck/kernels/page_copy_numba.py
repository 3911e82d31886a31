"""gather_rows_torch and scatter_rows_torch by non-temporal stores, which bypass the caches.

A plain store first reads the cache line that it overwrites: a copy moves three bytes for each byte, with these stores
two. Saved or restored bytes are not read again soon. Small copies are faster in the caches.

Invariants:
- Other threads see the stores once the function has returned.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WORDS_OF_LINE = 8
LINE_BYTES = 64


def copy_runs_numba(
    target: torch.Tensor, target_rows: npt.NDArray[np.int64], source: torch.Tensor, source_rows: npt.NDArray[np.int64]
) -> None:
    """target[l, target_rows[i]] = source[l, source_rows[i]]; runs of neighbours on both sides are copied as one.

    target: [L, U, W], source: [L, V, W], contiguous rows of whole 8-byte words, without overlap; target_rows,
    source_rows: [n].
    """
    _COPY_RUNS(
        np.uint64(target.data_ptr()),
        np.uint64(target.stride(0) * target.element_size()),
        target_rows,
        np.uint64(source.data_ptr()),
        np.uint64(source.stride(0) * source.element_size()),
        source_rows,
        target.shape[0],
        np.uint64(target.shape[2] * target.element_size()),
    )


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _copy_line(typing: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes between two addresses by non-temporal stores. The target's address is a multiple of 64."""

    def code(context: Any, builder: Any, signature: Any, addresses: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), WORDS_OF_LINE).as_pointer()
        into, out_of = (builder.inttoptr(address, line) for address in addresses)
        words = builder.load(out_of)
        words.align = 8
        store = builder.store(words, into)
        store.align = LINE_BYTES
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), code


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _copy_word(typing: Any, target: Any, source: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, addresses: Any) -> Any:
        into, out_of = (builder.inttoptr(address, ir.IntType(64).as_pointer()) for address in addresses)
        builder.store(builder.load(out_of), into)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), code


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _fence(typing: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


def _copy_run(target, source, size):  # type: ignore[no-untyped-def]  # numba infers the types
    """Copy `size` bytes, a multiple of 8."""
    end = target + size
    step = source - target
    while target < end and target % np.uint64(LINE_BYTES) != 0:
        _copy_word(target, target + step)
        target += np.uint64(8)
    while target + np.uint64(LINE_BYTES) <= end:
        _copy_line(target, target + step)
        target += np.uint64(LINE_BYTES)
    while target < end:
        _copy_word(target, target + step)
        target += np.uint64(8)


_COPY_RUN = numba.njit(nogil=True)(_copy_run)


def _copy_runs(target, target_stride, target_rows, source, source_stride, source_rows, layers, row_bytes):  # type: ignore[no-untyped-def]
    for _ in range(layers):
        start = 0
        for at in range(1, target_rows.shape[0] + 1):
            if (
                at == target_rows.shape[0]
                or target_rows[at] != target_rows[at - 1] + 1
                or source_rows[at] != source_rows[at - 1] + 1
            ):
                into = target + np.uint64(target_rows[start]) * row_bytes
                out_of = source + np.uint64(source_rows[start]) * row_bytes
                _COPY_RUN(into, out_of, np.uint64(at - start) * row_bytes)
                start = at
        target += target_stride
        source += source_stride
    _fence()


_COPY_RUNS = numba.njit(nogil=True)(_copy_runs)
