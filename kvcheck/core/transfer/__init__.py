"""Metadata and bytes between the prefill and the decode end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcheck.core.registry import Registry

if TYPE_CHECKING:  # the engine process imports this package and must not wait for torch
    from kvcheck.core.transfer.transport import Transport

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport", {"loopback": "kvcheck.core.transfer.loopback:LoopbackTransport"}
)
