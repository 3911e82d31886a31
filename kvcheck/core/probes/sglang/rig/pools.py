"""Pools: small pools of SGLang's families on the CPU, with their allocator and request table.

Invariants:
- Numbers of units differ from each other and from every other dimension, so the first dimension of a tensor identifies
  the unit of its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvcheck.core.probes.frame.buffer_views import BufferView, among, inventory
from kvcheck.core.probes.frame.content import ContentWriter, ProbeJudge, rows_of
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt, fitted
from kvcheck.core.probes.frame.probe import Rig

DEVICE = "cpu"
LAYERS = 3
PAGES = 12
ROWS = 6
STATES = 9
HEADS, HEAD_DIM = 2, 8
LATENT, ROPE = 64, 16
"""Powers of two, which Triton readers of a latent row need."""
WIDE: dict[str, Any] = {
    "head_dim": 4 * HEAD_DIM,
    "v_head_dim": 4 * HEAD_DIM,
    "qk_rope_head_dim": LATENT,
    "kv_cache_dim": 2 * LATENT,
}
"""Sizes of rows of whole 128 bytes, which copies that are compiled at run time need."""
INDEX_HEAD_DIM, SCALE_BYTES = 128, 4
PAGE_SIZES = {"nsa": 64}
"""Tokens of a page if not 16. The layout of the index buffer needs 64."""
UNPAGED = ("swa",)
"""Families whose allocator hands out lists of tokens only with pages of one token, in some releases."""

REGISTERED = ("get_contiguous_buf_infos", "get_state_buf_infos")
"""Methods that return the memory of a pool for transfers: the memory that a request owns."""


@dataclass(frozen=True, slots=True)
class OwnedUnits:
    """Units of one kind that a request owns, in order. tail: tokens in the last one, 0 if it is whole."""

    unit: str
    ids: tuple[int, ...]
    tail: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rows that arrive in units of a buffer. ids: [units] int64. rows: [units, bytes] uint8."""

    held: BufferView
    ids: torch.Tensor
    rows: torch.Tensor

    def arrive(self) -> None:
        self.held.rows.index_copy_(0, self.ids, self.rows)


def arrive(arrivals: Sequence[Arrival]) -> None:
    for each in arrivals:
        each.arrive()


@dataclass(slots=True, kw_only=True)
class SmallPool:
    """One pool with its allocator and its request table. page_size: tokens that probes take at a time."""

    family: str
    pool: Any
    allocator: Any
    request_pool: Any
    page_size: int
    writer: ContentWriter

    def owned(self, tokens: torch.Tensor, state: int | None = None) -> Iterator[OwnedUnits]:
        ids, size = tokens.to(torch.int64), self.page_size
        yield OwnedUnits("token", tuple(ids.tolist()))
        pages = (ids[::size] // size).tolist()
        yield OwnedUnits("page", tuple(pages), len(ids) % size)
        if self.family == "swa":
            yield OwnedUnits("window", tuple(self.pool.full_to_swa_index_mapping[ids].tolist()))
        if state is not None:
            yield OwnedUnits("state", (state,))

    def write(self, request: int, tokens: torch.Tensor, state: int | None = None) -> None:
        for owned in self.owned(tokens, state):
            self.writer.write(request, owned.unit, owned.ids)

    def arrivals(self, request: int, tokens: torch.Tensor, state: int | None = None) -> list[Arrival]:
        """The rows lie on each buffer's device: queued work may not wait for the host."""
        found = []
        for owned in self.owned(tokens, state):
            for held in self.writer.found.buffers:
                if held.unit == owned.unit:
                    rows, device = rows_of(held, request, range(len(owned.ids))), held.rows.device
                    found.append(Arrival(held, torch.tensor(list(owned.ids), device=device), rows.to(device)))
        return found

    def check(
        self, judge: ProbeJudge, request: int, tokens: torch.Tensor, state: int | None = None, *, when: str
    ) -> None:
        """Of a partial page, only the bytes of its tokens count."""
        for owned in self.owned(tokens, state):
            whole = len(owned.ids) - (1 if owned.tail else 0)
            lost = self.writer.check(judge, request, owned.unit, owned.ids[:whole], when=when)
            if owned.tail:
                self.writer.check(
                    judge,
                    request,
                    owned.unit,
                    owned.ids[whole:],
                    when=when,
                    first=whole,
                    part=partial(index_bytes, page_size=self.page_size, tokens=owned.tail),
                )
            for name in lost:
                text = f"{when}: none of the {whole} {owned.unit} rows of {name} is request {request}'s, in any layer"
                judge.find("KV304", "contract", text, buffer=name, request=request)


def index_bytes(row_bytes: int, page_size: int, tokens: int) -> torch.Tensor | None:
    """Bytes of an index page that belong to its first tokens: keys, then scales. None for other rows."""
    if row_bytes != page_size * (INDEX_HEAD_DIM + SCALE_BYTES):
        return None
    part = torch.zeros(row_bytes, dtype=torch.bool)
    scales = page_size * INDEX_HEAD_DIM
    part[: tokens * INDEX_HEAD_DIM] = True
    part[scales : scales + tokens * SCALE_BYTES] = True
    return part


def small_pool(
    rig: Rig,
    family: str,
    page_size: int = 0,
    pages: int = PAGES,
    window_pages: int = PAGES - 3,
    *,
    is_wide: bool = False,
) -> SmallPool:
    """Make a pool of the family. Raises CannotDrive if the release lacks it, or if a tensor's rows are unknown.

    page_size: of its allocator; 0: as the family's copies require. is_wide: see `WIDE`.
    """
    size = page_size or PAGE_SIZES.get(family, 16)
    tokens = pages * size
    window = window_pages * size
    page = 1 if family in UNPAGED and not page_size else size
    units = {"token": tokens + page, "page": pages + 1}
    if family == "swa":
        units["window"] = window + page
    elif family == "mamba":
        units["state"] = STATES + 1
    offered = sizes(page, tokens, window) | (WIDE if is_wide else {})
    pool, allocator, request_pool = make_pools(rig, family, offered, rig.device)
    calls = [getattr(pool, name) for name in REGISTERED if hasattr(pool, name)]
    found = inventory(pool, rig.package, units)
    if calls:
        found = among(found, [call() for call in calls])
    if not found.buffers:
        others = "; ".join(found.unknown) or "no other"
        raise CannotDrive(f"pool.{family} holds no tensor whose rows are {', '.join(units)}, and {others}")
    if found.unknown:
        raise CannotDrive(f"pool.{family} holds {'; '.join(found.unknown)}, and nothing is known about their rows")
    return SmallPool(
        family=family,
        pool=pool,
        allocator=allocator,
        request_pool=request_pool,
        page_size=size,
        writer=ContentWriter(found),
    )


def make_pools(rig: Rig, family: str, offered: Mapping[str, Any], device: str) -> tuple[Any, Any, Any]:
    pool_name, rows_name, allocator_name = pool_names(family, offered["page_size"])
    offered = {**offered, "device": device}
    if family == "mamba":
        offered |= {"cache_params": state_params(), "mamba_layer_ids": [0, 2]}
    request_pool = fitted(rig.names[rows_name], {**offered, "size": ROWS})
    if family == "mamba":
        offered["mamba_pool"] = request_pool.mamba_pool
    pool = fitted(rig.names[pool_name], offered)
    return pool, fitted(rig.names[allocator_name], {**offered, "kvcache": pool}), request_pool


def pool_names(family: str, page_size: int = 0) -> tuple[str, str, str]:
    size = page_size or PAGE_SIZES.get(family, 16)
    paged = "allocator.paged" if size > 1 else "allocator.token"
    allocator = "allocator.swa" if family == "swa" else paged
    return f"pool.{family}", "pool.hybrid-requests" if family == "mamba" else "pool.requests", allocator


def sizes(page: int, tokens: int, window: int, states: int = STATES) -> dict[str, Any]:
    """Values of every parameter of a pool, its allocator or its request table in any known release."""
    return {
        "size": tokens,
        "size_swa": window,
        "swa_size": window,
        "page_size": page,
        "dtype": torch.bfloat16,
        "head_num": HEADS,
        "head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
        "layer_num": LAYERS,
        "device": DEVICE,
        "enable_memory_saver": False,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "index_head_dim": INDEX_HEAD_DIM,
        "kv_cache_dim": LATENT + ROPE,
        "swa_attention_layer_ids": [0, 2],
        "full_attention_layer_ids": [1, 3],
        "enable_kvcache_transpose": False,
        "max_context_len": tokens + page,
        "need_sort": False,
        "mamba_size": states,
        "mamba_spec_state_size": STATES,
        "enable_mamba_extra_buffer": False,
        "speculative_num_draft_tokens": None,
        "enable_overlap_schedule": False,
    }


def state_params() -> Any:
    shape = SimpleNamespace(conv=[(6, 4)], temporal=(2, 4, 8))
    dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    return SimpleNamespace(shape=shape, dtype=dtype, layers=[0, 2])


def take(made: SmallPool, pages: int) -> torch.Tensor:
    """Raises CannotDrive if the allocator has too few pages."""
    ids = made.allocator.alloc(pages * made.page_size)
    if ids is None:
        raise CannotDrive(f"the allocator has no {pages} pages left; it has {made.allocator.available_size()} tokens")
    taken: torch.Tensor = ids
    return taken


def optional(call: Callable[..., Any], **values: Any) -> dict[str, Any]:
    known = inspect.signature(call).parameters
    return {name: value for name, value in values.items() if name in known}


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


def check_seen(
    judge: ProbeJudge, read: Iterable[Seen], request: int, when: str, lane: str | None, code: str | None = None
) -> None:
    """Compare rows that a reader returned. lane: the reader. code: as in ProbeJudge.compare."""
    for each in read:
        places = range(len(each.ids))
        judge.compare(
            each.held,
            each.whole(),
            request=request,
            positions=places,
            ids=each.ids,
            when=when,
            part=each.part,
            code=code,
            lane=lane,
        )


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
    made: SmallPool, held: BufferView, tensor: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, behind: int
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
