"""Shards of a row: the table of every family, the shape of one rank, and who keeps what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, Piece
from kvcheck.core.cache.pools.shape import ModelShape, rank_shape, shard_range
from kvcheck.core.stress.workload.shapes import SHAPES, shape

ATTENTION = {"k": 8, "v": 8}
SHARDS = {
    "glm-5.1": {"latent": 1, "index_k_with_scale": 1},
    "deepseek-v3.2-tiny": {"latent": 1, "index_k_with_scale": 1},
    "deepseek-v3": {"latent": 1},
    "llama-3-tiny": {"k": 2, "v": 2},
    "llama-3-8b": ATTENTION,
    "llama-3-fp8-tiny": {"k": 4, "v": 4, "k_scale": 4, "v_scale": 4},
    # One scale of 4 bytes for 8 elements: a head has two of each, which make a word.
    "llama-3-8b-fp8": {**ATTENTION, "k_scale": 4, "v_scale": 4},
    "gpt-oss-20b": ATTENTION,
    "qwen3-next-tiny": {"k": 1, "v": 1, "conv": 2, "ssm": 2},
    "qwen3-next-80b": {"k": 2, "v": 2, "conv": 32, "ssm": 32},
}


def buffers_of(of: ModelShape) -> dict[str, BufferSpec]:
    """Every buffer of a family's table by its name; two spaces with one name have the same rows."""
    return {buffer.name: buffer for space in POOLS.load(of.family)(of) for buffer in space.buffers}


@pytest.mark.parametrize("name", SHARDS)
def test_the_table_says_what_is_dealt_out(name: str) -> None:
    assert {buffer.name: buffer.shards for buffer in buffers_of(shape(name)).values()} == SHARDS[name]


MOST_RANKS = {"llama-3-8b-fp8": 4, "llama-fp8-answers": 2}
"""Where a rank of more would keep one head's scale of 4 bytes alone."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_rows_of_a_rank_are_its_shards_of_the_whole_row(name: str, size: int) -> None:
    whole = buffers_of(shape(name))
    if size > MOST_RANKS.get(name, size):
        with pytest.raises(LayoutMismatch, match="buffer k_scale: a row must be a multiple of 8 bytes, got 4"):
            buffers_of(rank_shape(shape(name), 0, size))
        return
    for rank in range(size):
        part = buffers_of(rank_shape(shape(name), rank, size))
        assert part.keys() == whole.keys()
        for buffer, spec in whole.items():
            keeps = len(shard_range(spec.shards, rank, size))
            assert part[buffer].row_bytes == spec.row_bytes // spec.shards * keeps, (buffer, rank)
            assert part[buffer].shards == keeps, (buffer, rank)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 12])
def test_heads_that_divide_neither_way_are_refused(size: int) -> None:
    with pytest.raises(LayoutMismatch):
        rank_shape(shape("llama-3-8b"), 0, size)
    assert rank_shape(shape("deepseek-v3"), size - 1, size) == shape("deepseek-v3")


@pytest.mark.parametrize(
    ("shards", "size", "kept"),
    [
        (1, 1, [[0]]),
        (1, 3, [[0], [0], [0]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 4, [[0], [0], [1], [1]]),
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (3, 6, [[0], [0], [1], [1], [2], [2]]),
    ],
)
def test_who_keeps_which_shards(shards: int, size: int, kept: list[list[int]]) -> None:
    assert [list(shard_range(shards, rank, size)) for rank in range(size)] == kept


@pytest.mark.parametrize(
    ("shards", "rank", "size"), [(0, 0, 1), (1, 1, 1), (1, -1, 1), (4, 0, 0), (8, 0, 3), (3, 7, 8)]
)
def test_a_rank_that_is_none_or_does_not_divide_is_refused(shards: int, rank: int, size: int) -> None:
    with pytest.raises(LayoutMismatch):
        shard_range(shards, rank, size)


@pytest.mark.parametrize("shards", [0, -1, 3, 8])
def test_a_buffer_of_broken_shards_and_a_page_row_that_is_dealt_out_are_refused(shards: int) -> None:
    with pytest.raises(LayoutMismatch):
        BufferSpec(name="b", rows=Granularity.TOKEN, item_shape=(32,), dtype=torch.uint8, shards=shards)
    page = BufferSpec(
        name="b", rows=Granularity.PAGE, item_shape=(64,), dtype=torch.uint8, pieces=(Piece("key", 0, 8),)
    )
    with pytest.raises(LayoutMismatch, match="PAGE row"):
        replace(page, shards=2)


def test_a_state_that_does_not_divide_with_its_heads_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="conv_dim must be a multiple"):
        rank_shape(replace(shape("qwen3-next-tiny"), ssm_heads=8, conv_dim=20), 0, 2)
