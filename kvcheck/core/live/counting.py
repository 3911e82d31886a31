"""Counts a server's activity under judged requests: from answers, counters and the order of answers.

Invariants:
- Reports with each request take precedence over counters.
- A kind without a source is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence
from kvcheck.core.base.server_facts import KINDS
from kvcheck.core.live.clients.client import Client, Trouble
from kvcheck.core.live.exchange import Answer, Counters, End, Exchange, Tier
from kvcheck.core.live.judge.steps import longest_shared, made, packed

PAIR = "the order in which answers came"
OURS = "connections and calls of this run"
BY_PREFIX = "cached tokens beside what had been sent before"
SLACK_PAGES = 2
"""Pages that may be missing from a prefix that is not lost: engines leave out the last page."""


class Observed:
    """Counts by kind of evidence. moved: movement of the counter, for kinds that answers report too."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.sources: dict[str, str] = {}
        self.moved: dict[str, int] = {}

    def add(self, kind: str, count: int, source: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.sources.setdefault(kind, source)

    def evidence(self, *, events: int, requests: int) -> Evidence:
        return Evidence(schedules=1, events=events, requests=requests, observed=dict(sorted(self.counts.items())))


def observe(
    client: Client,
    exchanges: Sequence[Exchange],
    *,
    judged: Sequence[Exchange],
    before: Counters | None,
    after: Counters | None,
    page: int,
    by_chance: int = 0,
) -> Observed:
    """Count one round. page: its tokens. by_chance: cached tokens of a common beginning, which are no hit."""
    seen = Observed()
    answers = [each.answer for each in judged]
    _from_answers(seen, client, answers, by_chance)
    for kind, names in client.counted.items():
        by = None if before is None or after is None else moved(names, before, after)
        if by is not None and kind not in seen.counts:
            seen.add(kind, *by)
        elif kind in seen.counts and after is not None and shows_metrics(names, after):
            seen.moved[kind] = 0 if by is None else by[0]
    if "retract" in client.counted and before is not None and after is not None:
        _add_uncounted(seen, moved(client.counted["retract"], before, after))
    aborted = sum(1 for each in exchanges if each.answer.end is End.ABORTED and each.answer.tokens)
    if any(each.sending.abort is not None for each in exchanges):
        seen.add("abort", aborted, OURS)
    if any(each.sending.priority for each in exchanges):
        seen.add("overtake", overtakes(exchanges), PAIR)
    if (lost := lost_prefixes(exchanges, page=page)) is not None:
        seen.add("lost-prefix", lost, BY_PREFIX)
    return seen


def read_counters(client: Client) -> tuple[Counters | None, list[str]]:
    try:
        return client.counters(), []
    except Trouble as trouble:
        return None, [f"counters could not be read: {trouble}"]


def _from_answers(seen: Observed, client: Client, answers: Sequence[Answer], by_chance: int) -> None:
    cached = [answer.cached for answer in answers if answer.cached is not None]
    if cached:
        seen.add("hit", sum(1 for count in cached if count > by_chance), "each request: cached tokens")
        seen.add("hit-token", sum(cached), "each request: cached tokens")
    for kind, tier in (("host-hit", Tier.HOST), ("storage-hit", Tier.STORAGE)):
        found = [
            answer.cached_by[tier] for answer in answers if answer.cached_by is not None and tier in answer.cached_by
        ]
        if found:
            seen.add(kind, sum(found), "each request: cached tokens by tier")
    retractions = [answer.retractions for answer in answers if answer.retractions is not None]
    if retractions:
        seen.add("retract", sum(retractions), "each request: retractions")
    if "transfer" in client.said:
        seen.add(
            "transfer", sum(1 for answer in answers if answer.end is End.DONE), "each request: sent to both servers"
        )


def _add_uncounted(seen: Observed, moved: tuple[int, str] | None) -> None:
    if moved is not None and moved[0] > seen.counts.get("retract", 0):
        seen.counts["retract"] = moved[0]
        seen.sources["retract"] = moved[1]


def moved(names: Sequence[str], before: Counters, after: Counters) -> tuple[int, str] | None:
    for name in names:
        if name in after:
            return max(0, round(after[name] - before.get(name, 0.0))), name
    return None


def shows_metrics(names: Sequence[str], after: Counters) -> bool:
    prefixes = {name.partition(":")[0] + ":" for name in names}
    return any(key.startswith(tuple(prefixes)) for key in after)


def overtakes(exchanges: Sequence[Exchange]) -> int:
    done = [each for each in exchanges if each.answer.end is End.DONE]
    return sum(
        any(
            (other.sending.priority or 0) < (each.sending.priority or 0)
            and other.answer.began_s < each.answer.began_s
            and other.answer.ended_s > each.answer.ended_s
            for other in done
        )
        for each in done
    )


def lost_prefixes(exchanges: Sequence[Exchange], *, page: int) -> int | None:
    """Count requests with a prefix computed earlier, of which more than SLACK_PAGES pages are no longer cached."""
    said = [each for each in exchanges if each.answer.cached is not None]
    if not said:
        return None
    computed = sorted((packed(made(each)), each.answer.ended_s) for each in exchanges)
    lost = 0
    for each in said:
        ids = each.sending.question.ids
        earlier = [tokens for tokens, ended_s in computed if ended_s <= each.answer.began_s]
        shared = min(longest_shared(packed(ids), earlier), len(ids) - 1)
        lost += shared // page - SLACK_PAGES > (each.answer.cached or 0) // page
    return lost


def parse_requirements(texts: Sequence[str]) -> Mapping[str, int]:
    """Parse "retract=10,hit=100" into kind -> least count. Raises UsageError."""
    found: dict[str, int] = {}
    for part in (part for text in texts for part in text.split(",")):
        kind, equals, number = part.partition("=")
        if kind not in KINDS:
            raise UsageError(f"--require {part}: expected KIND=NUMBER with one of {', '.join(KINDS)}, got {kind!r}")
        if not equals or not (number.isascii() and number.isdigit()) or not 1 <= len(number) <= 12 or int(number) < 1:
            raise UsageError(f"--require {part}: expected {kind}=NUMBER with a number from 1, got {number!r}")
        found[kind] = int(number)
    return found
