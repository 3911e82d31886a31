"""Prices: what a part costs beside the plainest thing that does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcheck.core.registry import Registry

# A row: Case of core/bench/arms.py, which this module does not import, so that a name can be checked without torch.
CASES: Registry[Callable[..., Any]] = Registry(
    "case",
    {
        "metadata-read": "kvcheck.core.bench.case_metadata:points",
    },
)
