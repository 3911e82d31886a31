"""Prices: what a part costs beside the plainest thing that does the same."""

from __future__ import annotations

from collections.abc import Callable

from kvcheck.core.registry import Registry

CASES: Registry[Callable[..., object]] = Registry("case", {"transport": "kvcheck.core.bench.transport:measure"})
