"""The protocol oracle: a room's terminal status is final, all ranks agree on it, and Success follows the bytes.

Invariants:
- A room that has failed or succeeded on a rank keeps that status (KV602).
- A rank that reports Success has every leg of the room in its memory (KV203).
- The seals of a room cover the size of its prompt (KV304), and something (KV203).
- Ranks of one end decide the same in the same round (KV601).
- A request with a fault fails, and the reason of some rank names the fault (KV603). One without a fault does not fail
  (KV604), except by a jump of the clock, or a time limit with writes in progress; the reason names the missing leg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import Completed, Submitted
from kvcheck.core.cache.events import GaveUp, RoomChanged, SealsFitted
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.content import KnownWords, place_of
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS
from kvcheck.core.stress.workload.events import (
    Aborted,
    Decided,
    Failed,
    Faulted,
    Finished,
    HandoversKnown,
    LimitsNamed,
    Overdue,
    Retried,
    Unsealed,
)
from kvcheck.core.stress.workload.mismatch import Mismatch

_NAMES = {0: "Failed", 3: "Transferring", 4: "Success"}
FAILED, SUCCESS = 0, 4
LEGS = {"wire.kv": "kv", "wire.state": "state", "wire.aux": "aux", "wire.seal": "seal"}


class ProtocolOracle(KnownWords):
    name = "protocol"

    def __init__(self) -> None:
        super().__init__()
        self._final: dict[tuple[str, int, int], int] = {}
        self._landing: dict[int, tuple[str, int, str, str]] = {}
        self._faulted: dict[int, Faulted] = {}
        self._aborted: set[int] = set()
        self._overdue: dict[int, Overdue] = {}
        self._unsealed: dict[int, list[Unsealed]] = {}
        self._sizes: Mapping[int, int] = {}
        self._limits: tuple[str, ...] = ()
        self._reasons: dict[int, str] = {}
        self._unfinished: set[int] = set()

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            *self.known(),
            (RoomChanged, self._changed),
            (GaveUp, self._gave_up),
            (HandoversKnown, self._handovers_known),
            (LimitsNamed, self._limits_named),
            (SealsFitted, self._seals_fitted),
            (Submitted, self._submitted),
            (Completed, self._completed),
            (Decided, self._decided),
            (Faulted, self._fault),
            (Overdue, self._late),
            (Aborted, self._abort),
            (Unsealed, self._seal_never_fitted),
            (Failed, self._failed),
            (Retried, self._retried),
            (Finished, self._finished),
        )

    def _submitted(self, event: Submitted) -> None:
        leg = LEGS.get(event.name)
        if leg is not None and event.writes and event.request is not None:
            buffers = sorted({name for each in event.writes for name in each.buffers})
            rank = event.writes[0].space.partition(":")[0]
            self._landing[event.ordinal] = (rank, event.request, leg, ", ".join(buffers))

    def _completed(self, event: Completed) -> None:
        self._landing.pop(event.ordinal, None)

    def _changed(self, event: RoomChanged) -> None:
        self.judged += 1
        key = (event.rank, event.room, event.generation)
        if key in self._final:
            was, new = _NAMES[self._final[key]], _NAMES.get(event.new, str(event.new))
            went = f"became {was} a second time" if was == new else f"went from {was} to {new}"
            self._add(
                "KV602",
                event.request,
                f"{event.rank}: request {event.request} (room {event.room}) {went}; {was} is final",
            )
        elif event.new in (FAILED, SUCCESS):
            self._final[key] = event.new
        if event.new == FAILED:
            self._says(event.request, event.reason)
            if any(request == event.request for _, request, _, _ in self._landing.values()):
                self._unfinished.add(event.request)
        if event.new == SUCCESS:
            for rank, request, leg, buffers in self._landing.values():
                if (rank, request) == (event.rank, event.request):
                    self._add(
                        "KV203",
                        event.request,
                        f"{event.rank}: request {event.request} (room {event.room}) is Success while its {leg} "
                        f"({buffers}) has not landed",
                        buffer=buffers.split(", ")[0],
                    )

    def _gave_up(self, event: GaveUp) -> None:
        """Peers know only that another rank failed."""
        self._says(event.request, event.reason)

    def _says(self, request: int, reason: str) -> None:
        self._reasons[request] = f"{self._reasons.get(request, '')}; {reason}"

    def _handovers_known(self, event: HandoversKnown) -> None:
        self._sizes = event.sizes

    def _limits_named(self, event: LimitsNamed) -> None:
        self._limits = event.names

    def _seals_fitted(self, event: SealsFitted) -> None:
        wanted = self._sizes.get(event.request)
        if wanted is None:
            return
        self.judged += 1
        if event.size == 0:
            text = (
                f"{event.rank}: request {event.request} is taken as landed, and no byte of it was compared with a seal"
            )
            self._add("KV203", event.request, text)
        elif event.size != wanted:
            text = f"{event.rank}: the seals of request {event.request} cover {event.size:,} bytes; its prompt and its"
            self._add("KV304", event.request, f"{text} metadata row take {wanted:,} there")

    def _decided(self, event: Decided) -> None:
        self.judged += len(event.decisions)
        for rank, decision in enumerate(event.decisions[1:], 1):
            if decision != event.decisions[0]:
                self._add(
                    "KV601",
                    None,
                    f"{event.end} ranks 0 and {rank} decided differently in one round: "
                    f"{_told(event.decisions[0])} and {_told(decision)}",
                )

    def _fault(self, event: Faulted) -> None:
        self._faulted[event.request] = event

    def _late(self, event: Overdue) -> None:
        self._overdue |= dict.fromkeys(event.requests, event)

    def _abort(self, event: Aborted) -> None:
        self._aborted.add(event.request)

    def _retried(self, event: Retried) -> None:
        self._faulted.pop(event.request, None)
        self._overdue.pop(event.request, None)
        self._aborted.discard(event.request)
        self._unsealed.pop(event.request, None)
        self._reasons.pop(event.request, None)
        self._unfinished.discard(event.request)

    def _seal_never_fitted(self, event: Unsealed) -> None:
        self._unsealed.setdefault(event.request, []).append(event)

    def _failed(self, event: Failed) -> None:
        self.judged += 1
        fault = self._faulted.get(event.request)
        said = f"{event.reason}{self._reasons.get(event.request, '')}"
        if event.request in self._aborted or self._is_too_late(event.request, said):
            return
        if fault is None:
            self._failed_for_nothing(event)
        elif unsaid := [name for name in fault.names if name not in said]:
            text = f"request {event.request} failed because {fault.why}, and its reason does not say"
            self._add("KV603", event.request, f"{text} {' and '.join(map(repr, unsaid))}: {event.reason}")

    def _is_too_late(self, request: int, said: str) -> bool:
        late = self._overdue.get(request)
        names = late.names if late is not None else self._limits if request in self._unfinished else ()
        return any(name in said for name in names)

    def _failed_for_nothing(self, event: Failed) -> None:
        text = f"request {event.request} failed, and it had no fault: {event.reason}"
        told = sorted(self._unsealed.get(event.request, ()), key=lambda each: not each.rows)
        if not told:
            self._add("KV604", event.request, text)
            return
        text += f"; {told[0].rank} had the reports of all sources, and "
        if not told[0].rows:
            text += (
                f"all {told[0].words:,} words that it can compare are right: what {', '.join(told[0].sources)} sealed "
                "is not what it wrote, or the seal itself is missing"
            )
            self._add("KV604", event.request, text)
            return
        source, found = told[0].rows[0]
        more = f", and {len(told[0].rows) - 1} more places" if len(told[0].rows) > 1 else ""
        text += f"{place_of(found)}, which {source} had to write, holds {self.deviation(found).story}{more}"
        self._add("KV604", event.request, text, found=found)

    def _finished(self, event: Finished) -> None:
        self.judged += 1
        if (fault := self._faulted.get(event.request)) is not None:
            self._add(
                code_of_unnoticed(fault),
                event.request,
                f"request {event.request} finished though {fault.why}; it has to fail",
            )

    def _add(
        self,
        code: str,
        request: int | None,
        message: str,
        *,
        buffer: str | None = None,
        found: Mismatch | None = None,
    ) -> None:
        if len(self.findings) >= MAX_FINDINGS:
            return
        has_page = found is not None and found.space != "metadata"
        self.findings.append(
            Finding(
                code=code,
                oracle=self.name,
                tier="device",
                buffer=buffer if found is None else found.buffer,
                layer=found.layer if found is not None and has_page else None,
                page=found.page if found is not None and has_page else None,
                row=found.row if found is not None and has_page else None,
                request=request,
                message=message,
            )
        )


def code_of_unnoticed(fault: Faulted) -> str:
    return "KV301" if "length" in fault.why else "KV203"


def _told(decision: tuple[int, ...]) -> str:
    """decision: (count, *requests) of admitted, joined, retracted, resumed, finished and failed."""
    names, at, told = ("admitted", "joined", "retracted", "resumed", "finished", "failed"), 0, []
    for name in names:
        count = decision[at]
        if count:
            told.append(f"{name} {list(decision[at + 1 : at + 1 + count])}")
        at += 1 + count
    return ", ".join(told) or "nothing"
