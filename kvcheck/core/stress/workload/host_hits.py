"""HostHits: which leading pages of a request's prompt were loaded from the host, as the run itself has told.

Invariants:
- All events are passed on as they are.
- Of several lookups of a request the last one counts, and only where the request began behind what it found.
"""

from __future__ import annotations

from kvcheck.core.stress.workload.events import Emit, Event
from kvcheck.core.stress.workload.tier_events import LookedUp


class HostHits:
    """An Emit that also notes lookups."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._found: dict[int, LookedUp] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, LookedUp):
            self._found[event.request] = event
        self._emit(event)

    def pages(self, request: int, first: int) -> range:
        """Logical pages that were loaded for a request. first: the page that it computes first."""
        found = self._found.get(request)
        return range(found.device_pages, first) if found is not None and found.pages == first else range(0)
