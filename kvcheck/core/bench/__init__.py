"""Benchmarks: the cost of a function compared with the plainest code that does the same.

Invariants:
- CASES begins with the quickest: a case may use an equal share of the time left, so that the slow ones gain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcheck.core.base.registry import Registry

# A row: Case of core/bench/arms.py, which this module does not import, so that a name can be checked without torch.
CASES: Registry[Callable[..., Any]] = Registry(
    "case",
    {
        "metadata-read": (
            "kvcheck.core.bench.case_metadata:points",
            "Reads a metadata row as one owned copy, against ten views of it and ten clones.",
        ),
        "nvlink-aux": (
            "kvcheck.core.bench.case_nvlink:points",
            "Sends a metadata row to a peer: sealed in its memory, over host and socket, and without a proof.",
        ),
        "guarded-read": (
            "kvcheck.core.bench.case_guarded:points",
            "Reads one layer and all layers with the guard, against the same reads without a guard.",
        ),
        "decode-step": (
            "kvcheck.core.bench.case_decode:points",
            "Runs a decode step with guarded reads, owned metadata and checked holdings, against a step without them.",
        ),
        "layer-load": (
            "kvcheck.core.bench.case_layer_load:points",
            "Loads from the host with a decode step behind it: layer-wise waits, one whole wait, no wait.",
        ),
        "seal": (
            "kvcheck.core.bench.case_seal:points",
            "Seals a request at one end and at both, as a share of moving its bytes.",
        ),
        "offload-restore": (
            "kvcheck.core.bench.case_offload:points",
            "Saves and restores a retracted request, against indexing by chunks and against plain copies.",
        ),
    },
)
