"""Places of the library's capabilities, and the builds that contain it."""

from __future__ import annotations

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
