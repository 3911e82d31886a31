"""Index tensors that kernels read: request row to locs, full page to window page, request row to state slot.

Invariants:
- Operations on the forward lane write the entries, so a kernel sees every earlier write of that lane.
- A write outside its row raises before anything is queued.
- Row 0 of req_to_token is padding. Entries past a request's length are stale and must never be read.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.base.paging import IndexArray, spans_of
from kvcheck.core.cache.backend.backend import Backend, Footprint, Lane, Operation, Place
from kvcheck.kernels.page_copy import fill_torch, scatter_rows_torch


class IndexTable:
    """An int64 device table [rows + 1, columns], filled with 0."""

    def __init__(self, name: str, *, rows: int, columns: int, backend: Backend, lane: Lane) -> None:
        self.name = name
        self.rows = rows
        self.columns = columns
        self._backend = backend
        self._lane = lane
        self._tensor = backend.empty(f"table.{name}", (rows + 1, columns), torch.int64, Place.DEVICE)
        tensor = self._tensor
        backend.submit(
            Operation(f"table.{name}.clear", (lambda: fill_torch(tensor, 0),)),
            lane=lane,
            writes=(Footprint("table", (name,), (0, 1), np.arange(rows + 1)),),
        )

    def write(self, row: int, start: int, values: IndexArray) -> None:
        """table[row, start : start + n] = values."""
        columns = np.arange(start, start + len(values), dtype=np.int64)
        entries = self.footprint(np.array([row]), np.array([start]), np.array([start + len(values)]))
        self._submit(columns, values, entries, row=row)

    def assign(self, columns: IndexArray, values: IndexArray) -> None:
        self._submit(columns, values, self.footprint(np.zeros_like(columns), columns, columns + 1), row=0)

    def footprint(self, rows: IndexArray, starts: IndexArray, stops: IndexArray) -> Footprint:
        """The entries [starts[i], stops[i]) of each rows[i], in the space "table"."""
        return Footprint("table", (self.name,), (0, 1), rows, spans_of(starts, stops))

    def _submit(self, columns: IndexArray, values: IndexArray, entries: Footprint, *, row: int) -> None:
        if len(columns) != len(values) or not 0 <= row <= self.rows:
            raise LengthMismatch(
                f"table {self.name}: expected as many columns as values in a row of 0 to {self.rows}, "
                f"got {len(columns)} and {len(values)} in row {row}"
            )
        if not len(values):
            return
        if columns.min() < 0 or columns.max() >= self.columns:
            raise LengthMismatch(
                f"table {self.name}: expected columns of 0 to {self.columns - 1}, "
                f"got {columns.min()} to {columns.max()} in row {row}"
            )
        flat = self._tensor.view(1, -1, 1)
        written = self._backend.index(values).view(1, -1, 1)
        places = self._backend.index(columns + row * self.columns)
        self._backend.submit(
            Operation(f"table.{self.name}.write", (partial(scatter_rows_torch, flat, written, places),)),
            lane=self._lane,
            writes=(entries,),
        )

    def read_view(self) -> torch.Tensor:
        """The table, [rows + 1, columns]; valid for operations submitted to the forward lane."""
        return self._tensor

    def free(self) -> None:
        self._backend.release(f"table.{self.name}")
