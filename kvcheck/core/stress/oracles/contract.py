"""The contract oracle: lengths continue, offloads are complete, ids are in bounds.

Invariants:
- Every buffer of the pool's table is in every offloaded value and in every restore.
- A request computes position after position across retractions, and each attempt begins at the same position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcheck.core.cache.backend.backend import Submitted
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle, unit_text
from kvcheck.core.stress.workload.events import Forward, ProcessActs, Restored, Retried, Saved

_PADDED = ("full", "window", "state", "rows")


class ContractOracle(Oracle):
    name = "contract"

    def __init__(self) -> None:
        super().__init__()
        self._process = ""
        self._reached: dict[tuple[str, int], int] = {}
        self._first: dict[tuple[str, int], int] = {}
        self._retries: Counter[int] = Counter()
        self._restarts: Counter[tuple[str, int]] = Counter()
        self._saved: dict[tuple[str, int], int] = {}

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (ProcessActs, self._process_acts),
            (Forward, self._forward),
            (Saved, self._saved_event),
            (Restored, self._restored),
            (Submitted, self._submitted),
            (Retried, self._retried),
        )

    def _process_acts(self, event: ProcessActs) -> None:
        self._process = event.process

    def _retried(self, event: Retried) -> None:
        self._retries[event.request] += 1

    def _forward(self, event: Forward) -> None:
        self.judged += 1
        key = (self._process, event.request)
        if event.stop <= event.start:  # LMCache #3322: the whole prompt was served, and nothing was left to compute
            self._add(
                "KV301",
                event.request,
                None,
                f"a pass of request {event.request} computed no position from {event.start} on, so that its token "
                "comes from nothing; the last prompt token has to be computed",
            )
        reached = self._reached.get(key)
        self._first.setdefault(key, event.start)
        if reached is None or event.start == reached:
            self._reached[key] = event.stop
            return
        if not self._starts_again(key, event.start):
            self._add(
                "KV301",
                event.request,
                None,
                f"request {event.request} computes position {event.start}, expected {reached}: "
                f"its committed length is off by {event.start - reached:+d}",
            )
        self._reached[key] = event.stop

    def _starts_again(self, key: tuple[str, int], at: int) -> bool:
        if at != self._first.get(key) or self._restarts[key] >= self._retries[key[1]]:
            return False
        self._restarts[key] += 1
        self._reached[key] = at
        return True

    def _saved_event(self, event: Saved) -> None:
        self.judged += len(event.table)
        self._saved[self._process, event.request] = event.tokens
        self._complete("saved", event)
        key = (self._process, event.request)
        reached = self._reached.get(key, event.tokens)
        if event.tokens != reached and not self._starts_again(key, event.tokens):
            text = (
                f"request {event.request} was saved with {event.tokens} tokens, expected the {reached} committed ones"
            )
            self._add("KV301", event.request, None, text)

    def _restored(self, event: Restored) -> None:
        self.judged += len(event.table)
        self._complete("restored", event)
        saved = self._saved.get((self._process, event.request))
        if event.tokens != saved:
            text = f"request {event.request} was restored with {event.tokens} tokens, expected the {saved} saved ones"
            self._add("KV301", event.request, None, text)

    def _complete(self, verb: str, event: Saved | Restored) -> None:
        for missing in (name for name in event.table if name not in event.buffers):
            text = (
                f"request {event.request} was {verb} without {missing}; the pool's table has {', '.join(event.table)}"
            )
            self._add("KV304", event.request, missing.split(".", 1)[1], text)

    def _submitted(self, event: Submitted) -> None:
        for footprint in (*event.reads, *event.writes):
            if footprint.space.rpartition(":")[2] in _PADDED and len(footprint.rows):
                self.judged += 1
                if int(footprint.rows.min()) < 1:
                    request = None if footprint.owners is None else int(footprint.owners[footprint.rows.argmin()])
                    unit = unit_text(footprint.space, int(footprint.rows.min()))
                    text = f"{event.name} names {unit}, which is padding"
                    self._add("KV301", request, footprint.buffers[0], text)

    def _add(self, code: str, request: int | None, buffer: str | None, message: str) -> None:
        rank = f"{self._process}: " if self._process else ""
        self.add(code, f"{rank}{message}", tier="device", buffer=buffer, request=request)
