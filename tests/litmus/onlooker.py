"""An observer that writes down what a backend tells it: one row a call, in the order of the calls."""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.cache.backend.backend import Footprint, Lane, Operation

Inbox = tuple[str | int, ...]


class Onlooker:
    """Every call as (method, numbers and lane)."""

    def __init__(self) -> None:
        self.told: list[Inbox] = []

    def edges(self) -> list[Inbox]:
        """All but the completions, which say when something ran and not what was asked for."""
        return [row for row in self.told if row[0] != "completed"]

    def submitted(
        self,
        ordinal: int,
        operation: Operation,
        lane: Lane,
        reads: Sequence[Footprint],
        writes: Sequence[Footprint],
        record: int,
    ) -> None:
        self.told.append(("submitted", ordinal, lane.name, record))

    def completed(self, ordinal: int) -> None:
        self.told.append(("completed", ordinal))

    def recorded(self, record: int, lane: Lane) -> None:
        self.told.append(("recorded", record, lane.name))

    def lane_waited(self, record: int, lane: Lane) -> None:
        self.told.append(("lane_waited", record, lane.name))

    def process_joined(self, record: int) -> None:
        self.told.append(("process_joined", record))

    def process_drained(self) -> None:
        self.told.append(("process_drained",))
