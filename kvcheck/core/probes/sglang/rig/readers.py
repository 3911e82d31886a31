"""Readers: a pool's getters of a layer, found by their parameters, and their results as rows of its buffers.

A result is copied at once. A getter whose result is not understood is reported by name, not passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvcheck.core.probes.frame.buffer_views import BufferView
from kvcheck.core.probes.frame.calls import fitted
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.pools import INDEX_HEAD_DIM, SmallPool


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows of one buffer that a reader returned. part: their bytes of a whole row. ids: their units."""

    held: BufferView
    rows: torch.Tensor
    part: torch.Tensor
    ids: tuple[int, ...]

    def whole(self) -> torch.Tensor:
        full = torch.zeros((len(self.ids), self.held.rows.shape[1]), dtype=torch.uint8)
        full[:, self.part] = self.rows.cpu()
        return full


def understood(rig: Rig, made: SmallPool, name: str, tokens: torch.Tensor) -> list[Seen] | str:
    with rig.stubs.window() as called:
        got = attempt(partial(_try, made, name, tokens), rig.package)
    if called:
        return f"{name} calls {', '.join(called)}"
    if isinstance(got, Fault):
        return f"{name}: {got.text}"
    if isinstance(got, str):
        return f"{name}: {got}"
    return got or f"{name} returned nothing that is known"


def _try(made: SmallPool, name: str, tokens: torch.Tensor) -> list[Seen] | str:
    try:
        return list(seen(made, call(made, name, 0, tokens), 0, tokens))
    except CannotDrive as error:
        return str(error)


def readers(pool: Any) -> list[str]:
    names = []
    for name in dir(type(pool)):
        method = getattr(type(pool), name)
        if name.startswith("get_") and callable(method):
            parameters = list(inspect.signature(method).parameters)[1:]
            if parameters and parameters[0] in ("layer_id", "layer"):
                names.append(name)
    return names


def call(made: SmallPool, name: str, layer: int, tokens: torch.Tensor) -> Any:
    method: Callable[..., Any] = getattr(made.pool, name)
    size = len(tokens)
    pages = (tokens[:: made.page_size] // made.page_size).to(torch.int32)
    batched = "seq_len_tensor" in inspect.signature(method).parameters
    offered = {
        "layer_id": layer,
        "layer": SimpleNamespace(layer_id=layer),
        "loc": tokens,
        "seq_len": size,
        "seq_len_tensor": torch.full((1,), size, dtype=torch.int32, device=tokens.device),  # no copy: it would wait
        "seq_len_sum": size,
        "max_seq_len": size,
        "page_indices": pages[None] if batched else pages,
    }
    return fitted(method, offered)


def tensors_of(got: Any) -> list[torch.Tensor]:
    return [each for each in (got if isinstance(got, (tuple, list)) else (got,)) if isinstance(each, torch.Tensor)]


def seen(
    made: SmallPool, got: Any, layer: int, tokens: torch.Tensor, taken: Sequence[torch.Tensor] | None = None
) -> Iterator[Seen]:
    """Yield the returned tensors as rows of buffers, copied now. taken: their values when they were read."""
    behind, returned = 0, tensors_of(got)
    for tensor, values in zip(returned, returned if taken is None else taken, strict=True):
        for held in made.writer.found.buffers:
            if held.layer == layer and (rows := _rows_of(made, held, tensor, values, tokens, behind)) is not None:
                behind += int(rows.part.sum())
                yield rows
                break


def _rows_of(
    made: SmallPool,
    held: BufferView,
    tensor: torch.Tensor,
    values: torch.Tensor,
    tokens: torch.Tensor,
    behind: int,
) -> Seen | None:
    """A tensor is the buffer itself, the first part of its rows, or gathered rows, keys or scales.

    behind: bytes of the rows in earlier tensors, if rows are returned in parts.
    """
    ids = next((owned.ids for owned in made.owned(tokens) if owned.unit == held.unit), ())
    size = held.rows.shape[1]
    if tensor.data_ptr() == held.rows.data_ptr() and tensor.shape[0] == held.rows.shape[0]:
        rows = values[list(ids)].contiguous().flatten(1).view(torch.uint8).clone()
        return Seen(held, rows, torch.arange(size) < rows.shape[1], ids)
    if tensor.shape[0] != len(tokens):
        return None
    at = torch.arange(size)
    if held.unit == "token" and tensor.dtype is not torch.uint8:
        rows = values.contiguous().flatten(1).view(torch.uint8)
        return Seen(held, rows.clone(), (at >= behind) & (at < behind + rows.shape[1]), ids)
    if held.unit != "page" or tensor.dtype is not torch.uint8:
        return None
    keys = made.page_size * INDEX_HEAD_DIM
    part = at < keys if tensor.shape[1] == INDEX_HEAD_DIM else at >= keys
    rows = values.contiguous().view(len(ids), -1)
    return Seen(held, rows.clone(), part, ids) if rows.shape[1] == int(part.sum()) else None
