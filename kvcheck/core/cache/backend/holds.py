"""Holds on the streams of a device, as the delays require.

Invariants:
- Nothing hangs: every hold has a watchdog, and the process releases holds before it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic

from kvcheck.core.cache.backend.backend import Lane
from kvcheck.core.cache.backend.delays import Delay, Delayer, DelayReport, Hold
from kvcheck.core.cache.backend.device import Event, Stream, StreamDevice

HOLDS_MOST = 64
"""Holds that can be in place or not yet counted; a lane has at most one in place."""

GRACE_LOOKS = 20
"""Checks, before the holds are released for a wait, whether the wait ends without that."""

POLLS_MOST = 1000
"""After so many failed polls all lanes are released: a process that only polls would wait for ever."""


class Holds(Generic[Stream, Event]):
    def __init__(self, delays: Sequence[Delay], machine: StreamDevice[Stream, Event]) -> None:
        self._delayer = Delayer(delays)
        self._has_run = machine.has_run
        self._grace_s = machine.grace_s
        self._polls = 0
        self._ends: list[tuple[Hold, Event]] = []
        self._arrived: tuple[Hold, ...] = ()
        self._stock = [*machine.holds(HOLDS_MOST)]
        self._free = [*self._stock]

    def before(self, names: Sequence[str], lane: Lane, stream: Stream) -> None:
        """Hold the lane if a delay requires it. names: of the operations submitted together."""
        self._look()
        arrived: list[Hold] = []
        for name in names:
            row = self._delayer.arrives(name, lane)
            if row is not None and self._free:
                taken = self._free.pop()
                taken.place(stream)
                self._delayer.place(row, lane, taken)
            arrived += self._delayer.overtaking(name, lane)
        self._arrived = tuple(dict.fromkeys(arrived))

    def behind(self, event: Event) -> None:
        self._ends += [(each, event) for each in self._arrived]
        self._arrived = ()

    def polled(self, is_reached: bool) -> None:
        self._look()
        self._polls = 0 if is_reached or not self._delayer.is_holding else self._polls + 1
        if self._polls >= POLLS_MOST:
            self._polls = 0
            self._delayer.give_way()

    def give_way(self, is_reached: Callable[[], bool]) -> None:
        """Release all lanes before the process waits, unless the wait ends without that."""
        for _ in range(GRACE_LOOKS):
            self._look()
            if is_reached() or not self._delayer.is_holding:
                return
            time.sleep(self._grace_s / GRACE_LOOKS)
        self._delayer.give_way()

    def report(self) -> DelayReport:
        self._look()
        return self._delayer.report()

    def _look(self) -> None:
        waiting = []
        for each, event in self._ends:
            if self._has_run(event):
                self._delayer.overtaken(each)
            else:
                waiting.append((each, event))
        ended = self._delayer.look()
        self._free += [each for each in self._stock if each in ended]
        self._ends = [(each, event) for each, event in waiting if each not in ended]  # the place may be used again
