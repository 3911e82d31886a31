"""Prices: what a part costs beside the plainest thing that does the same.

Invariants:
- A case is a row of CASES, and what it does not apply to is a row of FAMILIES; nothing else lists cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcheck.core.base.registry import Registry

# A row: Case of core/bench/arms.py, which this module does not import, so that a name can be checked without torch.
CASES: Registry[Callable[..., Any]] = Registry(
    "case",
    {
        "metadata-read": "kvcheck.core.bench.case_metadata:points",
        "offload-restore": "kvcheck.core.bench.case_offload:points",
        "decode-step": "kvcheck.core.bench.case_decode:points",
        "guarded-read": "kvcheck.core.bench.case_guarded:points",
        "content-fill": "kvcheck.core.bench.case_content:fill_points",
        "content-verify": "kvcheck.core.bench.case_content:verify_points",
        "layer-load": "kvcheck.core.bench.case_layer_load:points",
        "index-read": "kvcheck.core.bench.case_index:points",
        "seal": "kvcheck.core.bench.case_seal:points",
        "nvlink-aux": "kvcheck.core.bench.case_nvlink:points",
        "tree": "kvcheck.core.bench.case_tree:points",
        "recorder": "kvcheck.core.bench.case_recorder:points",
        "transport": "kvcheck.core.bench.transport:points",
    },
)

# Cases that not every model has a part for: the pool families that do.
FAMILIES: dict[str, tuple[str, ...]] = {"index-read": ("nsa",)}


def applies(case: str, family: str) -> bool:
    """Whether models of that pool family have what the case measures."""
    return family in FAMILIES.get(case, (family,))
