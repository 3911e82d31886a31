"""Pool families: each is a table of spaces and buffers; everything else loops over the table."""

from __future__ import annotations

from collections.abc import Callable

from kvcheck.core.base.registry import Registry
from kvcheck.core.cache.pools.buffers import SpaceSpec
from kvcheck.core.cache.pools.shape import ModelShape

POOLS: Registry[Callable[[ModelShape], tuple[SpaceSpec, ...]]] = Registry(
    "pool family",
    {
        "mha": "kvcheck.core.cache.pools.mha:mha_spaces",
        "mla": "kvcheck.core.cache.pools.mla:mla_spaces",
        "nsa": "kvcheck.core.cache.pools.nsa:nsa_spaces",
        "swa": "kvcheck.core.cache.pools.swa:swa_spaces",
        "mamba": "kvcheck.core.cache.pools.mamba:mamba_spaces",
    },
)

FAMILIES = frozenset(POOLS.names())
