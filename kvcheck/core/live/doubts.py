"""Doubts whether answers are the engine's own: right answers of a response cache read no KV cache.

If counters moved by less than was answered, two rounds of new prompts are sent. If these are counted whole, the other
answers are not the engine's; if not, several servers answer, and nothing is compared. Counters may exceed this run's
requests, and may be late; counters that decrease are those of several servers, or of a restarted one.

Invariants:
- A doubt is no finding: it makes a round UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.clients.client import Client, Trouble
from kvcheck.core.live.counting import moved, shows_metrics
from kvcheck.core.live.exchange import Counters, End, Exchange, Question
from kvcheck.core.live.questions import WALK_FRAME, QuestionSource
from kvcheck.core.live.scenarios.scenario import Order, Round, Wave

STILL, READINGS, PAUSE_S = 3, 24, 0.5
"""Counters stand still once STILL readings, PAUSE_S seconds apart, are equal; at most READINGS are read."""
SLACK = 2
"""Requests that counters may lack at the end of a run."""
CONTROLS = 2
"""Rounds of new prompts that must be counted whole before other answers are doubted."""
LEAST_NEW = 8
"""Least number of new prompts of a control, so that each of several servers behind one address gets some."""
WHOLE = frozenset({End.DONE, End.ABORTED, End.REFUSED})
"""Ends of answers that counters are compared with; for others the computed tokens are unknown."""
HIT = "hit-token"
_STARTED = "process_start_time_seconds"


@dataclass(slots=True, kw_only=True)
class AnswerTotals:
    """Totals of answers completed since `before`. cached: reported cached prompt tokens."""

    before: Counters
    requests: int = 0
    tokens: int = 0
    cached: int = 0

    def add(self, exchanges: Iterable[Exchange]) -> None:
        for each in exchanges:
            if each.answer.end is End.DONE and each.answer.tokens:
                self.requests += 1
                self.tokens += len(each.answer.tokens)
                self.cached += each.answer.cached or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterCheck:
    """elsewhere: why some answers are not the engine's. contradicted: why cached counts are false."""

    elsewhere: str | None = None
    contradicted: str | None = None
    notes: tuple[str, ...] = ()


def compare(
    client: Client,
    answered: AnswerTotals,
    after: Counters,
    *,
    ask_new: Callable[[], Sequence[Exchange]],
    sleep: Callable[[float], None],
) -> CounterCheck:
    """Compare answers with counters. ask_new: sends prompts never sent before, of like lengths and concurrency."""
    if not _short(client, answered, after) and not _overstated(client, answered, after):
        return CounterCheck()
    settled = _settled(client, after, sleep)
    if settled is None or settled.get(_STARTED) != answered.before.get(_STARTED):
        return CounterCheck(notes=(_SEVERAL,))
    if not _short(client, answered, settled):
        return CounterCheck(contradicted=_overstated(client, answered, settled))
    controls = _counted_whole(client, settled, ask_new, sleep)
    if controls is None:
        return CounterCheck(notes=(_SEVERAL,))
    new, settled = controls
    answered.add(new)
    short = _short(client, answered, settled)
    if short is None:
        return CounterCheck()
    return CounterCheck(
        elsewhere=f"the engine computed {short}, all of {len(new)} new prompts among them: a response cache or a proxy "
        "in front of it gave the other answers; ask the engine itself",
    )


def is_one_server(
    client: Client, after: Counters | None, *, ask_new: Callable[[], Sequence[Exchange]], sleep: Callable[[float], None]
) -> bool:
    """Whether its counters count each new prompt, so that no other server answers at this address."""
    settled = None if after is None else _settled(client, after, sleep)
    if settled is None or all(moved(names, settled, settled) is None for names in client.computed.values()):
        return False
    return _counted_whole(client, settled, ask_new, sleep) is not None


def _counted_whole(
    client: Client, settled: Counters, ask_new: Callable[[], Sequence[Exchange]], sleep: Callable[[float], None]
) -> tuple[list[Exchange], Counters] | None:
    """New prompts with the counters after them; None if these do not count each one."""
    asked: list[Exchange] = []
    for _ in range(CONTROLS):
        new = AnswerTotals(before=settled)
        new.add(sent := ask_new())
        later = _settled(client, settled, sleep)
        if later is None or new.requests < len(sent) or not sent or _short(client, new, later, slack=0):
            return None
        asked += sent
        settled = later
    return asked, settled


def new_prompts(questions: QuestionSource, rng: Rng, like: Iterable[Question], concurrency: int) -> Round:
    lengths = sorted((len(each.ids), len(each.expected)) for each in like)
    count = max(LEAST_NEW, concurrency)
    drawn = [lengths[at * (len(lengths) - 1) // (count - 1)] for at in range(count)]
    put = [questions.put(rng, questions.walk(rng, prompt - WALK_FRAME), answer) for prompt, answer in drawn]
    return Round((Wave(orders=tuple(Order(question=each) for each in put), concurrency=concurrency),))


_SEVERAL = (
    "the counters do not count each request that is answered at this address, as where several servers answer; "
    "answers are not compared with them; name the counters of all of them with --metrics"
)


def _short(client: Client, answered: AnswerTotals, after: Counters, *, slack: int = SLACK) -> str | None:
    mean = answered.tokens / max(1, answered.requests)
    for unit, count, spare in (("request", answered.requests, slack), ("token", answered.tokens, slack * mean)):
        computed = moved(client.computed.get(unit, ()), answered.before, after)
        if computed is not None and computed[0] < count - spare:
            return f"{computed[0]:,} of {count:,} answered {unit}s ({computed[1]})"
    return None


def _overstated(client: Client, answered: AnswerTotals, after: Counters) -> str | None:
    names = client.counted.get(HIT, ())
    hits = moved(names, answered.before, after)
    if hits is None:
        hits = (0, names[0]) if names and shows_metrics(names, after) else (answered.cached, "")
    if answered.cached <= hits[0]:
        return None
    what = "stood still or is not shown" if not hits[0] else f"moved by {hits[0]:,}"
    return (
        f"answers count {answered.cached:,} cached tokens, and the server's own counter of them ({hits[1]}) {what}; "
        "one of both is false, so neither counts; where several servers answer, name the counters of all with --metrics"
    )


def _settled(client: Client, last: Counters, sleep: Callable[[float], None]) -> Counters | None:
    """Counters once they stand still; None if they never do, decrease, or cannot be read."""
    names = {name for table in (client.computed, client.counted) for each in table.values() for name in each}
    rows = [{name: last.get(name, 0.0) for name in names}]
    for _ in range(READINGS):
        sleep(PAUSE_S)
        try:
            now = client.counters()
        except Trouble:
            return None
        if now is None or now.get(_STARTED) != last.get(_STARTED):
            return None
        rows.append({name: now.get(name, 0.0) for name in names})
        if any(rows[-1][name] < rows[-2][name] for name in names):
            return None
        if len(rows) > STILL and all(row == rows[-1] for row in rows[-STILL:]):
            return now
    return None


def doubts(exchanges: Sequence[Exchange]) -> list[str]:
    """Reasons to suspect a round's answers, from themselves alone."""
    done = [each for each in exchanges if each.answer.end is End.DONE]
    found = []
    foreign = [each for each in done if each.answer.rid is not None and each.sending.rid not in each.answer.rid]
    if foreign:
        number = foreign[0].sending.question.number
        found.append(
            f"{len(foreign)} answers came under the name of another request, the first for request {number}: they may "
            "come from a response cache; ask the engine itself"
        )
    silent = [each for each in done if each.answer.cached is None]
    if silent and len(silent) < len(done):
        number = silent[0].sending.question.number
        found.append(
            f"{len(silent)} answers do not say how many tokens were cached, and others do, the first for request "
            f"{number}: they may come from a response cache; ask the engine itself"
        )
    return found
