"""Backends: one Protocol, three machines. Rules and their litmus tests: SEMANTICS.md."""

from __future__ import annotations

from kvcheck.core.base.registry import Registry
from kvcheck.core.cache.backend.backend import Backend

BACKENDS: Registry[type[Backend]] = Registry(
    "backend",
    {
        "simulated": "kvcheck.core.cache.backend.simulated:SimulatedBackend",
        "eager": "kvcheck.core.cache.backend.eager:EagerBackend",
        "cuda": "kvcheck.core.cache.backend.cuda:CudaBackend",
    },
)
