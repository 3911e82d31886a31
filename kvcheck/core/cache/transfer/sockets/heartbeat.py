"""Pulse: sends a heartbeat on every link, and closes the links of silent peers.

Invariants:
- A heartbeat never waits, and any byte from a peer counts as one.
- Time in which this process did not run does not count as silence of its peers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvcheck.core.cache.transfer.sockets.link import HELLO_S, Link

LEASE_S = 15.0
BEATS_OF_A_LEASE = 8
MOST_BEAT_S = 0.5


class Pulse:
    """A thread over the links of one rank. lease_s: longest silence of a peer."""

    def __init__(self, links: Sequence[Link], *, lease_s: float) -> None:
        self._links = links
        self._lease_s = lease_s
        self._beat_s = min(MOST_BEAT_S, lease_s / BEATS_OF_A_LEASE)
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        heard = {link.peer: link.heard for link in self._links}
        silent_s = dict.fromkeys(heard, 0.0)
        while links := [link for link in self._links if not link.is_lost]:
            before = time.monotonic()
            time.sleep(self._beat_s)
            passed_s = min(time.monotonic() - before, 2 * self._beat_s)
            for link in links:
                link.beat()
                silent_s[link.peer] = silent_s[link.peer] + passed_s if link.heard == heard[link.peer] else 0.0
                heard[link.peer] = link.heard
                if silent_s[link.peer] >= self._limit_s(link):
                    self._cut_off(link)

    def _limit_s(self, link: Link) -> float:
        """A peer that is still starting has more time."""
        return self._lease_s if link.heard else max(self._lease_s, HELLO_S)

    def _cut_off(self, link: Link) -> None:
        link.close()
