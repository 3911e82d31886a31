"""Stalls: holds of legs of some requests, by the numbers of schedule and request alone.

Invariants:
- If a run has enough requests, one is held for longer than a room may take and has to fail, with that reason. All other
  held ones have to arrive.
- On an asynchronous path a leg is late instead: it is reported, and a part of it lands later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.wire import LEGS, Ticket
from kvcheck.core.stress.scenarios.pd_transfer import ABORT_EVERY, Faults
from kvcheck.core.stress.workload.events import Faulted
from kvcheck.core.stress.workload.jobs import Job

STALL_EVERY = 3
HELD_S = 0.25
FOR_EVER_FROM = 8
"""The request that is held for ever is the first without a fault from this number on."""


class Stalls:
    """aux: metadata rows travel as writes, not as messages. paths: leg -> path."""

    def __init__(
        self,
        jobs: tuple[Job, ...],
        shape: ModelShape,
        faults: Faults,
        emit: Emit,
        variant: int,
        *,
        aux: bool,
        paths: Mapping[str, str],
    ) -> None:
        self._emit = emit
        self._paths = paths
        self.told: set[int] = set()
        has_state = shape.family in ("nsa", "swa", "mamba")
        legs = [leg for leg in LEGS if (leg != "state" or has_state) and (leg != "aux" or aux)]
        self._legs = {
            job.request: legs[(job.request // STALL_EVERY + variant) % len(legs)]
            for job in jobs
            if not faults.has(job.request) and job.request % STALL_EVERY == (variant + 2) % STALL_EVERY
        }
        quiet = [job.request for job in jobs if job.request % ABORT_EVERY >= 2 and not faults.has(job.request)]
        self._endless = next((request for request in quiet if request >= FOR_EVER_FROM), None)
        if self._endless is not None:
            self._legs[self._endless] = legs[variant % len(legs)]

    def held_s(self, leg: str, ticket: Ticket) -> float | None:
        """Seconds to hold this write; infinity: for ever; None: it is not held."""
        if self._legs.get(ticket.request) != leg or self._is_late(leg, ticket.request):
            return None
        is_first = ticket.request not in self.told
        self.told.add(ticket.request)
        if ticket.request != self._endless:
            return HELD_S
        if is_first:
            why = f"its {leg} was held for longer than a room may take"
            self._emit(Faulted(ticket.request, why, ("rounds or seconds",)))
        return math.inf

    def late_s(self, leg: str, ticket: Ticket) -> float:
        """Seconds by which a part of this reported write lands later than the rest: once a request."""
        request = ticket.request
        if self._legs.get(request) != leg or request in self.told or not self._is_late(leg, request):
            return 0.0
        self.told.add(request)
        return HELD_S

    def _is_late(self, leg: str, request: int) -> bool:
        return self._paths.get(leg) == "async" and request != self._endless
