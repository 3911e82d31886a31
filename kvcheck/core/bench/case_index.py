"""Case: read index pages of an NSA pool, keys and scales in one pass, in two passes, and by plain torch indexing.

Invariants:
- All arms read the same tokens of the same requests. The requests have different lengths and unordered page ids.
- The check compares keys and scales bit for bit with the plain reading.
"""

from __future__ import annotations

from functools import partial

import torch

from kvcheck.core.base.errors import UsageError
from kvcheck.core.bench.arms import Arm, Comparison, Point, Setting, same
from kvcheck.core.bench.memory import FreshMemory, memcpy
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.kernels.index_buffer import get_index, get_index_torch, get_keys, get_scales
from kvcheck.kernels.index_layout import IndexLayout, IndexReads

REQUESTS = 8


def points(setting: Setting) -> tuple[Point, ...]:
    """Keys and scales of an index buffer read together, compared with two reads and with torch."""
    shape = setting.shape
    if shape.family != "nsa":
        raise UsageError(f"index-read: expected a shape with an index buffer, got {shape.name}; try --shape glm-5.1")
    return tuple(
        Point(
            case="index-read",
            size=f"{REQUESTS}x{pages * shape.page_size} tokens",
            shape=shape.name,
            bytes=2 * REQUESTS * pages * _layout(shape).page_words * 8,
            makers={
                "separate": partial(_arm, shape=shape, pages=pages, way="separate"),
                "fused": partial(_arm, shape=shape, pages=pages, way="fused"),
                "torch": partial(_arm, shape=shape, pages=pages, way="torch"),
                "memcpy": partial(_memcpy, words=REQUESTS * pages * _layout(shape).page_words),
            },
            comparisons=(
                Comparison(arm="fused", baseline="separate", limit="memcpy"),
                Comparison(arm="torch", baseline="separate", limit="memcpy"),
            ),
            note="bytes count reading and writing",
        )
        for pages in (4, 32)
    )


def _layout(shape: ModelShape) -> IndexLayout:
    return IndexLayout(
        page_size=shape.page_size,
        key_words=shape.index_head_dim // 8,
        scale_halves=shape.index_head_dim // shape.index_quant_block,
    )


def _arm(memory: FreshMemory, *, shape: ModelShape, pages: int, way: str) -> Arm:
    layout = _layout(shape)
    rows = memory.words(REQUESTS * pages + 1, layout.page_words)
    ids = torch.from_numpy(memory.permutation(1, REQUESTS * pages)).view(REQUESTS, pages).to(memory.device)
    lengths = pages * shape.page_size - memory.random.integers(shape.page_size // 2, size=REQUESTS)
    starts = torch.tensor([0, *lengths.cumsum().tolist()], device=memory.device)
    reads = IndexReads(pages=ids, starts=starts, tokens=int(lengths.sum()))
    got: list[torch.Tensor] = []

    def call() -> None:
        if way == "separate":
            got[:] = [get_keys(rows, reads, layout), get_scales(rows, reads, layout)]
        else:
            got[:] = (get_index if way == "fused" else get_index_torch)(rows, reads, layout)

    def check() -> None:
        for what, mine, plain in zip(("keys", "scales"), got, _plain(rows, reads, layout), strict=True):
            same(f"index {what}", mine, plain)

    return Arm(call=call, check=check, clock="graph")


def _plain(rows: torch.Tensor, reads: IndexReads, layout: IndexLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and scales read with torch indexing, one request and one page at a time."""
    keys, scales = [], []
    split = layout.page_size * layout.key_words
    for request, (start, stop) in enumerate(zip(reads.starts[:-1].tolist(), reads.starts[1:].tolist(), strict=True)):
        whole = rows[reads.pages[request].to(torch.int64)]
        keys.append(whole[:, :split].reshape(-1, layout.key_words)[: stop - start])
        halves = whole[:, split:].contiguous().view(torch.int32)
        scales.append(halves.reshape(-1, layout.scale_halves)[: stop - start])
    return torch.cat(keys), torch.cat(scales)


def _memcpy(memory: FreshMemory, *, words: int) -> Arm:
    source, target = memory.words(words), memory.words(words)
    return Arm(call=memcpy(target, source), check=lambda: same("memcpy", target, source), clock="graph")
