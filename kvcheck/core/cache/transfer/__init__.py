"""Metadata and bytes between the prefill and the decode end.

Invariants:
- Importing the package loads no tensor library: the engine process starts in a tenth of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcheck.core.base.registry import Registry

if TYPE_CHECKING:
    from kvcheck.core.cache.transfer.transport import Transport

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    {
        "loopback": (
            "kvcheck.core.cache.transfer.loopback:LoopbackTransport",
            "One process holds all ranks; the schedule picks the order in which messages and bytes land.",
        ),
    },
)
