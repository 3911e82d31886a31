"""OwnRunner: sends rounds to one server with the user's own model, and judges the answers.

Invariants:
- A round with requests that were not compared and no finding has reasons and is no pass.
- References and controls are sent before the scenario; counters are read around the scenario alone.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Finding
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.clients.client import Client
from kvcheck.core.live.counting import observe, read_counters
from kvcheck.core.live.doubts import WHOLE, CounterCheck, doubts, new_prompts
from kvcheck.core.live.exchange import Answer, Counters, End, Exchange, Question, Sending, Served
from kvcheck.core.live.health import judge_health
from kvcheck.core.live.judge.verdicts import ASSUMED_PAGE
from kvcheck.core.live.line import OwnPlan
from kvcheck.core.live.own.arms import (
    ArmResult,
    Cold,
    Matched,
    Shape,
    Tallied,
    Treated,
    alone,
    hits_of,
    page_groups,
    together,
)
from kvcheck.core.live.own.prompts import LEAST_LENGTH, Needles, OwnQuestions, ids_of, recites, shortest_run
from kvcheck.core.live.own.statistic import (
    MORE_CONTROLS,
    Level,
    Measured,
    ReportedDeviation,
    judge,
    needs_more,
    settled,
)
from kvcheck.core.live.own.verdict import (
    crosstalk_finding,
    diverged_finding,
    ends,
    group_note,
    noise_notes,
    recital_note,
    unsteady_reason,
    warm_references,
)
from kvcheck.core.live.runner import GAP, SETTLE_S, RoundResult, check_answered, placed
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.live.scenarios.scenario import Round, Sizes
from kvcheck.core.live.sending import Recipient, RequestSender, new_rid, typical_s

COLD_TOKENS = 8
USUAL_LENGTH = 2048
"""Tokens of a request and its answer if the server reports no limit."""
TOKENS_A_REQUEST, ANSWERS_A_REQUEST = 600, 400
"""Assumed tokens sent and answered for a request over all arms, for the length of needles."""
COLD, AGAIN, CONTROL, TREATED, MATCHED = "cold", "again", "control", "treated", "matched"
_ARMS = (COLD, AGAIN, CONTROL, TREATED, MATCHED)
BROKEN_OFF = "KV807"


@dataclass(slots=True, kw_only=True)
class _Round:
    """A round in progress. unlike: why its controls have other shapes than its treated requests."""

    plan: OwnPlan
    source: OwnQuestions
    until: float | None
    told: Callable[[int], None] = lambda answered: None
    round: Round = field(default_factory=lambda: Round(()))
    questions: list[Question] = field(default_factory=list)
    arms: dict[str, ArmResult] = field(default_factory=lambda: {name: ArmResult(name=name) for name in _ARMS})
    references: dict[int, Answer] = field(default_factory=dict)
    treated: Treated | None = None
    sender: RequestSender | None = None
    sending: str = COLD
    before: Counters | None = None
    after: Counters | None = None
    troubles: list[str] = field(default_factory=list)
    unlike: str | None = None
    is_whole: bool = True
    began: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() >= self.until

    def take(self, exchanges: Sequence[Exchange]) -> None:
        if self.sending == COLD:
            for each in exchanges:
                if each.answer.end is End.DONE and each.answer.logprobs is not None:
                    self.references.setdefault(each.sending.question.number, each.answer)
        self.arms[self.sending].add(exchanges, {} if self.sending == COLD else self.references)


class OwnRunner:
    """Rounds against one server, from one thread. rounds: of the whole run, which divide its significance levels."""

    def __init__(
        self,
        client: Client,
        *,
        vocabulary: int,
        rounds: int,
        timeout_s: float,
        requests: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._timeout_s, self._sleep = client, timeout_s, sleep
        self._asked = Tallied(client)
        self._ids, self._level = ids_of(vocabulary), Level(rounds=rounds)
        sent = max(1, rounds * requests)
        self._needles = Needles(
            length=shortest_run(
                self._ids.drawn, prompt_tokens=sent * TOKENS_A_REQUEST, answer_tokens=sent * ANSWERS_A_REQUEST
            ),
            drawn=self._ids.drawn,
        )
        self._next = 0
        self._noise: dict[str, list[float]] = {name: [] for name in (AGAIN, CONTROL, MATCHED)}
        self._groups_of: dict[str, dict[int, tuple[list[float], list[float]]]] = {}
        """Scenario -> round -> deviations of groups of treated requests, and of their matched ones."""
        self._unlike: dict[str, str] = {}
        self._arms: dict[str, dict[str, ArmResult]] = {}
        self._recited: dict[str, list[bool]] = {}
        self._sent_more: dict[str, int] = {}
        self._now: _Round | None = None

    def begin(self, served: Served, *, names: int) -> None:
        """Send one cold request. Raises UsageError if the server cannot be judged."""
        self.served = served
        if not self._client.has_salts:
            raise UsageError(
                f"--own-model needs cold answers as a reference, and kvcheck knows no way to ask {served.engine} for "
                "one; name the server's engine if it is sglang, vllm or llamacpp (--api)"
            )
        rng, source = Rng(names), self._source(names, self.longest)
        question = source.put(rng, source.walk(rng, LEAST_LENGTH // 2), COLD_TOKENS)
        answer = Cold(self._client).ask(Sending(question=question, rid=new_rid()))
        check_cold(question, answer)
        self._next += 1

    @property
    def longest(self) -> int:
        return self.served.longest or USUAL_LENGTH

    def run(
        self,
        plan: OwnPlan,
        *,
        is_last: bool = True,
        until: float | None = None,
        told: Callable[[int], None] = lambda answered: None,
    ) -> RoundResult:
        """Send all arms of one round and judge them. After KeyboardInterrupt, `taken` judges the answers so far."""
        now = self._now = _Round(plan=plan, source=self._source(plan.names, plan.longest), until=until, told=told)
        self._asked.begin()
        self._draw(now)
        width = self._width(now)
        now.unlike = _fewer(width, _most(now))
        if self._send(now, COLD, alone([each for each in now.questions if each.number not in now.references])):
            self._send(now, AGAIN, alone(now.questions))
            self._send(now, CONTROL, together(now.questions, concurrency=width))
        if now.is_whole:
            self._treat(now, is_last=is_last)
        if now.is_whole and any(not each.is_none for each in now.arms[TREATED].values.values()):
            shapes = self._shapes(now)
            asked = Matched(self._asked, shapes, now.references)
            twice = [each for each in self._comparable(now) for _ in shapes[each.number]]
            self._send(now, MATCHED, together(twice, concurrency=width), asked)
        return self._judge(now, is_last=is_last)

    def taken(self, plan: OwnPlan) -> RoundResult:
        now = self._now or _Round(plan=plan, source=self._source(plan.names, plan.longest), until=None)
        if now.sender is not None:
            now.take(now.sender.interrupted.exchanges)
        now.is_whole = False
        return self._judge(now, is_interrupted=True)

    def _source(self, names: int, longest: int, answers: Mapping[int, tuple[int, ...]] | None = None) -> OwnQuestions:
        return OwnQuestions(self._ids, longest=longest, names=names, first=self._next, answers=answers)

    def _draw(self, now: _Round) -> None:
        """Draw the requests; requests that they continue are sent cold first."""
        plan = now.plan
        scenario = LIVE_SCENARIOS.load(plan.situation)
        sizes = Sizes(requests=plan.requests, concurrency=plan.concurrency, longest=plan.longest, pool=plan.pool)
        seed = plan.seed * 1_000_003 + plan.round
        now.round = scenario.draw(now.source, Rng(seed), sizes)
        if now.source.wanted:
            self._send(now, COLD, alone([*now.source.wanted.values()]))
            answers = {number: answer.tokens for number, answer in now.references.items()}
            now.source = self._source(plan.names, plan.longest, answers)
            now.round = scenario.draw(now.source, Rng(seed), sizes)
        now.questions = [*{order.question.number: order.question for order in now.round.orders}.values()]
        self._next = max([self._next, *(each.number + 1 for each in now.questions)])
        for question in now.questions:
            self._needles.add(question, now.source.drawn(question.number))

    def _width(self, now: _Round) -> int:
        """Concurrency of controls: the scenario's, limited so that all fit and none is retracted."""
        largest = max(len(each.ids) + len(each.expected) for each in now.questions)
        most, page = _most(now), self.served.page or ASSUMED_PAGE
        fit = most if now.plan.pool is None else now.plan.pool // (largest + 2 * page)
        return max(1, min(most, fit))

    def _send(self, now: _Round, name: str, round_: Round, asked: Recipient | None = None) -> bool:
        if asked is None:
            asked = Cold(self._asked)
        now.sending = name
        gap = typical_s([each.answer for each in now.arms[COLD].exchanges]) * GAP
        now.sender = RequestSender(
            asked, gap_s=gap, may_force=name == TREATED and bool(now.plan.admin), until=now.until
        )
        before = sum(len(arm.exchanges) for arm in now.arms.values())
        sent = now.sender.send(round_, lambda answered: now.told(before + answered))
        now.sender = None
        now.take(sent.exchanges)
        now.troubles += sent.troubles
        now.is_whole = now.is_whole and sent.is_whole
        return now.is_whole

    def _treat(self, now: _Round, *, is_last: bool) -> None:
        noise = [*now.arms[AGAIN].largest, *now.arms[CONTROL].largest, *self._controls()]
        now.before, trouble = read_counters(self._client)
        now.treated = Treated(self._asked, now.references, noise, turns=now.source.turns, is_over=lambda: now.is_over)
        self._send(now, TREATED, now.round, now.treated)
        if now.before is not None and is_last:
            self._sleep(SETTLE_S)
        now.after, more = read_counters(self._client)
        now.troubles += [*trouble, *more]

    def _shapes(self, now: _Round) -> dict[int, list[Shape]]:
        exchanges = now.arms[TREATED].exchanges
        hits = hits_of(exchanges, page=self.served.page or ASSUMED_PAGE)
        moved = self._retractions(now)
        shapes: dict[int, list[Shape]] = {}
        for each, cached in zip(exchanges, hits, strict=True):
            number, answer = each.sending.question.number, each.answer
            shape = Shape(cached=cached, turns=now.source.turns(number))
            cut = dataclasses.replace(shape, resumed=True)
            if answer.retractions is None:
                shapes.setdefault(number, []).extend([shape, cut] if moved else [shape])
            else:
                shapes.setdefault(number, []).append(cut if answer.retractions else shape)
        if now.unlike is None and any(each.answer.cached is None for each in exchanges):
            now.unlike = "the engine does not say what a request hit, so controls may have hit something else"
        return shapes

    def _retractions(self, now: _Round) -> bool:
        if now.before is None or now.after is None:
            return False
        names = self._client.counted.get("retract", ())
        return any(now.after.get(name, 0.0) > now.before.get(name, 0.0) for name in names)

    def _comparable(self, now: _Round) -> list[Question]:
        return [each for each in now.questions if each.number in now.arms[TREATED].values]

    def _controls(self) -> list[float]:
        return [value for values in self._noise.values() for value in values]

    def _judge(self, now: _Round, *, is_last: bool = True, is_interrupted: bool = False) -> RoundResult:
        plan = now.plan
        told = self._told(now)
        every = [each for arm in now.arms.values() for each in arm.exchanges]
        asked_about = () if is_interrupted else every  # a health call waits for a server that hangs
        dead, unclear = judge_health(self._client, asked_about, timeout_s=self._timeout_s)
        treated = now.arms[TREATED]
        broken, unjudged = ends(treated.exchanges, treated.values, now.references)
        findings = self._crosstalk(now)
        named = {each.request for each in findings}
        findings += [self._finding(now, each) for each in told if each.is_finding and each.request not in named]
        findings += [each for each in broken if not (dead and each.code == BROKEN_OFF)]
        reasons = [*unjudged, *unclear, *doubts(treated.exchanges), *self._lacking(now)]
        unlike = self._unlike.get(plan.situation)
        reasons += [
            unsteady_reason(each, treated.values[each.request], unlike) for each in told[:2] if not each.is_finding
        ]
        self._remember(now)
        beside = CounterCheck()
        if now.is_whole and (is_last or findings) and {each.answer.end for each in every} <= WHOLE:
            beside = self._asked.compare(lambda: self._ask_new(now), self._sleep)
        seen = observe(
            self._client,
            treated.exchanges,
            judged=[each for each in treated.exchanges if each.sending.question.number in treated.values],
            before=now.before,
            after=now.after,
            page=self.served.page or ASSUMED_PAGE,
        )
        seen.add("token", sum(value.tokens for value in treated.values.values()), "each request")
        if not now.is_whole:
            reasons.append(f"round {plan.round + 1} was cut short: the run was interrupted, or its time was up")
        return RoundResult(
            evidence=seen.evidence(events=len(every), requests=len(treated.values)),
            sources=seen.sources,
            moved=seen.moved,
            findings=tuple(placed(each, plan) for each in (*findings, *dead)),
            reasons=tuple(reasons),
            notes=(*dict.fromkeys(now.troubles), *beside.notes),
            elsewhere=beside.elsewhere,
            refuted=beside.contradicted,
            is_over=bool(dead),
            duration_s=time.monotonic() - now.began,
            facts=self._facts(plan.situation),
        )

    def _ask_new(self, now: _Round) -> Sequence[Exchange]:
        source = self._source(secrets.randbelow(1 << 32), now.plan.longest)
        round_ = new_prompts(source, Rng(self._next), now.questions, now.plan.concurrency)
        self._next += len(round_.orders)
        return RequestSender(Cold(self._client), gap_s=0.0, may_force=False).send(round_).exchanges

    def _told(self, now: _Round) -> list[ReportedDeviation]:
        """Judge the deviations; send more controls if a finding rests on one request."""
        rounds = self._groups_of.setdefault(now.plan.situation, {})
        earlier = [both for number, both in rounds.items() if number != now.plan.round]  # an interrupt judges twice
        matched, groups = now.arms[MATCHED].by_request, self._groups(now)
        if now.unlike is not None and matched:
            self._unlike.setdefault(now.plan.situation, now.unlike)

        def measured() -> Measured:
            return Measured(
                treated={number: value.largest for number, value in now.arms[TREATED].values.items()},
                again=[*self._noise[AGAIN], *now.arms[AGAIN].largest],
                control=[*self._noise[CONTROL], *now.arms[CONTROL].largest],
                matched=[*self._noise[MATCHED], *matched.values()],
                now_matched=matched,
                groups=groups,
                earlier=[value for of_treated, _ in earlier for value in of_treated],
                earlier_matched=[value for _, of_matched in earlier for value in of_matched],
                repeats={} if now.treated is None else dict(now.treated.repeats),
                is_alike=now.plan.situation not in self._unlike,
            )

        told = judge(measured(), self._level)
        sent = 0
        while needs_more(told, measured()) and now.is_whole and sent < MORE_CONTROLS and self._more_controls(now):
            sent += 1
            told = judge(measured(), self._level)
        told = settled(told, measured())
        self._sent_more[now.plan.situation] = max(sent, self._sent_more.get(now.plan.situation, 0))
        rounds[now.plan.round] = measured().grouped()
        return told

    def _groups(self, now: _Round) -> dict[int, int]:
        exchanges, page = now.arms[TREATED].exchanges, self.served.page or ASSUMED_PAGE
        return page_groups(exchanges, hits_of(exchanges, page=page), page=page)

    def _more_controls(self, now: _Round) -> bool:
        more = ArmResult(name=CONTROL)
        sender = RequestSender(Cold(self._asked), gap_s=0.0, may_force=False, until=now.until)
        sent = sender.send(together(now.questions, concurrency=self._width(now)), now.told)
        more.add(sent.exchanges, now.references)
        self._noise[CONTROL] += more.largest
        return sent.is_whole

    def _remember(self, now: _Round) -> None:
        for name in (AGAIN, CONTROL, MATCHED):
            self._noise[name] += now.arms[name].largest
        kept = self._arms.setdefault(now.plan.situation, {name: ArmResult(name=name) for name in _ARMS})
        for name, arm in now.arms.items():
            kept[name].exchanges += arm.exchanges
            kept[name].values |= arm.values
        self._recited.setdefault(now.plan.situation, []).extend(
            recites(now.source.code_asked(question), now.references[question.number].tokens, self._needles.length)
            for question in now.questions
            if question.number in now.references
        )

    def _crosstalk(self, now: _Round) -> list[Finding]:
        found: dict[int, Finding] = {}
        for arm in now.arms.values():
            for each in arm.exchanges:
                number = each.sending.question.number
                run = self._needles.crosstalk(each.sending.question, each.answer.tokens)
                if run is not None and number not in found:
                    found[number] = crosstalk_finding(each, run, arm=arm.name, chance=self._needles.chance)
        return [*found.values()]

    def _finding(self, now: _Round, told: ReportedDeviation) -> Finding:
        arm = now.arms[TREATED]
        value = arm.values[told.request]
        exchange = next(each for each in arm.exchanges if each.sending.question.number == told.request)
        noise = max(
            [*self._controls(), *(v for a in (AGAIN, CONTROL, MATCHED) for v in now.arms[a].largest)], default=0.0
        )
        return diverged_finding(told, value, exchange, now.references[told.request], noise)

    def _lacking(self, now: _Round) -> list[str]:
        lacking = []
        if (warm := warm_references([now.arms[COLD], now.arms[AGAIN], now.arms[CONTROL]])) is not None:
            lacking.append(warm)
        if not now.arms[TREATED].exchanges:
            lacking.append("no treated request was sent")
        elif not now.arms[AGAIN].values or not now.arms[CONTROL].values:
            lacking.append("no control was answered, so the server's own noise is not known")
        return lacking

    def _facts(self, situation: str) -> dict[str, object]:
        arms, recited = self._arms[situation], self._recited[situation]
        return {
            "arms": [arm.to_json() for arm in arms.values()],
            "recited": sum(recited),
            "asked": len(recited),
            "needle": self._needles.length,
            "chance": self._needles.chance,
        }

    def notes(self, plan: OwnPlan) -> list[str]:
        arms = self._arms.get(plan.situation)
        if arms is None:
            return []
        treated = [value.largest for value in arms[TREATED].values.values()]
        recited = self._recited[plan.situation]
        cold, fresh = [*self._noise[AGAIN], *self._noise[CONTROL]], self._noise[MATCHED]
        recital = recital_note(plan.cell, sum(recited), len(recited))
        more = MORE_CONTROLS - self._sent_more.get(plan.situation, 0)
        count = sum(len(groups) for groups, _ in self._groups_of[plan.situation].values())
        groups = group_note(plan.cell, count, self._level) if any(treated) else []
        return [*noise_notes(plan.cell, treated, cold, fresh, more=more), *groups, recital]


def check_cold(question: Question, answer: Answer) -> None:
    """Raise UsageError if the answer to a cold request shows that the server cannot be judged."""
    expected = "a whole answer of the engine itself, not of a proxy or a page in its place"
    if answer.end in (End.DONE, End.REFUSED):
        expected = f"a model that has the token ids up to {max(question.ids)}; a smaller one needs --vocabulary"
    check_answered(question, answer, expected, is_answered=answer.end is End.DONE and bool(answer.tokens))
    if answer.logprobs is None:
        raise UsageError(
            "the server gives no log-probabilities, and noise cannot be told from damage by tokens alone; allow them "
            "in its flags, or judge it with a known-answer model (kvcheck model make)"
        )
    if answer.cached:
        raise UsageError(
            f"the first request of all had {answer.cached} cached tokens under a salt that no other has: the server "
            "ignores cache_salt or extra_key, so that nothing can be asked cold; use a release that knows it"
        )


def _most(now: _Round) -> int:
    return max(wave.concurrency for wave in now.round.waves)


def _fewer(width: int, most: int) -> str | None:
    if width >= most:
        return None
    return (
        f"the pool holds {width} controls at a time and the scenario has {most}: batches of other sizes round otherwise"
    )
