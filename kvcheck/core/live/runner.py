"""LiveRunner: sends rounds to one server with a known-answer model, and judges the answers.

Invariants:
- A round with unjudged requests and no finding has reasons and is no pass.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.clients.client import Client
from kvcheck.core.live.counting import observe, read_counters
from kvcheck.core.live.doubts import WHOLE, AnswerTotals, CounterCheck, compare, doubts, is_one_server, new_prompts
from kvcheck.core.live.exchange import Answer, Counters, End, Exchange, Question, Sending, Served
from kvcheck.core.live.health import judge_health
from kvcheck.core.live.judge import judge_round
from kvcheck.core.live.judge.round import by_chance
from kvcheck.core.live.judge.steps import SentPrompts
from kvcheck.core.live.judge.verdicts import Counts, Judgement, ServerSetting, Wrong, finding
from kvcheck.core.live.line import LivePlan, OwnPlan
from kvcheck.core.live.questions import Questions, Subject
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.live.scenarios.scenario import Sizes
from kvcheck.core.live.sending import RequestSender, new_rid, typical_s
from kvcheck.core.model.alphabet import Alphabet

COLD_PLACES, COLD_TOKENS, COLD_TRIES = 24, 8, 3
GAP = 0.4
"""Time between two retractions on demand, as a part of a typical answer's."""
SETTLE_S = 1.5
"""vLLM 0.32.0 updates its counters up to a second after the answers of a step."""
CACHED, BROKEN_OFF, AFTER_ABORT = "KV805", "KV807", "KV804"
_UNAIMED = (
    "no counters of its own show that one server answers at this address, and a balancer may have sent the abort to "
    "another one; ask the engine itself, with its metrics and without --metrics"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """sources, moved: as in Observed. reasons: why it is no pass, without a finding. notes: assumptions and troubles.
    is_over: the server no longer answers. elsewhere: why some answers are not the engine's. refuted: why cached counts
    are no evidence. facts: further fields for the record, of all rounds so far."""

    evidence: Evidence
    sources: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_over: bool = False
    elsewhere: str | None = None
    refuted: str | None = None
    duration_s: float = 0.0
    facts: Mapping[str, object] = field(default_factory=dict)


class LiveRunner:
    """Rounds against one server, from one thread.

    is_replay: the server may have seen the requests before, so cached counts are compared with the prompt alone.
    is_balanced: several servers may answer, since counters have other addresses.
    """

    def __init__(
        self,
        client: Client,
        alphabet: Alphabet,
        *,
        timeout_s: float,
        is_replay: bool = False,
        is_balanced: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._alphabet, self._timeout_s, self._sleep = client, alphabet, timeout_s, sleep
        self._is_replay, self._is_balanced = is_replay, is_balanced
        self._sent = SentPrompts()
        self._next = 0
        self._typical_s = 0.0
        self._last: Counters | None = None
        self._answered: AnswerTotals | None = None
        self._counts = Counts()
        self._cold: list[Exchange] = []
        self._began = 0.0
        self._before: Counters | None = None
        self._sender: RequestSender | None = None
        self._is_interrupted = False

    def begin(self, served: Served, *, names: int) -> None:
        """Send cold walks until one has a right first token. They are judged with the first round. Raises UsageError
        if none has."""
        self._served, self._draws = served, Rng(names)
        self._cold_questions = self._questions(names, served.longest or self._alphabet.parameters.length)
        if not self._is_right_cold(self._walk):
            last = self._cold[-1]
            raise _other_model("requests", last.sending.question, last.answer)
        self._typical_s = typical_s([self._cold[-1].answer])

    def check_positions(self) -> None:
        """Send cold position tests, where a model with another distance or window differs. Raises UsageError if none
        has a right first token and a walk after them does: an engine with a fault errs in both."""
        questions = self._cold_questions
        if questions.has_marks and not self._is_right_cold(lambda: questions.marks(self._draws)):
            last = self._cold[-1]
            if self._is_right_cold(self._walk, tries=1):
                raise _other_model("position tests", last.sending.question, last.answer)

    def _walk(self) -> Subject:
        return self._cold_questions.walk(self._draws, COLD_PLACES)

    def _is_right_cold(self, draw: Callable[[], Subject], tries: int = COLD_TRIES) -> bool:
        for _ in range(tries):
            question = self._cold_questions.put(self._draws, draw(), COLD_TOKENS)
            sending = Sending(question=question, rid=new_rid())
            answer = self._client.ask(sending)
            check_cold(question, answer)
            _check_half(self._served, question, answer)
            self._cold.append(Exchange(sending, answer))
            self._next += 1
            if answer.tokens[0] == question.expected[0]:
                return True
        return False

    def run(
        self,
        plan: LivePlan,
        *,
        is_last: bool = True,
        until: float | None = None,
        told: Callable[[int], None] = lambda answered: None,
    ) -> RoundResult:
        """After KeyboardInterrupt, `taken` judges the answers so far. is_last: late counters are waited for."""
        self._began, self._before, self._sender = time.monotonic(), None, None
        scenario = LIVE_SCENARIOS.load(plan.scenario)
        sizes = Sizes(requests=plan.requests, concurrency=plan.concurrency, longest=plan.longest, pool=plan.pool)
        questions = self._questions(plan.names, plan.longest)
        round_ = scenario.draw(questions, Rng(plan.seed * 1_000_003 + plan.round), sizes)
        self._next += len(round_.orders)
        self._before, trouble = (self._last, []) if self._last is not None else read_counters(self._client)
        if self._last is None or self._answered is None:
            self._answered = None if self._before is None else AnswerTotals(before=self._before)
        self._sender = RequestSender(self._client, gap_s=self._typical_s * GAP, may_force=bool(plan.admin), until=until)
        sent = self._sender.send(round_, told)
        if is_last and self._before is not None:
            self._sleep(SETTLE_S)
        result = self._judge(
            plan, sent.exchanges, is_whole=sent.is_whole, is_last=is_last, troubles=[*trouble, *sent.troubles]
        )
        if is_last:
            self._last = None
        return result

    def taken(self, plan: LivePlan) -> RoundResult:
        self._is_interrupted = True
        answered = [] if self._sender is None else [*self._sender.interrupted.exchanges]
        return self._judge(plan, answered, is_whole=False, is_last=True, troubles=[])

    def _judge(
        self, plan: LivePlan, exchanges: Sequence[Exchange], *, is_whole: bool, is_last: bool, troubles: Sequence[str]
    ) -> RoundResult:
        after, trouble = read_counters(self._client) if is_whole else (None, [])
        is_empty = not exchanges
        if self._answered is not None:
            self._answered.add(exchanges)
        exchanges, self._cold = [*self._cold, *exchanges], []
        self._last = after
        setting = ServerSetting(
            alphabet=self._alphabet,
            page=self._served.page,
            retracts=_may_have_retracted(self._client, self._before, after),
            began_empty=not self._is_replay,
            transfers=self._served.mode in ("decode", "pair"),
            longest=plan.longest,
        )
        judged = judge_round(setting, exchanges, self._sent)
        if not setting.retracts and any(each.code == CACHED for each in judged.wrong):
            # A counter of retractions that comes late would have explained it.
            self._sleep(SETTLE_S)
            after, trouble = read_counters(self._client)
            setting = dataclasses.replace(setting, retracts=_may_have_retracted(self._client, self._before, after))
            judged = judge_round(setting, exchanges, self._sent)
        self._counts = self._counts.plus(judged.counts)
        beside = self._compare(plan, exchanges, after) if is_last or judged.wrong else CounterCheck()
        if beside.elsewhere is not None:
            judged = judge_round(dataclasses.replace(setting, elsewhere=beside.elsewhere), exchanges, self._sent)
        self._sent = self._sent.plus(self._alphabet, exchanges)
        self._typical_s = typical_s([each.answer for each in exchanges if each.answer.end is End.DONE])
        asked = () if self._is_interrupted else exchanges  # a health call waits for a server that hangs
        dead, unclear = judge_health(self._client, asked, timeout_s=self._timeout_s)
        compared = [each for each in exchanges if each.answer.tokens]
        seen = observe(
            self._client,
            exchanges,
            judged=compared,
            before=self._before,
            after=after,
            page=setting.page_tokens,
            by_chance=max(by_chance(setting, each.sending.question.ids) for each in exchanges),
        )
        seen.add("token", judged.tokens, "each request")
        # A server that died explains the answers that it broke off.
        wrong = [each for each in judged.wrong if not (dead and each.code == BROKEN_OFF)]
        if beside.contradicted or (self._counts.refuted and self._counts.is_false):
            wrong = [each for each in wrong if each.code != CACHED]
        wrong, unaimed = self._aimed(plan, exchanges, after, wrong)
        findings = (*(finding(each) for each in wrong), *dead)
        reasons = [*unjudged_reasons(judged, exchanges), *unclear, *doubts(exchanges), *unaimed]
        if is_empty:
            reasons.append("no request of a round was sent: the run was interrupted or its time was up")
        cut = (
            () if is_whole else (f"{plan.cell}: round {plan.round + 1} was cut short, and is judged as far as it came",)
        )
        return RoundResult(
            evidence=seen.evidence(events=len(exchanges), requests=judged.requests),
            sources=seen.sources,
            moved=seen.moved,
            findings=tuple(placed(each, plan) for each in findings),
            reasons=tuple(reasons),
            notes=(*cut, *judged.notes, *_told_once(troubles), *trouble, *beside.notes),
            elsewhere=beside.elsewhere,
            refuted=self._counts.refuted or beside.contradicted,
            is_over=bool(dead),
            duration_s=time.monotonic() - self._began,
        )

    def _compare(self, plan: LivePlan, exchanges: Sequence[Exchange], after: Counters | None) -> CounterCheck:
        if after is None or self._answered is None or not {each.answer.end for each in exchanges} <= WHOLE:
            return CounterCheck()
        return compare(
            self._client, self._answered, after, ask_new=lambda: self._ask_new(plan, exchanges), sleep=self._sleep
        )

    def _aimed(
        self, plan: LivePlan, exchanges: Sequence[Exchange], after: Counters | None, wrong: list[Wrong]
    ) -> tuple[list[Wrong], list[str]]:
        """Drop wrong answers after aborts that may have reached another server, with the reason."""
        aborted = [each for each in wrong if each.code == AFTER_ABORT]
        if not aborted or (
            not self._is_balanced
            and is_one_server(self._client, after, ask_new=lambda: self._ask_new(plan, exchanges), sleep=self._sleep)
        ):
            return wrong, []
        return [each for each in wrong if each.code != AFTER_ABORT], [f"{aborted[0].message}; {_UNAIMED}"]

    def _ask_new(self, plan: LivePlan, exchanges: Sequence[Exchange]) -> Sequence[Exchange]:
        questions = self._questions(secrets.randbelow(1 << 32), plan.longest)
        like = [each.sending.question for each in exchanges]
        round_ = new_prompts(questions, Rng(self._next), like, plan.concurrency)
        self._next += len(round_.orders)
        sent = RequestSender(self._client, gap_s=0.0, may_force=False).send(round_).exchanges
        self._sent = self._sent.plus(self._alphabet, sent)
        return sent

    def _questions(self, names: int, longest: int) -> Questions:
        return Questions(self._alphabet, longest=longest, names=names, first=self._next)


def check_cold(question: Question, answer: Answer) -> None:
    """Raise UsageError if a cold request was not answered. A server whose tokens are wrong is judged."""
    expected = "a server that takes token ids and serves the folder that --known-answers names"
    check_answered(question, answer, expected, is_answered=answer.end is End.DONE)
    if not answer.tokens:
        raise _other_model("requests", question, answer)


def check_answered(question: Question, answer: Answer, expected: str, *, is_answered: bool) -> None:
    """Raise UsageError for a cold request without an answer, or read as another prompt. expected: of the server."""
    if answer.end in (End.UNREACHED, End.SILENT):
        raise UsageError(f"the server did not answer one cold request: {answer.reason or answer.end.value}; is it up?")
    if not is_answered:
        raise UsageError(
            f"one cold request of {len(question.ids)} tokens was not answered ({answer.end.value}): {answer.reason}; "
            f"expected {expected}"
        )
    if answer.prompt_tokens not in (None, len(question.ids)):
        raise UsageError(
            f"the server counted {answer.prompt_tokens} tokens in a prompt of {len(question.ids)}: it adds or drops "
            "tokens; ask it by token ids, without a template and without special tokens"
        )


def _other_model(kind: str, question: Question, answer: Answer) -> UsageError:
    got, expected = list(answer.tokens[:COLD_TOKENS]), list(question.expected)
    return UsageError(
        f"the server does not serve this model: {COLD_TRIES} cold {kind} were answered wrongly from the first "
        f"token on, the last one {got}, expected {expected}; start it with the folder that --known-answers names"
    )


def _check_half(served: Served, question: Question, answer: Answer) -> None:
    """A lone prefill server of a pair answers one token by itself."""
    if served.mode == "prefill" and len(answer.tokens) < len(question.expected):
        raise UsageError(
            f"this is the prefill server of a pair, and it answered {len(answer.tokens)} of {len(question.expected)} "
            "tokens; add --decode URL with its decode server"
        )


def unjudged_reasons(judged: Judgement, exchanges: Iterable[Exchange]) -> list[str]:
    """A line for each kind of end, with the first one's reason. This run's own aborts were judged."""
    ours = {each.sending.rid for each in exchanges if each.sending.abort is not None}
    kinds: dict[str, list[str]] = {}
    for each in judged.unjudged:
        if not (each.rid in ours and each.end == End.ABORTED.value):
            kinds.setdefault(each.end, []).append(each.reason)
    return [
        f"not judged: {counted(len(texts), 'request')} ({end}), the first: {texts[0]}" for end, texts in kinds.items()
    ]


def _may_have_retracted(client: Client, before: Counters | None, after: Counters | None) -> bool:
    """True unless an existing counter of retractions stood still."""
    names = client.counted.get("retract", ())
    if before is None or after is None:
        return True
    known = [name for name in names if name in after]
    return not known or any(after[name] != before.get(name, 0.0) for name in known)


def placed(found: Finding, plan: LivePlan | OwnPlan) -> Finding:
    line = plan.line()
    scenario, _, shape = plan.cell.rpartition("/")
    return dataclasses.replace(found, scenario=scenario, shape=shape, schedule=line, replay=f"kvcheck replay '{line}'")


def _told_once(texts: Sequence[str]) -> list[str]:
    return [f"{text} ({count} times)" if count > 1 else text for text, count in Counter(texts).items()]
