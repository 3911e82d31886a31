"""Whether the cached tokens that an engine counts can have been cached (KV805).

    more than the prompt has                                        never right
    more than any other request or answer of the run begins with    right only where the count may hold something else

What else it may hold: the request's own tokens after a retraction, tokens that another server computed, own chunks of
an engine that counts them, and what the cache held before the run. A count may be rounded up to a page. Requests of the
same round count for each other, whichever began first.

Invariants:
- An engine that says no count is not judged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from kvcheck.core.live.exchange import Exchange
from kvcheck.core.live.judge.answer import wrong_set_up
from kvcheck.core.live.judge.sent import Sent, longest_shared, made, packed
from kvcheck.core.live.judge.verdicts import Setting


def impossible_counts(setting: Setting, exchanges: Sequence[Exchange], sent: Sent) -> Iterator[tuple[Exchange, str]]:
    """Each exchange of a round with a count that cannot be, and why."""
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
        if cached > -(-shared // setting.page_tokens) * setting.page_tokens:
            yield (
                exchange,
                f"the engine counts {cached} cached tokens, and nothing else that was sent or answered in this run has "
                f"more than its first {shared} tokens",
            )


def _may_hold_more(setting: Setting, exchange: Exchange) -> bool:
    """Whether a count up to the prompt's length can be right whatever was sent before."""
    own_tokens = setting.retracts and exchange.answer.retractions != 0
    return own_tokens or setting.transfers or not setting.began_empty
