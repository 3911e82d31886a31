"""Pool families: each is a table of spaces and buffers; everything else loops over the table.

Invariants:
- A family is one row; FAMILIES has the same names.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcheck.core.base.registry import Registry
from kvcheck.core.pools.buffers import SpaceSpec
from kvcheck.core.pools.shape import ModelShape

POOLS: Registry[Callable[[ModelShape], tuple[SpaceSpec, ...]]] = Registry(
    "pool family",
    {
        "mha": "kvcheck.core.pools.mha:mha_spaces",
        "mla": "kvcheck.core.pools.mla:mla_spaces",
        "nsa": "kvcheck.core.pools.nsa:nsa_spaces",
        "swa": "kvcheck.core.pools.swa:swa_spaces",
        "mamba": "kvcheck.core.pools.mamba:mamba_spaces",
    },
)

FAMILIES = frozenset(POOLS.names())
"""Every pool family."""
