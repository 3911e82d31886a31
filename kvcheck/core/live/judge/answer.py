"""Judges one answer: its first wrong token, its length, and its end.

Invariants:
- One wrong token makes one finding; later ones are evidence for the place only.
- No token, or fewer than requested with a reason, is no finding.
- An owner or a place is named only if chance names as much in fewer than BOUND of such rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from math import prod

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.exchange import Answer, End, Exchange, Question
from kvcheck.core.live.judge.faults import Named, shown_by
from kvcheck.core.live.judge.steps import FEW, SentPrompts, Step
from kvcheck.core.live.judge.verdicts import ServerSetting
from kvcheck.core.model.alphabet import TOO_LITTLE, TOO_MUCH, Alphabet
from kvcheck.core.model.answers import answers

LEAST_AFTER_ABORT = 32
"""Tokens that may always arrive after an abort was acknowledged: those in flight."""
LEAST_ALIKE = 4
"""Fewest equal tokens of a shifted answer or another request's answer: fewer can be equal by chance."""
MOST_SHIFT = 8
BOUND = 1e-3
UNNAMED = Named(why="a wrong token without a known cause in the KV cache would point to one as well")
Holders = Sequence[Mapping[int, tuple[int, ...]]]
"""Node -> numbers of requests that list it, in the round and before it: FEW + 2 at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongKind:
    """shift: tokens that the answer is ahead. others: requests it belongs to. is_whole: no page is at fault: all of the
    answer is theirs, or was read from their context (is_context). chance: of a random node to name an owner, where only
    a node names them."""

    code: str
    shift: int | None = None
    others: tuple[int, ...] = ()
    is_whole: bool = False
    is_context: bool = False
    chance: float | None = None


def first_wrong(exchange: Exchange) -> int | None:
    tokens, expected = exchange.answer.tokens, exchange.sending.question.expected
    count = min(len(tokens), len(expected))
    if tokens[:count] == expected[:count]:
        return None
    return next(i for i in range(count) if tokens[i] != expected[i])


def kind_of_wrong(
    setting: ServerSetting,
    exchange: Exchange,
    step: int,
    taken: Sequence[Step],
    *,
    of_round: Iterable[Question],
    sent: SentPrompts,
    holders: Holders,
) -> WrongKind:
    """Return the first kind that fits. sent: before the round."""
    alphabet = setting.alphabet
    question, tokens = exchange.sending.question, exchange.answer.tokens
    count = min(len(tokens), len(question.expected))
    others = {other.number: other for other in (*of_round, *sent.questions.values()) if other.number != question.number}
    same = [
        number
        for number, other in others.items()
        if count >= LEAST_ALIKE and other.expected[:1] == tokens[:1] and other.expected[:count] == tokens[:count]
    ]
    if same:
        return WrongKind(code="KV802", others=tuple(same[:FEW]), is_whole=True)
    shift = _shift(alphabet, question, tokens[:count], step)
    if shift is not None:
        return WrongKind(code="KV803", shift=shift)
    read = [each.number for each in others.values() if _is_read_from(setting, exchange, each, step, taken)]
    if read:
        return WrongKind(code="KV802", others=tuple(read[:FEW]), is_whole=True, is_context=True)
    node = alphabet.as_node(tokens[step])
    named = (each(token) for token in question.ids for each in (alphabet.as_place, alphabet.as_node))
    own = {each for each in named if each is not None}
    if node is None or node in own:
        return WrongKind(code="KV801")
    whose = owners(holders, node, but=question.number)
    chance = owned_share(alphabet, holders, own, but=question.number)
    return WrongKind(code="KV802" if whose else "KV801", others=whose, chance=chance)


def _is_read_from(
    setting: ServerSetting, exchange: Exchange, other: Question, step: int, taken: Sequence[Step]
) -> bool:
    """Whether the answer from `step` on, over more than a page, is right with another request's tokens in the cache."""
    alphabet, question, tokens = setting.alphabet, exchange.sending.question, exchange.answer.tokens
    own, held = (*question.ids, *question.expected[:step]), (*other.ids, *other.expected)
    if (node := alphabet.as_node(own[-1])) is not None and alphabet.place(node) not in held:
        return False
    mixed = (*held[: len(own) - 1], *own[min(len(held), len(own) - 1) :])
    try:
        there = answers(alphabet, mixed, len(question.expected) - step)
    except UsageError:
        return False
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(there, tokens[step:], strict=False)))
    read = {
        at // setting.page_tokens
        for each in taken
        if step <= each.index < step + alike
        for at in each.positions
        if at is not None
    }
    return alike >= LEAST_ALIKE and len(read) > 1


def _shift(alphabet: Alphabet, question: Question, tokens: Sequence[int], step: int) -> int | None:
    """Tokens by which the rest of an answer is ahead of (behind: negative) the expected one.

    After a wrong hop, a walk goes on at another place and looks shifted by any number, so only small shifts count.
    """
    rest = tuple(tokens[step:])
    most = MOST_SHIFT
    if alphabet.as_node(question.ids[-1]) is not None:
        listed = sum(alphabet.as_place(token) is not None for token in question.ids)
        most = min(MOST_SHIFT, max(1, listed // 16))
    stream = (*question.ids[-1:], *question.expected)
    for size in range(1, most + 1):
        for shift in (size, -size):
            start = step + 1 + shift
            alike = stream[start : start + len(rest)] if start >= 0 else ()
            # Skipped tokens leave fewer expected ones at the end than came; the tokens behind them are unknown.
            if len(alike) >= LEAST_ALIKE and alike == rest[: len(alike)] and len(alike) + size >= len(rest):
                return shift
    return None


def unjudged_reason(setting: ServerSetting, exchange: Exchange) -> str | None:
    """Why an answer cannot be judged whole; None also if its end is a finding."""
    question, answer = exchange.sending.question, exchange.answer
    said = f": {answer.reason}" if answer.reason else ""
    match answer.end:
        case End.REFUSED:
            return f"the server refused the request{said}"
        case End.SILENT:
            return f"no byte came within the time limit{said}"
        case End.UNREACHED:
            return f"the server took no connection{said}"
        case End.ABORTED:
            who = "it was aborted, as asked for" if was_aborted(exchange) else "the engine aborted it"
            return f"{who}{said}"
        case End.CUT if was_aborted(exchange):
            return "it was aborted, as asked for, and the connection ended"
        case End.DONE if len(answer.tokens) < len(question.expected) and was_aborted(exchange):
            return f"it was aborted, as asked for{said}"
        case End.DONE if len(answer.tokens) < len(question.expected):
            return _short_reason(setting, question, answer)
        case _:
            return None


def was_aborted(exchange: Exchange) -> bool:
    abort = exchange.sending.abort
    return abort is not None and len(exchange.answer.tokens) >= abort.after


def _short_reason(setting: ServerSetting, question: Question, answer: Answer) -> str | None:
    count = f"{len(answer.tokens)} of {len(question.expected)} tokens"
    if answer.finish not in (None, "length"):
        return f"the engine ended it after {count} and says {answer.finish!r}"
    # Engines keep a token or two for themselves; a page is more than any of them keeps.
    if (
        setting.longest is not None
        and len(question.ids) + len(question.expected) + setting.page_tokens > setting.longest
    ):
        return f"it ended after {count}: request and answer may not fit into the server's {setting.longest} tokens"
    return None


def wrong_set_up(exchange: Exchange) -> str | None:
    """Why an answer is unjudged: the server read other tokens than were sent."""
    sent, counted = len(exchange.sending.question.ids), exchange.answer.prompt_tokens
    if counted is None or counted == sent:
        return None
    return (
        f"{sent} tokens were sent and the server counts {counted}: it adds or drops tokens; start it so that it takes "
        "token ids as they are, without a begin token of its own"
    )


def broken_off(exchange: Exchange) -> str | None:
    """KV807: a broken end."""
    answer = exchange.answer
    said = f": {answer.reason}" if answer.reason else ""
    if answer.end is End.CUT and not was_aborted(exchange):
        return f"the connection ended after {len(answer.tokens)} tokens{said}"
    if answer.end is End.UNREADABLE:
        return f"what came after {len(answer.tokens)} tokens is not the engine's format{said}"
    return None


def wrong_length(setting: ServerSetting, exchange: Exchange) -> str | None:
    """KV808: a wrong length of an answer that is right so far."""
    question, answer = exchange.sending.question, exchange.answer
    asked, came = len(question.expected), len(answer.tokens)
    if came > asked:
        return f"{came} tokens came where {asked} were asked for"
    is_short = answer.end is End.DONE and came < asked and not was_aborted(exchange)
    if is_short and _short_reason(setting, question, answer) is None:
        said = "without a reason" if answer.finish is None else f"for the reason {answer.finish!r}"
        return f"{came} tokens came where {asked} were asked for, {said}"
    return None


def after_abort(exchange: Exchange) -> str | None:
    """KV804: a full answer long after the engine had acknowledged the abort."""
    abort, answer = exchange.sending.abort, exchange.answer
    asked = len(exchange.sending.question.expected)
    if abort is None or answer.after_abort is None or len(answer.tokens) < asked:
        return None
    if answer.after_abort <= max(LEAST_AFTER_ABORT, asked // 2):
        return None
    return (
        f"the engine acknowledged the abort, and 10 s later it went on answering: {answer.after_abort} tokens more, "
        f"to the end of all {len(answer.tokens)}"
    )


def owners(holders: Holders, node: int, *, but: int) -> tuple[int, ...]:
    each = (tuple(number for number in held.get(node, ()) if number != but) for held in holders)
    return next((whose for whose in each if 0 < len(whose) <= FEW), ())


def owned_share(alphabet: Alphabet, holders: Holders, own: Set[int], *, but: int) -> float:
    """Share of the nodes beside a request's own ones that name an owner."""
    foreign = {node for held in holders for node in held} - own
    return sum(bool(owners(holders, node, but=but)) for node in foreign) / (alphabet.parameters.nodes - len(own))


def at_least(hits: int, chances: Iterable[float]) -> float:
    """The probability of that many hits or more in trials of these chances."""
    by_count = [1.0]
    for chance in chances:
        pairs = zip((*by_count, 0), (0, *by_count), strict=True)
        by_count = [stay * (1 - chance) + come * chance for stay, come in pairs]
    return sum(by_count[hits:])


def is_failed_lookup(alphabet: Alphabet, token: int) -> bool:
    return token in (TOO_LITTLE, TOO_MUCH) or alphabet.lost_at(token) is not None


def unless_by_chance(
    setting: ServerSetting, taken: Sequence[Step], place: Named, *, failed: bool, owned: bool, answers: int
) -> Named:
    """Return the place, or why none is named. failed, owned: failed lookups, and owners, of the round are more than
    chance gives. answers: wrong ones of the round."""
    alphabet, wrong = setting.alphabet, [step for step in taken if not step.is_right]
    if any(is_failed_lookup(alphabet, step.answered) for step in wrong):
        return place if failed else UNNAMED
    if wrong[0].path:
        return place if owned else UNNAMED
    # Values that differ in the bits of one layer alone, and steps that read the page of the first wrong one.
    bits = [Counter(layer for layer, _ in shown_by(alphabet, step.expected)).values() for step in wrong]
    one_layer = prod(sum(2**count - 1 for count in each) / (2**alphabet.parameters.bits - 1) for each in bits)
    one_page = min(1.0, setting.page_tokens / len(taken)) ** (len(wrong) - 1)
    chance = (1.0 if place.layer is None else one_layer) * (1.0 if place.page is None else one_page)
    return place if place.why is not None or answers * chance < BOUND else UNNAMED
