"""The accounting oracle: no page, slot, row or byte is lost.

Invariants:
- free + cached = total for each space when idle; after close free = total, and no memory is allocated.
- A map from page to page is empty when idle.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.base.record import Finding
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.workload.events import Closed, Counted, Mapped, Returned

LOCKS = "locks"
"""No space: no lock may be left when idle."""


class AccountingOracle(Oracle):
    name = "accounting"

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Counted, self._counted),
            (Mapped, self._mapped),
            (Returned, self._returned),
            (Closed, self._closed),
        )

    def _counted(self, event: Counted) -> None:
        self.judged += 1
        lost = event.total - event.free - event.cached
        if lost:
            verb = "are neither free nor cached" if lost > 0 else "are counted twice"
            what = f"{abs(lost)} of {event.total} ids of {event.space} {verb}"
            counts = f" ({event.free} free, {event.cached} cached)"
            if event.space.startswith(LOCKS):
                what, counts = f"{event.total} {event.space} are left", "; expected none"
            self._add(event.space, f"{what} after all requests have finished{counts}")

    def _returned(self, event: Returned) -> None:
        self.judged += 1
        if event.free != event.total:
            self._add(
                event.space,
                f"{event.total - event.free} of {event.total} ids of {event.space} are not free after close; "
                "expected all; close frees cached prefixes unless a lock is left on them",
            )

    def _mapped(self, event: Mapped) -> None:
        self.judged += 1
        if event.entries:
            unit, to = event.entries[0]
            self._add(
                event.table,
                f"{event.table} still maps {unit} to {to} after all requests have finished "
                f"({len(event.entries)} entries are left); expected 0 from the moment {to} was freed",
            )

    def _add(self, what: str, message: str) -> None:
        name = what.rpartition(":")[2]
        tier = "host" if what.startswith("host.") else "device"
        self.findings.append(Finding(code="KV401", oracle=self.name, tier=tier, buffer=name, message=message))

    def _closed(self, event: Closed) -> None:
        self.judged += 1
        for name, held in event.held:
            buffer = name.rsplit(".", 1)[-1]
            self.findings.append(
                Finding(
                    code="KV401",
                    oracle=self.name,
                    tier="host" if name.rpartition(":")[2].startswith("offload.") else "device",
                    buffer=buffer,
                    message=f"{held} bytes of {name} are still allocated after close",
                )
            )
