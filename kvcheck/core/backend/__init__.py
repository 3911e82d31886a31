"""Backends: one Protocol, three machines. Rules and their litmus tests: SEMANTICS.md."""

from __future__ import annotations

from kvcheck.core.backend.backend import Backend
from kvcheck.core.base.registry import Registry

BACKENDS: Registry[type[Backend]] = Registry(
    "backend",
    {
        "simulated": "kvcheck.core.backend.simulated:SimulatedBackend",
        "eager": "kvcheck.core.backend.eager:EagerBackend",
        "cuda": "kvcheck.core.backend.cuda:CudaBackend",
    },
)
