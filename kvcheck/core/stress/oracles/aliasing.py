"""The aliasing oracle: owned values share no storage with a pool, and index values are not changed in place."""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.base.record import Finding
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS
from kvcheck.core.stress.workload.events import Aliased, Descriptor, Owned


class AliasingOracle:
    name = "aliasing"

    def __init__(self) -> None:
        self.judged = 0
        self.findings: list[Finding] = []

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return ((Aliased, self._aliased), (Owned, self._owned), (Descriptor, self._descriptor))

    def finish(self) -> None:
        """Nothing is left to judge."""

    def _owned(self, event: Owned) -> None:
        self.judged += 1

    def _aliased(self, event: Aliased) -> None:
        self.judged += 1
        where = "" if event.page is None else f" ({'slot' if 'metadata' in event.buffer else 'page'} {event.page})"
        self._add(
            Finding(
                code="KV305",
                oracle=self.name,
                tier="device",
                buffer=event.buffer,
                page=event.page,
                request=event.request,
                message=f"the {event.what} of request {event.request} shares its storage with {event.buffer}{where}, "
                "which will be reused; expected an owned copy",
            )
        )

    def _descriptor(self, event: Descriptor) -> None:
        self.judged += 1
        if not event.unchanged:
            self._add(
                Finding(
                    code="KV303",
                    oracle=self.name,
                    request=event.request,
                    message=f"{event.what} changed the page list of request {event.request} in place",
                )
            )

    def _add(self, finding: Finding) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
