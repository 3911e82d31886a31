"""What two ends must agree on before a byte moves, and who sends which shards to whom.

Invariants:
- Every difference that would make bytes mean something else is refused, by name and with both values; what may differ
  between healthy ends is not.
- Routes are compared with a count of who keeps which shard, made from the definition alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.pools.pool import KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.pools.sharding import rank_shape
from kvcheck.core.cache.transfer.layout import BufferLayout, EndLayout, check_layouts, end_layout, routes
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
    """The layout of a rank with a pool and metadata of its own."""
    backend = ScopedBackend(EagerBackend(), end)
    sizes = PoolSizes(
        pages=pages, requests=3, max_tokens=40, window_pages=pages if whole.window_layers else 0, state_slots=3
    )
    pool = KVPool(rank_shape(whole, rank, ranks), sizes, backend=backend)
    metadata = MetadataBuffers(
        end, slots=slots, hidden_size=whole.hidden_size, backend=backend, lane=backend.lane("x"), align=align
    )
    return end_layout(pool, metadata, whole=whole, rank=rank, ranks=ranks)


def with_buffer(layout: EndLayout, at: int, change: Callable[[BufferLayout], BufferLayout]) -> EndLayout:
    """One buffer changed."""
    buffers = list(layout.buffers)
    buffers[at] = change(buffers[at])
    return replace(layout, buffers=tuple(buffers))


def rows(**values: int) -> Callable[[BufferLayout], BufferLayout]:
    """A change of the rows of a buffer."""
    return lambda buffer: replace(buffer, rows=replace(buffer.rows, **values))


GPT, NSA, LLAMA = (shape(name) for name in ("gpt-oss-tiny", "glm-5.1-tiny", "llama-3-tiny"))

DIFFERENT: dict[str, tuple[str, str, str, Callable[[EndLayout], EndLayout]]] = {
    "model": ("model", "gpt-oss-tiny", "gpt-4", lambda mine: replace(mine, model="gpt-4")),
    "page size": ("page_size", "4", "8", lambda mine: replace(mine, page_size=8)),
    "window": ("window", "10", "11", lambda mine: replace(mine, window=11)),
    "a field less": ("fields", "bootstrap_room", "", lambda mine: replace(mine, fields=mine.fields[:-1])),
    "field at another offset": (
        *("fields", "1536", "1544"),
        lambda mine: replace(mine, fields=(*mine.fields[:-1], (*mine.fields[-1][:3], 1544))),
    ),
    "field of another type": (
        *("fields", "torch.int32", "torch.int16"),
        lambda mine: replace(mine, fields=(("output_ids", 16, "torch.int16", 0), *mine.fields[1:])),
    ),
    "a buffer less": ("buffers", "('window', 'v')", "", lambda mine: replace(mine, buffers=mine.buffers[:-1])),
    "a buffer of another name": (
        *("buffers", "'k'", "'key'"),
        lambda mine: with_buffer(mine, 0, lambda buffer: replace(buffer, name="key")),
    ),
    "leg": ("leg of full.k", "kv", "state", lambda mine: with_buffer(mine, 0, lambda b: replace(b, leg="state"))),
    "dtype": (
        *("dtype of full.k", "torch.bfloat16", "torch.float16"),
        lambda mine: with_buffer(mine, 0, lambda buffer: replace(buffer, dtype="torch.float16")),
    ),
    "layer ids": (
        *("layers of full.v", "(1, 3)", "(1, 2)"),
        lambda mine: with_buffer(mine, 1, lambda buffer: replace(buffer, layers=(1, 2))),
    ),
    "order of layers": (
        *("layers of full.v", "(1, 3)", "(3, 1)"),
        lambda mine: with_buffer(mine, 1, lambda buffer: replace(buffer, layers=(3, 1))),
    ),
    "shards": (
        *("total_shards of window.k", "2", "4"),
        lambda mine: with_buffer(mine, 2, lambda buffer: replace(buffer, total_shards=4)),
    ),
    "shard bytes": (
        *("shard_bytes of full.k", "16", "32"),
        lambda mine: with_buffer(mine, 0, rows(row_bytes=64)),
    ),
    "rows of a page": (
        *("rows_per_unit of full.k", "4", "2"),
        lambda mine: with_buffer(mine, 0, rows(rows_per_unit=2)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_refused_by_name_with_both_values(name: str) -> None:
    what, ours, others, change = DIFFERENT[name]
    mine = layout_of(GPT, "prefill")
    theirs = change(layout_of(GPT))
    for one, other, values in ((mine, theirs, (ours, others)), (theirs, mine, (others, ours))):
        with pytest.raises(LayoutMismatch) as refused:
            check_layouts(one, other)
        text = str(refused.value)
        assert text.startswith(f"{what} differs: {one.name} has ") and "expected the same at both ends" in text
        assert "\n" not in text and len(text) < 400
        if len(text) < 250:  # long lists are cut
            told = text.split(" has ")
            assert values[0] in told[1] and values[1] in told[2]


def test_nothing_that_is_checked_is_left_out_of_the_table() -> None:
    """The list above changes what the text of a layout holds; the rest may differ."""
    changed = {what.split(" of ")[0] for what, *_ in DIFFERENT.values()}
    assert changed == {
        *("model", "page_size", "window", "fields", "buffers", "leg", "dtype", "layers"),
        *("total_shards", "shard_bytes", "rows_per_unit"),
    }


def test_a_row_that_does_not_hold_all_fields_is_refused_at_either_end() -> None:
    mine, theirs = layout_of(GPT, "prefill"), layout_of(GPT)
    assert mine.packed_bytes == 1536 + 8 * 8 == theirs.row_bytes
    for short in (0, 1544, 1599):
        with pytest.raises(LayoutMismatch, match=f"row_bytes of decode-0: expected at least the 1600 .* got {short}"):
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


@pytest.mark.parametrize("one", TINY_SHAPES)
def test_any_two_models_are_refused(one: str) -> None:
    for other in TINY_SHAPES:
        if one != other:
            with pytest.raises(LayoutMismatch, match="model differs"):
                check_layouts(layout_of(shape(one), "prefill"), layout_of(shape(other)))


def test_legs_follow_from_what_a_row_is() -> None:
    legs = {
        name: {(each.space, each.name): each.leg for each in layout_of(shape(name)).buffers} for name in TINY_SHAPES
    }
    assert legs["llama-3-tiny"] == {("full", "k"): "kv", ("full", "v"): "kv"}
    assert set(legs["glm-5.1-tiny"].values()) == {"kv", "state"}
    for name, found in legs.items():
        for (space, _), leg in found.items():
            if space in ("window", "state"):
                assert leg == "state", name


def keeps(shards: int, rank: int, ranks: int) -> list[int]:
    """Shards of a whole row that a rank keeps, from the definition: dealt out in order, or replicated side by side."""
    if ranks > shards:
        return [rank // (ranks // shards)]
    return [shard for shard in range(shards) if shard // (shards // ranks) == rank]


@pytest.mark.parametrize("name", TINY_SHAPES)
@pytest.mark.parametrize("sources", RANKS)
@pytest.mark.parametrize("targets", RANKS)
def test_every_shard_of_every_target_comes_once_from_a_source_that_keeps_it(
    name: str, sources: int, targets: int
) -> None:
    whole = shape(name)
    layout = layout_of(whole, rank=0, ranks=targets)
    pairs = routes(layout, sources=sources, targets=targets)
    for buffer in layout.buffers:
        key, shards = (buffer.space, buffer.name), buffer.total_shards
        got: Counter[tuple[int, int]] = Counter()
        for (source, target), slices in pairs.items():
            if key not in slices:
                continue
            piece = slices[key]
            assert (piece.source_rank, piece.target_rank) == (source, target)
            theirs = keeps(shards, source, sources)[piece.source_first : piece.source_first + piece.count]
            mine = keeps(shards, target, targets)[piece.target_first : piece.target_first + piece.count]
            assert theirs == mine and len(mine) == piece.count >= 1, "the same shards at both ends"
            got.update((target, shard) for shard in mine)
        assert got == {(target, shard): 1 for target in range(targets) for shard in keeps(shards, target, targets)}
    assert all(pairs.values()), "pairs with nothing to send are left out"


def test_routes_of_heads_and_of_latents() -> None:
    """Two KV heads from one rank to two, and a latent from two ranks to one: one of the two is a dummy."""
    heads = routes(layout_of(LLAMA), sources=1, targets=2)
    found = {
        pair: [(each.source_first, each.target_first, each.count) for each in s.values()] for pair, s in heads.items()
    }
    assert found == {(0, 0): [(0, 0, 1)] * 2, (0, 1): [(1, 0, 1)] * 2}
    assert set(routes(layout_of(NSA), sources=2, targets=1)) == {(0, 0)}
    assert set(routes(layout_of(NSA), sources=2, targets=4)) == {(0, 0), (0, 1), (1, 2), (1, 3)}


@given(st.integers(0, 3), st.sampled_from(RANKS), st.sampled_from(RANKS))
def test_routes_do_not_depend_on_which_rank_asks(rank: int, sources: int, targets: int) -> None:
    first = routes(layout_of(GPT, ranks=targets), sources=sources, targets=targets)
    assert first == routes(layout_of(GPT, rank=rank % targets, ranks=targets), sources=sources, targets=targets)
