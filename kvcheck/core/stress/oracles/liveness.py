"""The liveness oracle: every request that was sent ends, and the target raises no error.

Invariants:
- An error of the target is a finding with the code of its kind. A spent step budget is a hang (KV901).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.base.record import Finding
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.workload.events import Aborted, Broke, Expected, Failed, Finished, Retried


class LivenessOracle(Oracle):
    name = "liveness"

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()
        self._broke = False

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Expected, self._expected),
            (Finished, self._ended),
            (Aborted, self._ended),
            (Failed, self._ended),
            (Retried, self._expected),
            (Broke, self._broken),
        )

    def finish(self) -> None:
        if self._open and not self._broke:
            first, count = min(self._open), len(self._open)
            text = f"request {first} never ended"
            if count > 1:
                text = f"{count} requests never ended, the first of them request {first}"
            self.findings.append(Finding(code="KV901", oracle=self.name, request=first, message=text))

    def _expected(self, event: Expected | Retried) -> None:
        self._open.add(event.request)

    def _ended(self, event: Finished | Aborted | Failed) -> None:
        self.judged += 1
        self._open.discard(event.request)

    def _broken(self, event: Broke) -> None:
        self.judged += 1
        self._broke = True
        self.findings.append(finding_of(event))


def finding_of(event: Broke) -> Finding:
    text = f"{event.error}: {event.message}"
    return Finding(code=event.code, oracle=LivenessOracle.name, request=event.request, message=text)
