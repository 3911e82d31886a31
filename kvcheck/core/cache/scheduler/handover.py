"""HandOver: a prefilled request's metadata travels from the prefill end's slot to the decode end's.

Invariants:
- A row is taken only after the transport has told that it has landed.
- Both slots are given back exactly once, whether the request goes on or is aborted; never while a copy may still
  touch them.
"""

from __future__ import annotations

from kvcheck.core.base.errors import ForeignAccess
from kvcheck.core.cache.scheduler.parts import SchedulerDeps
from kvcheck.core.cache.scheduler.request import RunningRequest


class HandOver:
    """Requests between prefill and decode."""

    def __init__(self, parts: SchedulerDeps) -> None:
        self._backend = parts.backend
        self._decode = parts.decode_metadata
        self._parts = parts
        self.actives: list[RunningRequest] = []

    @property
    def is_holding(self) -> bool:
        """Requests are here that will go on, or give back what they hold."""
        return bool(self.actives)

    def begin(self, active: RunningRequest) -> None:
        """Hand a request over, as soon as there is a slot."""
        self.actives.append(active)

    def advance(self) -> list[RunningRequest]:
        """Send what waits for a slot; the requests whose metadata has arrived."""
        arrived = []
        for active in list(self.actives):
            if active.delivery is None:
                self._send(active)
            elif self._backend.query(active.delivery.notified):
                self._take(active)
                self.actives.remove(active)
                arrived.append(active)
        return arrived

    def wait(self) -> bool:
        """Wait for the oldest delivery; False where none is on its way."""
        deliveries = [active.delivery for active in self.actives if active.delivery is not None]
        if deliveries:
            self._backend.wait(deliveries[0].notified)
        return bool(deliveries)

    def abort(self, active: RunningRequest) -> None:
        """Let a delivery end, then forget the request."""
        self.actives.remove(active)
        if active.delivery is not None:
            self._backend.wait(active.delivery.notified)
            self._backend.wait(active.delivery.sent)
            self._release_source(active)

    def _send(self, active: RunningRequest) -> None:
        prefill, transport = self._parts.prefill_metadata, self._parts.transport
        assert prefill is not None and transport is not None
        slot = prefill.lease(active.request)
        if slot is None or active.target_slot is None:
            return
        values = self._parts.decoder.metadata(active.request)
        written = prefill.set(slot, active.request, values)
        active.source_slot = slot
        active.delivery = transport.send(
            request=active.request, source_slot=slot, target_slot=active.target_slot, after=written
        )

    def _take(self, active: RunningRequest) -> None:
        assert active.delivery is not None
        assert active.target_slot is not None
        row = self._decode.get(active.target_slot, active.request)
        room = int(row.field("bootstrap_room")[0])
        if room != active.request:
            raise ForeignAccess(f"metadata slot {active.target_slot}: expected room {active.request}, got {room}")
        active.metadata = row
        active.output.append(int(row.field("output_ids")[0]))
        self._backend.wait(active.delivery.sent)
        self._release_source(active)
        self._decode.release(active.target_slot, active.request)

    def _release_source(self, active: RunningRequest) -> None:
        assert active.source_slot is not None and self._parts.prefill_metadata is not None
        self._parts.prefill_metadata.release(active.source_slot, active.request)
