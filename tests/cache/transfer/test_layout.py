"""What two ends must agree on before a byte moves, and who sends which shards to whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.pools.pool import KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape, rank_shape
from kvcheck.core.cache.transfer.layout import EndLayout, check_layouts, end_layout
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.stress.workload.shapes import TINY_SHAPES, shape

RANKS = (1, 2, 4)


def layout_of(
    whole: ModelShape,
    end: str = "decode",
    *,
    rank: int = 0,
    ranks: int = 1,
    pages: int = 4,
    slots: int = 2,
    align: int = 8,
) -> EndLayout:
    backend = ScopedBackend(EagerBackend(), end)
    sizes = PoolSizes(
        pages=pages, requests=3, max_tokens=40, window_pages=pages if whole.window_layers else 0, state_slots=3
    )
    pool = KVPool(rank_shape(whole, rank, ranks), sizes, backend=backend)
    metadata = MetadataBuffers(
        end, slots=slots, hidden_size=whole.hidden_size, backend=backend, lane=backend.lane("x"), align=align
    )
    return end_layout(pool, metadata, whole=whole, rank=rank, ranks=ranks)


def with_buffer(layout: EndLayout, at: int, **changes: object) -> EndLayout:
    buffers = list(layout.buffers)
    buffers[at] = replace(buffers[at], **changes)  # type: ignore[arg-type]
    return replace(layout, buffers=tuple(buffers))


def with_rows(layout: EndLayout, **changes: int) -> EndLayout:
    return with_buffer(layout, 0, rows=replace(layout.buffers[0].rows, **changes))


GPT = shape("gpt-oss-tiny")
# What differs, and the change.
DIFFERENT: dict[str, tuple[str, Callable[[EndLayout], EndLayout]]] = {
    "model": ("model", lambda mine: replace(mine, model="gpt-4")),
    "page size": ("page_size", lambda mine: replace(mine, page_size=8)),
    "window": ("window", lambda mine: replace(mine, window=11)),
    "a field less": ("fields", lambda mine: replace(mine, fields=mine.fields[:-1])),
    "field at another offset": (
        "fields",
        lambda mine: replace(mine, fields=(*mine.fields[:-1], (*mine.fields[-1][:3], 1544))),
    ),
    "field of another type": (
        "fields",
        lambda mine: replace(mine, fields=(("output_ids", 16, "torch.int16", 0), *mine.fields[1:])),
    ),
    "a buffer less": ("buffers", lambda mine: replace(mine, buffers=mine.buffers[:-1])),
    "a buffer of another name": ("buffers", lambda mine: with_buffer(mine, 0, name="key")),
    "leg": ("leg of full.k", lambda mine: with_buffer(mine, 0, leg="state")),
    "dtype": ("dtype of full.k", lambda mine: with_buffer(mine, 0, dtype="torch.float16")),
    "layer ids": ("layers of full.v", lambda mine: with_buffer(mine, 1, layers=(1, 2))),
    "order of layers": ("layers of full.v", lambda mine: with_buffer(mine, 1, layers=(3, 1))),
    "shards": ("total_shards of window.k", lambda mine: with_buffer(mine, 2, total_shards=4)),
    "shard bytes": ("shard_bytes of full.k", lambda mine: with_rows(mine, row_bytes=64)),
    "rows of a page": ("rows_per_unit of full.k", lambda mine: with_rows(mine, rows_per_unit=2)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_refused_by_name_at_either_end(name: str) -> None:
    what, change = DIFFERENT[name]
    mine = layout_of(GPT, "prefill")
    theirs = change(layout_of(GPT))
    for one, other in ((mine, theirs), (theirs, mine)):
        with pytest.raises(LayoutMismatch) as refused:
            check_layouts(one, other)
        text = str(refused.value)
        assert text.startswith(f"{what} differs: {one.name} has ") and "\n" not in text and len(text) < 400


def test_a_row_that_does_not_hold_all_fields_is_refused_at_either_end() -> None:
    mine, theirs = layout_of(GPT, "prefill"), layout_of(GPT)
    assert mine.packed_bytes == 1536 + 8 * 8 == theirs.row_bytes
    for short in (0, 1544, 1599):
        with pytest.raises(LayoutMismatch, match="row_bytes of decode-0"):
            check_layouts(mine, replace(theirs, row_bytes=short))
        with pytest.raises(LayoutMismatch, match="row_bytes of prefill-0"):
            check_layouts(replace(mine, row_bytes=short), theirs)


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_ends_that_mean_the_same_are_accepted_whatever_their_size(name: str) -> None:
    whole = shape(name)
    mine = layout_of(whole, "prefill")
    check_layouts(mine, mine)
    check_layouts(mine, layout_of(whole, pages=9))
    check_layouts(mine, layout_of(whole, slots=7, align=512))
    assert layout_of(whole, align=512).row_bytes == 2048 != mine.row_bytes
    for ranks in RANKS:
        for rank in range(ranks):
            theirs = layout_of(whole, rank=rank, ranks=ranks, pages=7)
            check_layouts(mine, theirs)
            check_layouts(theirs, mine)


def test_legs_follow_from_what_a_row_is() -> None:
    legs = {
        name: {(each.space, each.name): each.leg for each in layout_of(shape(name)).buffers} for name in TINY_SHAPES
    }
    assert legs["llama-3-tiny"] == {("full", "k"): "kv", ("full", "v"): "kv"}
    assert set(legs["glm-5.1-tiny"].values()) == {"kv", "state"}
    beside = {leg for found in legs.values() for (space, _), leg in found.items() if space in ("window", "state")}
    assert beside == {"state"}
