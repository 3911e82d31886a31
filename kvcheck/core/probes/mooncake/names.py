"""Places of the library's capabilities, and the longest duration of a call by its own settings.

A call is late only some time after the bound that the library states: a busy machine is no finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ENGINE = "mooncake.engine:TransferEngine"
NAMES: Final[dict[str, tuple[str, ...]]] = {
    "engine": (_ENGINE,),
    "register": (f"{_ENGINE}.register_memory",),
    "unregister": (f"{_ENGINE}.unregister_memory",),
    "sync": (f"{_ENGINE}.transfer_sync_write",),
    "batch": (f"{_ENGINE}.batch_transfer_sync_write",),
    "async": (f"{_ENGINE}.batch_transfer_async_write",),
    "async.status": (f"{_ENGINE}.get_batch_transfer_status",),
    "submit": (f"{_ENGINE}.transfer_submit_write",),
    "submit.status": (f"{_ENGINE}.transfer_check_status",),
    "notified.sync": (f"{_ENGINE}.transfer_sync",),
    "notified.batch": (f"{_ENGINE}.batch_transfer_sync",),
    "notification": ("mooncake.engine:TransferNotify",),
    "notification.list": (f"{_ENGINE}.get_notifies",),
    "opcode": ("mooncake.engine:TransferOpcode",),
}
STATED = "MC_TRANSFER_TIMEOUT"
SOON = {STATED: "10", "MC_TCP_PROGRESS_TIMEOUT_SEC": "3", "MC_TCP_STATUS_TIMEOUT_SEC": "3"}
"""Settings of probes in which calls fail: shorter limits than the library's own, for the same outcome."""
LEAST_S = 5
"""The library replaces a shorter limit by this one."""
USUAL_S = 30
PATIENCE_S = 20.0


def longest_call_s(variables: Mapping[str, str]) -> float:
    stated = variables.get(STATED, "")
    return max(LEAST_S, int(stated) if stated.isdecimal() else USUAL_S) + PATIENCE_S
