"""Side: one server that receives passes one at a time; each is timed by its answers and judged to the last token.

Invariants:
- Every answer of a pass is judged, never during a timed wave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.base.server_facts import TOKEN
from kvcheck.core.live.clients.client import Client, Trouble
from kvcheck.core.live.counting import observe, read_counters
from kvcheck.core.live.doubts import doubts
from kvcheck.core.live.exchange import Counters, Exchange, Served
from kvcheck.core.live.health import judge_health
from kvcheck.core.live.judge import judge_round
from kvcheck.core.live.judge.steps import SentPrompts
from kvcheck.core.live.judge.verdicts import ServerSetting, finding
from kvcheck.core.live.prices.load import ServingLoad, draw
from kvcheck.core.live.prices.rounds import Times, times_of
from kvcheck.core.live.questions import Questions
from kvcheck.core.live.runner import BROKEN_OFF, SETTLE_S, LiveRunner, unjudged_reasons
from kvcheck.core.live.scenarios.scenario import Round
from kvcheck.core.live.sending import Delivery, RequestSender
from kvcheck.core.model.alphabet import Alphabet

Told = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """One pass. times: of its last wave. reasons: why it is no pass, without a finding. busy: share of one core that
    this process took while it waited. is_over: the server no longer answers."""

    evidence: Evidence
    times: Times | None = None
    wrong_tokens: int = 0
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    busy: float = 0.0
    is_over: bool = False
    duration_s: float = 0.0


@dataclass(slots=True)
class _Pass:
    began_s: float
    began_cpu_s: float
    round: Round | None = None
    sender: RequestSender | None = None
    notes: list[str] = field(default_factory=list)


class Side:
    def __init__(
        self, client: Client, served: Served, alphabet: Alphabet, *, longest: int, timeout_s: float, admin: bool
    ) -> None:
        self.client, self.served = client, served
        self._alphabet, self.longest = alphabet, longest
        self._timeout_s, self._admin = timeout_s, admin
        self._sent = SentPrompts()
        self._next = 0
        self._before: Counters | None = None
        self._now = _Pass(0.0, 0.0)

    def begin(self, *, names: int) -> None:
        LiveRunner(self.client, self._alphabet, timeout_s=self._timeout_s).begin(self.served, names=names)
        self._before = read_counters(self.client)[0]  # without it, reports of answers are counted all the same

    def send(self, load: ServingLoad, number: int, *, names: int, until: float | None, told: Told) -> PassResult:
        """Run one pass of round `number`. After KeyboardInterrupt, `taken` judges the answers so far."""
        self._now = _Pass(time.monotonic(), time.process_time())
        if self._admin:
            try:
                self.client.flush()
            except Trouble as trouble:
                self._now.notes.append(f"the prefix cache was not emptied before a pass: {trouble}")
        questions = Questions(self._alphabet, longest=self.longest, names=names, first=self._next)
        round_ = draw(load, questions, number)
        self._next += len(round_.orders)
        self._now.round = round_
        self._now.sender = RequestSender(self.client, gap_s=0.0, may_force=False, until=until, is_timed=True)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        sent = self._now.sender.send(round_, told)
        busy = (time.process_time() - began_cpu_s) / max(time.monotonic() - began_s, 1e-9)
        return self._judged(sent, round_, busy)

    def taken(self) -> PassResult:
        now = self._now
        sent = Delivery() if now.sender is None else now.sender.interrupted
        sent.is_whole = False
        return self._judged(sent, now.round or Round(()), 0.0)

    def moved(self, sleep: Callable[[float], None] = time.sleep) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """Counts of all passes by the server's counters, and their sources."""
        if self._before is None:
            return {}, {}
        sleep(SETTLE_S)
        after = read_counters(self.client)[0]
        seen = observe(self.client, (), judged=(), before=self._before, after=after, page=1)
        return seen.counts, seen.sources

    def _judged(self, sent: Delivery, round_: Round, busy: float) -> PassResult:
        exchanges = [*sent.exchanges]
        setting = ServerSetting(
            alphabet=self._alphabet,
            page=self.served.page,
            began_empty=True,
            transfers=self.served.mode in ("decode", "pair"),
            longest=self.longest,
        )
        judged = judge_round(setting, exchanges, self._sent)
        self._sent = self._sent.plus(self._alphabet, exchanges)
        dead, unclear = judge_health(self.client, exchanges, timeout_s=self._timeout_s)
        answered = [each for each in exchanges if each.answer.tokens]
        seen = observe(self.client, exchanges, judged=answered, before=None, after=None, page=setting.page_tokens)
        seen.add(TOKEN, judged.tokens, "each request")
        # A server that died explains the answers that it broke off.
        wrong = [each for each in judged.wrong if not (dead and each.code == BROKEN_OFF)]
        timed = {order.question.number for order in (round_.waves[-1].orders if round_.waves else ())}
        last = [each for each in exchanges if each.sending.question.number in timed]
        return PassResult(
            evidence=seen.evidence(events=len(exchanges), requests=judged.requests),
            times=times_of(last, len(timed)) if sent.is_whole else None,
            wrong_tokens=wrong_tokens(exchanges),
            findings=(*(finding(each) for each in wrong), *dead),
            reasons=(*unjudged_reasons(judged, exchanges), *unclear, *doubts(exchanges)),
            notes=(*self._now.notes, *judged.notes),
            busy=busy,
            is_over=bool(dead),
            duration_s=time.monotonic() - self._now.began_s,
        )


def wrong_tokens(exchanges: Sequence[Exchange]) -> int:
    return sum(
        said != right
        for each in exchanges
        for said, right in zip(each.answer.tokens, each.sending.question.expected, strict=False)
    )
