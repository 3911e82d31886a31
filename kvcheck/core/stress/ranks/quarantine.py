"""Quarantine: memory that a peer was requested to write is not freed while the peer may still write it.

    Want sent --> may be written --> Done sent (all bytes are verified), Drained received, or peer gone --> may be freed

Invariants:
- It uses no code of the receiver under test.
- A message of an older generation ends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.cache.events import Allocated, Freed
from kvcheck.core.cache.transfer.messages import Done, Drained, Message, Want
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle


class Quarantine(Oracle):
    """One decode rank. judged: pages and slots freed after a Want."""

    name = "lifetime"

    def __init__(self, rank: str) -> None:
        super().__init__()
        self._rank = rank
        self._owners: dict[tuple[str, int], int] = {}
        self._writers: dict[int, dict[str, tuple[int, int]]] = {}
        """By request, who may write: peer -> (room, generation)."""

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return ((Allocated, self._allocated), (Freed, self._freed))

    def sent(self, peer: str, message: Message) -> None:
        if isinstance(message, Want):
            self._writers.setdefault(message.request, {})[peer] = (message.room, message.generation)
        elif isinstance(message, Done):
            self._end(peer, message.room, message.generation)

    def received(self, peer: str, message: Message) -> None:
        if isinstance(message, Drained):
            self._end(peer, message.room, message.generation)

    def gone(self, peer: str) -> None:
        for writers in self._writers.values():
            writers.pop(peer, None)

    def _end(self, peer: str, room: int, generation: int) -> None:
        for writers in self._writers.values():
            if writers.get(peer) == (room, generation):
                del writers[peer]

    def _allocated(self, event: Allocated) -> None:
        for unit in event.ids:
            self._owners[event.space, int(unit)] = event.owner

    def _freed(self, event: Freed) -> None:
        for unit in event.ids:
            owner = self._owners.pop((event.space, int(unit)), None)
            writers = self._writers.get(owner, {}) if owner is not None else {}
            self.judged += owner in self._writers
            if writers:
                text = f"{self._rank}: {event.space} {int(unit)} of request {owner} was freed while "
                text += f"{', '.join(sorted(writers))} may still write it"
                self.add("KV202", text, tier="device", page=int(unit), request=owner)
