"""Metadata and bytes between the prefill and the decode end. Importing the package does not load torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcheck.core.base.registry import Registry

if TYPE_CHECKING:
    from kvcheck.core.cache.transfer.wire import Wire

TRANSPORTS: Registry[type[Wire]] = Registry(
    "transport",
    {
        "loopback": (
            "kvcheck.core.cache.transfer.loopback_wire:LoopbackWire",
            "One process holds all ranks; the schedule picks the order in which messages and bytes land.",
        ),
        "tcp": (
            "kvcheck.core.cache.transfer.sockets.wire:SocketWire",
            "Each rank is a process; bytes go over sockets.",
        ),
        "mooncake": (
            "kvcheck.core.cache.transfer.mooncake.wire:MooncakeWire",
            "Each rank is a process; bytes go through Mooncake's transfer engine.",
        ),
        "ipc": (
            "kvcheck.core.cache.transfer.ipc.wire:IpcWire",
            "Each rank is a process of one machine, and prefill ranks write into memory that decode ranks read.",
        ),
    },
)
SHARING_TRANSPORTS = ("ipc",)
"""Those that join processes, and whose legs take a scenario's paths, over host or device memory."""
