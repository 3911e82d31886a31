"""Metadata and bytes between the prefill and the decode end."""

from __future__ import annotations

from kvcheck.core.registry import Registry
from kvcheck.core.transfer.transport import Transport

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport", {"loopback": "kvcheck.core.transfer.loopback:LoopbackTransport"}
)
