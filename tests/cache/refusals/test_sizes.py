"""Shapes and sizes that no pool can have, each bad in one thing, and those just inside the bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rigs.scene import pool_of

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.workload.shapes import shape

SMALL = ModelShape(name="small", family="mha", page_size=1, full_layers=(0,))
WINDOWED = replace(SMALL, window_layers=(1,), window=1)
STATES = shape("qwen3-next-tiny")


@pytest.mark.parametrize(
    "call",
    [
        lambda: replace(SMALL, full_layers=()),
        lambda: replace(SMALL, full_layers=(0, 2)),
        lambda: replace(SMALL, full_layers=(0, 0)),
        lambda: replace(SMALL, page_size=0),
        lambda: replace(WINDOWED, window=0),
        lambda: replace(SMALL, index_head_dim=12, index_quant_block=8),
        lambda: POOLS.load("mamba")(replace(STATES, ssm_heads=0)),
        lambda: POOLS.load("mamba")(replace(STATES, ssm_heads=2, conv_dim=3)),
        lambda: pool_of("llama-3-tiny", pages=0),
        lambda: pool_of("gpt-oss-tiny", window_pages=0),
        lambda: pool_of("qwen3-next-tiny", state_slots=-1),
        lambda: pool_of("llama-3-tiny").sets["full"].buffer("no such buffer"),
    ],
)
def test_what_no_pool_can_be_made_of_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(LayoutMismatch):
        call()


def test_the_least_sizes_are_accepted() -> None:
    assert WINDOWED.num_layers == 2 and SMALL.window == 0
    assert replace(SMALL, index_head_dim=16, index_quant_block=8).num_layers == 1
    assert pool_of("gpt-oss-tiny", pages=1, window_pages=1).pages_free == 1
    assert pool_of("qwen3-next-tiny", requests=1, state_slots=1).spare("state") == 0
