"""Inbox: the supervisor's messages to a running rank, written by the thread that reads the rank's input."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from threading import Event


class Inbox:
    """addresses: of decode ranks, as they become known. is_over: all ranks are idle."""

    def __init__(self) -> None:
        self.addresses: queue.Queue[dict[str, str]] = queue.Queue()
        self._over = Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def take(self, line: Mapping[str, object]) -> None:
        addresses = line.get("addresses")
        if isinstance(addresses, dict):
            self.addresses.put({str(name): str(address) for name, address in addresses.items()})
        if line.get("close"):
            self._over.set()
