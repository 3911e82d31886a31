"""Whether the cached tokens that an engine reports are possible (KV805).

    more than the prompt has                                        never possible
    more than any other request or answer of the run begins with    only by chance, with own chunks, or as
                                                                    `_may_hold_more` allows

A count may be rounded up to a page. Requests of a round count for each other in any order. A prompt is cold if nothing
before it begins alike. If cold prompts report hits, no hit is evidence. If most counts are impossible, none is a
finding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from kvcheck.core.live.exchange import Exchange
from kvcheck.core.live.judge.answer import wrong_set_up
from kvcheck.core.live.judge.sent import Sent, longest_shared, made, packed
from kvcheck.core.live.judge.verdicts import Counts, Setting
from kvcheck.core.model.alphabet import HEADER

CHANCE_BITS = 40
"""Drawn bits that requests of two runs do not share by chance."""


def cached_counts(setting: Setting, exchanges: Sequence[Exchange], sent: Sent) -> Counts:
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


def impossible_counts(setting: Setting, exchanges: Sequence[Exchange], sent: Sent) -> Iterator[tuple[Exchange, str]]:
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


def by_chance(setting: Setting, ids: Sequence[int]) -> int:
    """First tokens of a request that a cache filled by an earlier run, under other names, may hold."""
    parameters = setting.alphabet.parameters
    is_walk = setting.alphabet.as_node(ids[-1]) is not None
    bits = parameters.nodes.bit_length() - 1 if is_walk else parameters.bits
    return len(HEADER) + -(-CHANCE_BITS // bits)


def _may_hold_more(setting: Setting, exchange: Exchange) -> bool:
    """True for own tokens after a retraction, tokens that another server computed, and an earlier run's cache."""
    own_tokens = setting.retracts and exchange.answer.retractions != 0
    return own_tokens or setting.transfers or not setting.began_empty
