"""Told: what the supervisor tells a rank while it runs.

Invariants:
- Written by the thread that reads the rank's input, read by the one that runs its rounds.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from threading import Event


class Told:
    """ports: of decode ranks, as they become known. is_over: everybody is idle."""

    def __init__(self) -> None:
        self.ports: queue.Queue[dict[str, int]] = queue.Queue()
        self._over = Event()

    @property
    def is_over(self) -> bool:
        """Everybody has said that he is idle."""
        return self._over.is_set()

    def take(self, said: Mapping[str, object]) -> None:
        """One line of the supervisor."""
        ports = said.get("ports")
        if isinstance(ports, dict):
            self.ports.put({str(name): int(port) for name, port in ports.items()})
        if said.get("close"):
            self._over.set()
