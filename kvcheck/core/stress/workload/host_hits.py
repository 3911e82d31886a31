"""HostHits: the leading pages of a request's prompt that were loaded from the host.

Invariants:
- Only the last lookup of a request counts, and only if the request began behind the pages found.
"""

from __future__ import annotations

from kvcheck.core.stress.workload.events import Emit, Event
from kvcheck.core.stress.workload.tier_events import LookedUp


class HostHits:
    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._found: dict[int, LookedUp] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, LookedUp):
            self._found[event.request] = event
        self._emit(event)

    def pages(self, request: int, first: int) -> range:
        """Logical pages that were loaded for a request. first: the first page it computes."""
        found = self._found.get(request)
        return range(found.device_pages, first) if found is not None and found.pages == first else range(0)
