"""An observer that writes down what a backend tells it: one row a call, in the order of the calls."""

from __future__ import annotations

from kvcheck.core.cache.backend.backend import (
    Completed,
    LaneWaited,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Submitted,
)
from kvcheck.core.cache.events import Event

Inbox = tuple[str | int, ...]


class Onlooker:
    """Every event as (kind, numbers and lane)."""

    def __init__(self) -> None:
        self.told: list[Inbox] = []

    def edges(self) -> list[Inbox]:
        """All but the completions, which say when something ran and not what was asked for."""
        return [row for row in self.told if row[0] != "completed"]

    def __call__(self, event: Event) -> None:
        if isinstance(event, Submitted):
            self.told.append(("submitted", event.ordinal, event.lane, event.record or 0))
        elif isinstance(event, Completed):
            self.told.append(("completed", event.ordinal))
        elif isinstance(event, Recorded):
            self.told.append(("recorded", event.record, event.lane))
        elif isinstance(event, LaneWaited):
            self.told.append(("lane_waited", event.record, event.lane))
        elif isinstance(event, ProcessJoined):
            self.told.append(("process_joined", event.record))
        else:
            assert isinstance(event, ProcessDrained)
            self.told.append(("process_drained",))
