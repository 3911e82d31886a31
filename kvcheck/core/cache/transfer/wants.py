"""Wants: what decode ranks have asked a prefill rank for, attempt by attempt, and which attempts are over.

Invariants:
- What a peer asks for counts once: its numbers grow, and a copy that arrives later is told by its number.
- An attempt that is over stays over; why is remembered for the rooms that ended last.
"""

from __future__ import annotations

from collections.abc import Collection

from kvcheck.core.cache.transfer.messages import Message, Want

ENDED_MAX = 4096
"""Rooms whose end is remembered for ranks that ask late; one that asks later still runs into its deadline."""


class Wants:
    """Of one prefill rank."""

    def __init__(self) -> None:
        self._rooms: dict[int, dict[int, dict[str, Want]]] = {}  # room -> attempt -> peer
        self._heard: dict[str, int] = {}  # peer -> generation of its last Want
        self._ended: dict[int, tuple[int, str]] = {}  # room -> its last attempt that ended, and why

    def is_copy(self, peer: str, want: Want) -> bool:
        """It, or something that was said after it, was heard before; from now on it was."""
        if want.generation <= self._heard.get(peer, -1):
            return True
        self._heard[peer] = want.generation
        return False

    def of(self, room: int, attempt: int) -> dict[str, Want]:
        """What is asked for one attempt, by peer: the caller's to change."""
        return self._rooms.setdefault(room, {}).setdefault(attempt, {})

    def find(self, peer: str, message: Message) -> Want | None:
        """What the peer asked for with the room and generation of a message."""
        for wants in self._rooms.get(message.room, {}).values():
            want = wants.get(peer)
            if want is not None and want.generation == message.generation:
                return want
        return None

    def end(self, room: int, attempt: int, reason: str) -> dict[str, Want]:
        """The attempt is over; what was asked for it."""
        wants = self.of(room, attempt)
        del self._rooms[room][attempt]
        if not self._rooms[room]:
            del self._rooms[room]
        last = self._ended.pop(room, (attempt, reason))
        self._ended[room] = last if last[0] > attempt else (attempt, reason)  # the next one may be over before it
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        return wants

    def ended(self, room: int, attempt: int) -> str:
        """Why the attempt, or a later one, is over; "" where it is not, as far as is known."""
        last, reason = self._ended.get(room, (-1, ""))
        return reason if attempt <= last else ""

    def forget(self, peer: str) -> None:
        """The peer was started again: it asks anew, and counts anew."""
        self._heard.pop(peer, None)
        for wants in (each for attempts in self._rooms.values() for each in attempts.values()):
            wants.pop(peer, None)

    def unopened(self, known: Collection[int]) -> list[int]:
        """Requests that somebody asks for, whose rooms are not among `known` and never ended."""
        rooms = (each for room, each in self._rooms.items() if room not in known and room not in self._ended)
        return sorted({want.request for attempts in rooms for wants in attempts.values() for want in wants.values()})
