"""Probe of a device before delays are used: which streams run concurrently, and the latency of a release.

A device has fewer hardware queues than a run has lanes. Streams that share one stop behind each other's holds, so
holding one of them tests no order of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcheck.core.cache.backend.device import WATCHDOG_NS, Event, Stream, StreamDevice

LANES = 34
"""Lanes of the transfer scenarios by default (counted)."""
BESIDE_S = 0.005
"""A stream that runs nothing for so long while another is held is blocked by that hold."""
LOOK_S = 0.00002


@dataclass(frozen=True, slots=True)
class HoldProbe:
    """release_s: from a release to the end of the stream's work. watchdog_s: length of a hold that is not released.
    behind: pairs of stream numbers; the second stopped while the first was held."""

    release_s: float
    watchdog_s: float
    streams: int
    behind: tuple[tuple[int, int], ...]

    @property
    def text(self) -> str:
        told = (
            f"a hold is let go in {self.release_s * 1e6:.0f} us and ends by itself after {self.watchdog_s * 1e3:.0f} ms"
        )
        pairs = self.streams * (self.streams - 1)
        if not self.behind:
            return f"{told}; {self.streams} streams run beside each other"
        held, still = self.behind[0]
        return f"{told}; {len(self.behind)} of {pairs} pairs of streams stand behind each other, {still} behind {held}"


def probe(machine: StreamDevice[Stream, Event], *, streams: int = LANES) -> HoldProbe:
    """Hold each stream in turn. Takes about a third of a second, and BESIDE_S for each stream that blocks another."""
    lanes = [machine.stream() for _ in range(streams)]
    hold, last = machine.holds(1)[0], machine.event()
    for lane in lanes:  # the first use of a stream initialises it
        machine.record(last, lane)
        machine.join(last)
    behind: list[tuple[int, int]] = []
    release_s = 0.0
    for number, lane in enumerate(lanes):
        hold.place(lane)
        machine.record(last, lane)
        others = {at: machine.event() for at, _ in enumerate(lanes) if at != number}
        for at, event in others.items():
            machine.record(event, lanes[at])
        _until(lambda others=others: all(map(machine.has_run, others.values())), BESIDE_S)  # type: ignore[misc]
        behind += [(number, at) for at, event in others.items() if not machine.has_run(event)]
        began = time.perf_counter()
        hold.release()
        machine.join(last)
        release_s = max(release_s, time.perf_counter() - began)
        for event in others.values():
            machine.join(event)
    began = time.perf_counter()
    hold.place(lanes[0])
    machine.record(last, lanes[0])
    _until(lambda: machine.has_run(last), 4 * WATCHDOG_NS / 1e9)
    watchdog_s = time.perf_counter() - began
    hold.release()
    machine.join(last)
    return HoldProbe(release_s, watchdog_s, streams, tuple(behind))


def _until(is_so: Callable[[], bool], most_s: float) -> None:
    end = time.perf_counter() + most_s
    while not is_so() and time.perf_counter() < end:
        time.sleep(LOOK_S)
