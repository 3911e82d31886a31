"""Backends: one Protocol with four implementations. SEMANTICS.md states the rules and names their litmus tests."""

from __future__ import annotations

from kvcheck.core.base.registry import Registry
from kvcheck.core.cache.backend.backend import Backend

BACKENDS: Registry[type[Backend]] = Registry(
    "backend",
    {
        "simulated": "kvcheck.core.cache.backend.simulated:SimulatedBackend",
        "eager": "kvcheck.core.cache.backend.eager:EagerBackend",
        "threads": "kvcheck.core.cache.backend.threads:ThreadsBackend",
        "cuda": "kvcheck.core.cache.backend.cuda:CudaBackend",
    },
)
