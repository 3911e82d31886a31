"""The output oracle: tokens equal the known answers, or those of a reference run that retracts and reuses nothing."""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.workload.events import Expected, Finished


class OutputOracle(Oracle):
    name = "output"

    def __init__(self) -> None:
        super().__init__()
        self._expected: dict[int, tuple[int, ...]] = {}
        self._source = "reference run"

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return ((Expected, self._reference), (Finished, self._finished))

    def _reference(self, event: Expected) -> None:
        self._expected[event.request] = event.tokens
        self._source = "reference run" if event.by == "words" else "known answer"

    def _finished(self, event: Finished) -> None:
        expected = self._expected.get(event.request)
        if expected is None:
            return
        self.judged += 1
        if event.tokens == expected:
            return
        pairs = zip(event.tokens, expected, strict=False)
        at = next((i for i, (got, want) in enumerate(pairs) if got != want), min(len(event.tokens), len(expected)))
        self.add(
            "KV501",
            f"request {event.request}: output token {at} of {len(expected)} is "
            f"{event.tokens[at] if at < len(event.tokens) else 'missing'}, the {self._source} has "
            f"{expected[at] if at < len(expected) else 'none'}",
            request=event.request,
            row=at,
        )
