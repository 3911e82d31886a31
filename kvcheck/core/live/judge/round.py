"""Judges a round: every answer, with everything that the run had sent before. A pure function."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from kvcheck.core.base.nouns import counted
from kvcheck.core.live.exchange import Exchange
from kvcheck.core.live.judge.answer import (
    BOUND,
    WrongKind,
    after_abort,
    at_least,
    broken_off,
    first_wrong,
    is_failed_lookup,
    kind_of_wrong,
    unjudged_reason,
    unless_by_chance,
    wrong_length,
    wrong_set_up,
)
from kvcheck.core.live.judge.faults import Named
from kvcheck.core.live.judge.place import lists, named, ranked, suspects
from kvcheck.core.live.judge.steps import SentPrompts, Step, longest_shared, made, packed, shared, steps
from kvcheck.core.live.judge.verdicts import ASSUMED_PAGE, Counts, Judgement, PagePlace, ServerSetting, Unjudged, Wrong
from kvcheck.core.model.alphabet import HEADER

LATEST = 512
"""Requests before a round that are searched for pages an answer may have read; more would only cost time."""
CHANCE_BITS = 40
"""Drawn bits that requests of two runs do not share by chance."""


def judge_round(setting: ServerSetting, exchanges: Sequence[Exchange], sent: SentPrompts) -> Judgement:
    """Judge a round. sent: of the rounds before."""
    judged: list[Exchange] = []
    unjudged: list[Unjudged] = []
    for exchange in exchanges:
        reason = wrong_set_up(exchange)
        if reason is None:
            judged.append(exchange)
            reason = unjudged_reason(setting, exchange)
        if reason is not None:
            unjudged.append(_unjudged(exchange, reason))
    lost = [(exchange, step) for exchange in judged if (step := first_wrong(exchange)) is not None]
    wrong = _wrong_tokens(setting, lost, exchanges, sent)
    for exchange in judged:
        wrong += _wrong_ends(setting, exchange)
    wrong += [_wrong(exchange, "KV805", text) for exchange, text in impossible_counts(setting, exchanges, sent)]
    compared = [_compared(exchange) for exchange in judged]
    return Judgement(
        tokens=sum(compared),
        requests=sum(count > 0 for count in compared),
        wrong=tuple(sorted(wrong, key=lambda each: each.request)),
        unjudged=tuple(unjudged),
        notes=_notes(setting),
        counts=cached_counts(setting, exchanges, sent),
    )


def _compared(exchange: Exchange) -> int:
    return min(len(exchange.answer.tokens), len(exchange.sending.question.expected))


def _notes(setting: ServerSetting) -> tuple[str, ...]:
    if setting.page is not None:
        return ()
    return (f"the server does not say how many tokens a page has; pages of findings are counted by {ASSUMED_PAGE}",)


def _unjudged(exchange: Exchange, reason: str) -> Unjudged:
    return Unjudged(
        request=exchange.sending.question.number,
        rid=exchange.sending.rid,
        end=exchange.answer.end.value,
        reason=reason,
        tokens=0 if wrong_set_up(exchange) is not None else _compared(exchange),
    )


def _wrong(exchange: Exchange, code: str, text: str) -> Wrong:
    request = exchange.sending.question.number
    return Wrong(code=code, request=request, rid=exchange.sending.rid, message=f"request {request}: {text}")


def _wrong_ends(setting: ServerSetting, exchange: Exchange) -> list[Wrong]:
    is_right = first_wrong(exchange) is None
    texts = {
        "KV804": after_abort(exchange),
        "KV807": broken_off(exchange),
        "KV808": wrong_length(setting, exchange) if is_right else None,
    }
    return [_wrong(exchange, code, text) for code, text in texts.items() if text is not None]


def _wrong_tokens(
    setting: ServerSetting, lost: Sequence[tuple[Exchange, int]], exchanges: Sequence[Exchange], sent: SentPrompts
) -> list[Wrong]:
    """Evidence of different answers for a place is combined."""
    if not lost:
        return []
    of_round = {exchange.sending.question.number: exchange.sending.question for exchange in exchanges}
    latest = list(sent.questions.values())[-LATEST:]
    others = [packed((*each.ids, *each.expected)) for each in (*of_round.values(), *latest)]
    listed = lists(setting.alphabet, of_round=[*of_round.values()], earlier=latest)
    taken = [
        list(steps(setting.alphabet, exchange.sending.question.ids, exchange.answer.tokens[: _compared(exchange)]))
        for exchange, _ in lost
    ]
    held = [
        suspects(
            setting,
            exchange.sending.question,
            exchange.answer.tokens[: _compared(exchange)],
            each,
            listed,
            {shared(packed(exchange.sending.question.ids), other) for other in others},
        )
        for (exchange, _), each in zip(lost, taken, strict=True)
    ]
    alphabet, holders = setting.alphabet, (SentPrompts().plus(setting.alphabet, exchanges).holders, sent.holders)
    kinds = [
        kind_of_wrong(setting, exchange, step, each, of_round=of_round.values(), sent=sent, holders=holders)
        for (exchange, step), each in zip(lost, taken, strict=True)
    ]
    chances = [kind.chance for kind in kinds if kind.chance is not None]
    owned = at_least(sum(kind.chance is not None and bool(kind.others) for kind in kinds), chances) < BOUND
    lookups = [is_failed_lookup(alphabet, exchange.answer.tokens[step]) for exchange, step in lost]
    failed = all(lookups) or at_least(sum(lookups), [alphabet.places / alphabet.size] * len(lost)) < BOUND
    found = []
    for (exchange, step), each, own, kind in zip(lost, taken, held, kinds, strict=True):
        if kind.chance is not None and not owned:
            kind = WrongKind(code="KV801")
        is_whole = kind.is_whole or kind.shift is not None
        places = () if is_whole else ranked(setting, own, held)
        place = named(setting, own, held) if places else Named()
        if places:
            place = unless_by_chance(setting, each, place, failed=failed, owned=owned, answers=len(lost))
        place = place if setting.elsewhere is None else Named(why=setting.elsewhere)
        found.append(_wrong_token(setting, exchange, each, step, kind, places, place))
    return found


def _wrong_token(
    setting: ServerSetting,
    exchange: Exchange,
    taken: Sequence[Step],
    step: int,
    kind: WrongKind,
    places: tuple[PagePlace, ...],
    place: Named,
) -> Wrong:
    question, answer, alphabet = exchange.sending.question, exchange.answer, setting.alphabet
    expected, answered = question.expected[step], answer.tokens[step]
    here = next((each for each in taken if each.index == step), None)
    before = [each for each in taken if each.index < step and each.is_right]
    logprob = answer.logprobs[step] if answer.logprobs is not None and step < len(answer.logprobs) else None
    reads = here.positions if here is not None else ()
    return Wrong(
        code=kind.code,
        request=question.number,
        rid=exchange.sending.rid,
        step=step,
        expected=expected,
        expected_word=alphabet.word(expected),
        answered=answered,
        answered_word=alphabet.word(answered),
        logprob=logprob,
        reads=reads,
        places=places,
        layer=place.layer,
        page=place.page,
        unnamed=place.why,
        others=kind.others,
        message=_message(setting, exchange, step, kind, place),
        picture={
            "test": "position" if alphabet.as_node(question.ids[-1]) is None else "walk",
            "page": setting.page_tokens,
            "page_assumed": setting.page is None,
            "prompt": len(question.ids),
            "right": list(before[-1].positions) if before else None,
            "wrong": list(reads),
            "suspects": [each.to_json() for each in places if _is_named(each, place)],
        },
    )


def _is_named(suspect: PagePlace, place: Named) -> bool:
    is_any = place.layer is not None or place.page is not None
    return is_any and place.layer in (None, suspect.layer) and place.page in (None, suspect.page)


def _message(setting: ServerSetting, exchange: Exchange, step: int, kind: WrongKind, place: Named) -> str:
    question, alphabet = exchange.sending.question, setting.alphabet
    said, right = alphabet.word(exchange.answer.tokens[step]), alphabet.word(question.expected[step])
    text = f"request {question.number} answered {said} at step {step} where {right} is right"
    lost = alphabet.lost_at(exchange.answer.tokens[step])
    if lost is not None:
        is_ahead = alphabet.is_ahead(exchange.answer.tokens[step])
        what = "something newer or stronger than it should" if is_ahead else "nothing"
        text += f": layer {lost[0]} found {what}" + ("" if lost[1] is None else f" in KV head {lost[1]}")
    whose = ", ".join(map(str, kind.others))
    if kind.is_context:
        text += f"; the answer is right in the context of request {whose}, of which more than a page was read"
    elif kind.is_whole:
        text += f"; the whole answer is that of request {whose}"
    elif kind.others:
        text += (
            f"; only request {whose} lists that node" if len(kind.others) == 1 else f"; requests {whose} list that node"
        )
    if kind.shift is not None:
        how = "skips" if kind.shift > 0 else "repeats"
        text += f"; from there on the answer is the right one, but {how} {counted(abs(kind.shift), 'token')}"
    else:
        text += place.text(setting.page_tokens)
    if place.why is not None:
        text += f"; no page is named: {place.why}"
    return text


def cached_counts(setting: ServerSetting, exchanges: Sequence[Exchange], sent: SentPrompts) -> Counts:
    total = Counts()
    of_round = sorted((packed(made(each)), each.answer.began_s, each.sending.rid) for each in exchanges)
    every = [row[0] for row in of_round]
    for each in exchanges:
        answer, ids = each.answer, each.sending.question.ids
        if answer.cached is None or wrong_set_up(each) is not None or setting.transfers or not setting.began_empty:
            continue
        request, own = packed(ids), bisect_left(every, packed(made(each)))
        earlier = [row for row, began_s, rid in of_round if began_s <= answer.ended_s and rid != each.sending.rid]
        before = max(longest_shared(request, sent.sequences), longest_shared(request, earlier))
        shared = max(longest_shared(request, sent.sequences), longest_shared(request, every, but=own))
        bounded, chance = not _may_hold_more(setting, each), by_chance(setting, ids)
        is_cold = before <= chance and not answer.retractions
        is_hit = is_cold and answer.cached > chance
        total = total.plus(
            Counts(
                bounded and answer.cached > 0,
                bounded and answer.cached > shared,
                is_cold,
                is_hit,
                is_hit and bounded,
                f"{answer.cached} of {len(ids)}" if is_hit else None,
            )
        )
    return total


def impossible_counts(
    setting: ServerSetting, exchanges: Sequence[Exchange], sent: SentPrompts
) -> Iterator[tuple[Exchange, str]]:
    of_round = sorted(packed(made(exchange)) for exchange in exchanges)
    for exchange in exchanges:
        cached, ids = exchange.answer.cached, exchange.sending.question.ids
        if cached is None or wrong_set_up(exchange) is not None:
            continue
        if cached > len(ids):
            yield exchange, f"the engine counts {cached} cached tokens of a prompt of {len(ids)}"
            continue
        if cached == 0 or _may_hold_more(setting, exchange):
            continue
        own = bisect_left(of_round, packed(made(exchange)))
        request = packed(ids)
        shared = max(longest_shared(request, sent.sequences), longest_shared(request, of_round, but=own))
        if setting.own_chunk is not None:
            shared = max(shared, (len(ids) - 1) // setting.own_chunk * setting.own_chunk)
        rounded = -(-shared // setting.page_tokens) * setting.page_tokens
        if cached > max(rounded, by_chance(setting, ids)):
            yield (
                exchange,
                f"the engine counts {cached} cached tokens, and nothing else that was sent or answered in this run has "
                f"more than its first {shared} tokens",
            )


def by_chance(setting: ServerSetting, ids: Sequence[int]) -> int:
    """First tokens of a request that a cache filled by an earlier run, under other names, may hold."""
    parameters = setting.alphabet.parameters
    is_walk = setting.alphabet.as_node(ids[-1]) is not None
    bits = parameters.nodes.bit_length() - 1 if is_walk else parameters.bits
    return len(HEADER) + -(-CHANCE_BITS // bits)


def _may_hold_more(setting: ServerSetting, exchange: Exchange) -> bool:
    """True for own tokens after a retraction, tokens that another server computed, and an earlier run's cache."""
    own_tokens = setting.retracts and exchange.answer.retractions != 0
    return own_tokens or setting.transfers or not setting.began_empty
