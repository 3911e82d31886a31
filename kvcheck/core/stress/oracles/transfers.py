"""The transfers oracle: each end of a pair sends its messages when they are due.

    decode -> prefill   Want when it admits a request, Done when the request joins, Abort when it fails
    prefill -> decode   Status when its seal has been sent, Drained after an Abort

Unanswered messages are repeated, so a missing one only costs a wait, like a lost one.

Invariants:
- A message that is due in a round is sent by the end of that round. A lost one counts as sent.
- An answer is due ANSWERED_IN rounds of its end after the message has arrived.
- A source answers each rank that requests a failed request, judged if that was sent only once.
- After Drained a source does not report that attempt in a later round.
- A row of seals is cleared between two seals that are written to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcheck.core.cache.backend.backend import Completed, Submitted
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.workload.events import Broke, MessageEmitted, ProcessActs, Reported, Sent

ANSWERED_IN = 3
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A Want, or an Abort: of rank, to source, for an attempt."""

    rank: str
    source: str
    request: int
    generation: int


class TransfersOracle(Oracle):
    name = "transfers"

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[str, None] = {}  # of the decode end
        self._wants: dict[int, list[_Asked]] = {}  # of the attempt under way
        self._told: dict[tuple[str, str, str, int, int], None] = {}  # kind, sender, peer, request, generation
        self._said: set[tuple[str, str, str, int]] = set()  # kind, sender, peer, request; since the end's last report
        self._sealed: dict[tuple[str, str, int], None] = {}  # source, peer, request; in this round
        self._last: tuple[str, _Asked] | None = None
        self._arriving: dict[int, tuple[str, _Asked]] = {}  # ordinal of its operation -> a Want or an Abort on its way
        self._arrived: dict[_Asked, int] = {}  # Aborts: rounds since
        self._heard: dict[_Asked, int] = {}  # unanswered Wants: rounds since the request failed
        self._failed: set[int] = set()  # requests that the prefill end has reported as failed
        self._again: set[int] = set()  # requests that were sent more than once
        self._drained: dict[_Asked, bool] = {}  # attempts that a source writes no more; True from the next round on
        self._seals: dict[tuple[str, int], int] = {}  # space, row -> the request of the seal that it holds
        self._broke = False

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (ProcessActs, self._process_acts),
            (Sent, self._was_sent),
            (MessageEmitted, self._was_told),
            (Submitted, self._submitted),
            (Completed, self._completed),
            (Reported, self._reported),
            (Broke, self._broken),
        )

    def finish(self) -> None:
        if not self._broke:
            for asked in self._arrived:
                self._unanswered(asked)

    def _broken(self, event: Broke) -> None:
        self._broke = True

    def _process_acts(self, event: ProcessActs) -> None:
        if event.process.startswith(f"{DECODE}-"):
            self._ranks[event.process] = None

    def _was_sent(self, event: Sent) -> None:
        self._wants.pop(event.request, None)
        if event.attempt:
            self._again.add(event.request)

    def _was_told(self, event: MessageEmitted) -> None:
        self._told[event.kind, event.sender, event.peer, event.request, event.generation] = None
        self._said.add((event.kind, event.sender, event.peer, event.request))
        self._last = None
        answered = _Asked(event.peer, event.sender, event.request, event.generation)
        if event.kind == "Want":
            wanted = _Asked(event.sender, event.peer, event.request, event.generation)
            self._wants.setdefault(event.request, []).append(wanted)
            self._last = ("want", wanted) if event.copies else None
        elif event.kind == "Abort" and event.copies and event.sender.startswith(DECODE):
            is_drained = ("Drained", event.peer, event.sender, event.request, event.generation) in self._told
            asked = _Asked(event.sender, event.peer, event.request, event.generation)
            # It may end before it has read messages that it has answered.
            self._last = None if is_drained else ("abort", asked)
        elif event.kind == "Drained":
            self._arrived.pop(answered, None)
            self._heard.pop(answered, None)
            self._drained.setdefault(answered, False)
            self._drop(answered)
        elif event.kind == "Status":
            self._heard.pop(answered, None)
            self._judge_reported(answered)

    def _drop(self, asked: _Asked) -> None:
        for ordinal in [at for at, (_, each) in self._arriving.items() if each == asked]:
            del self._arriving[ordinal]

    def _submitted(self, event: Submitted) -> None:
        if self._last is not None and event.name == f"wire.message.{self._last[0]}":
            self._arriving[event.ordinal] = self._last
            self._last = None
        elif event.name == "wire.seal" and event.request is not None:
            source, _, peer = event.lane.partition(":")[0].partition(">")
            self._sealed[source, peer, event.request] = None
            for key in _rows(event):
                self._judge_cleared(key, event.request)
                self._seals[key] = event.request
        elif event.name == "seal.clear":
            for key in _rows(event):
                self._seals.pop(key, None)

    def _judge_cleared(self, key: tuple[str, int], request: int) -> None:
        self.judged += 1
        if (before := self._seals.get(key)) is not None:
            text = f"the seal of request {request} is written to {key[0]} row {key[1]}, which holds that of request"
            self._add(request, f"{text} {before}; expected it to be cleared in between", buffer="seal")

    def _completed(self, event: Completed) -> None:
        kind, asked = self._arriving.pop(event.ordinal, ("", None))
        if asked is not None:
            (self._heard if kind == "want" else self._arrived).setdefault(asked, 0)

    def _reported(self, event: Reported) -> None:
        if event.end == PREFILL:
            self._judge_seals()
            self._judge_answers()
            self._judge_refusals(event)
            self._drained = dict.fromkeys(self._drained, True)
            self._said = {each for each in self._said if not each[1].startswith(PREFILL)}
        elif event.end == DECODE:
            for request in event.admitted:
                self._judge_wanted(request)
            for request in event.joined:
                self._judge_over(request, "joined", ("Done",))
            for request in event.failed:
                self._judge_over(request, "failed", ("Abort", "Done"))
            self._said = {each for each in self._said if not each[1].startswith(DECODE)}

    def _judge_seals(self) -> None:
        for source, peer, request in self._sealed:
            self.judged += 1
            if ("Status", source, peer, request) not in self._said:
                text = f"{source} writes the seal of request {request} to {peer}, and does not report it in that round"
                self._add(request, text)
        self._sealed.clear()

    def _judge_answers(self) -> None:
        for asked in list(self._arrived):
            self.judged += 1
            self._arrived[asked] += 1
            if self._arrived[asked] > ANSWERED_IN:
                del self._arrived[asked]
                self._unanswered(asked)

    def _judge_refusals(self, event: Reported) -> None:
        self._failed.update(event.failed)
        for asked in list(self._heard):
            if asked.request not in self._failed or asked.request in self._again:
                continue
            self.judged += 1
            self._heard[asked] += 1
            if self._heard[asked] > ANSWERED_IN:
                del self._heard[asked]
                text = f"{asked.rank} has asked {asked.source} for request {asked.request}, which has failed there"
                self._add(asked.request, f"{text}, and was not told so")

    def _judge_reported(self, asked: _Asked) -> None:
        if self._drained.get(asked):
            text = f"{asked.source} has stopped writing request {asked.request} for {asked.rank}, and reports it later"
            self._add(asked.request, text)

    def _unanswered(self, asked: _Asked) -> None:
        text = f"{asked.source} was asked by {asked.rank} to stop writing request {asked.request}, and has not answered"
        self._add(asked.request, text)

    def _judge_wanted(self, request: int) -> None:
        asking = {each.rank for each in self._wants.get(request, ())}
        for rank in self._ranks:
            self.judged += 1
            if rank not in asking:
                self._add(request, f"{rank} has admitted request {request}, and has asked nobody for its prompt")

    def _judge_over(self, request: int, what: str, kinds: tuple[str, ...]) -> None:
        for want in self._wants.get(request, ()):
            self.judged += 1
            here = [(kind, want.rank, want.source, request, want.generation) for kind in kinds]
            there = ("Drained", want.source, want.rank, request, want.generation)
            if not any(each in self._told for each in (*here, there)):
                text = f"request {request} has {what}, and {want.rank} has not told {want.source}, which it had asked"
                self._add(request, f"{text}; expected {' or '.join(kinds)} by the end of that round")

    def _add(self, request: int, message: str, *, buffer: str | None = None) -> None:
        self.add("KV606", message, tier="device", buffer=buffer, request=request)


def _rows(event: Submitted) -> list[tuple[str, int]]:
    return [
        (each.space, int(row)) for each in event.writes if each.space.rpartition(":")[2] == "seals" for row in each.rows
    ]
