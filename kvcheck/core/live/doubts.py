"""Answers that may not be the engine's own: a response cache gives right answers that no KV cache was read for.

    counters moved by less than was answered     settled; two rounds of new prompts are counted whole: not the engine's
                                                 new prompts are not counted whole: several servers, nothing is compared
    answers count more cached tokens than the counter of them moved by              neither counts

Counters may count more than was asked: others' requests, warm-up, what was aborted. They may be late: they are read
until they stand still. Counters that go back are those of several servers, or of one that was started again.

Invariants:
- A doubt accuses nobody: it makes a round UNKNOWN.
- Only answers that came to their end are looked at: an aborted one may say less.
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
"""Counters stand still once so many readings, such seconds apart, are equal; of at most so many."""
SLACK = 2
"""Requests that counters may lack at the end of a run without a word."""
CONTROLS = 2
"""Rounds of new prompts that have to be counted whole before anything is said of those that were not."""
LEAST_NEW = 8
"""New prompts of a control: of several servers behind one address, each gets some."""
WHOLE = frozenset({End.DONE, End.ABORTED, End.REFUSED})
"""Ends of answers that counters are compared with: of others nobody knows what the engine computed."""
HIT = "hit-token"
_STARTED = "process_start_time_seconds"


@dataclass(slots=True, kw_only=True)
class AnswerTotals:
    """What was answered to its end since counters were read. cached: prompt tokens that answers count as cached."""

    before: Counters
    requests: int = 0
    tokens: int = 0
    cached: int = 0

    def add(self, exchanges: Iterable[Exchange]) -> None:
        """More answers. An engine may count one that was aborted, or not."""
        for each in exchanges:
            if each.answer.end is End.DONE and each.answer.tokens:
                self.requests += 1
                self.tokens += len(each.answer.tokens)
                self.cached += each.answer.cached or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterCheck:
    """Answers beside the engine's own counters. elsewhere: that not all of the answers are the
    engine's. contradicted: that cached tokens of answers are not those of its counter. notes: why nothing is compared.
    """

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
    """What counters say of the answers. ask_new: sends prompts that nobody has sent, as long and as many at a time."""
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
    """Whether its own counters count each new prompt, so that no other server answers at this address."""
    settled = None if after is None else _settled(client, after, sleep)
    if settled is None or all(moved(names, settled, settled) is None for names in client.computed.values()):
        return False
    return _counted_whole(client, settled, ask_new, sleep) is not None


def _counted_whole(
    client: Client, settled: Counters, ask_new: Callable[[], Sequence[Exchange]], sleep: Callable[[float], None]
) -> tuple[list[Exchange], Counters] | None:
    """New prompts, with the counters after them; None where these do not count each one."""
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
    """Prompts that nobody has sent, as long as these and as many at a time."""
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
    """By which counter, and how much, the engine computed less than was answered; None where none says so."""
    mean = answered.tokens / max(1, answered.requests)
    for unit, count, spare in (("request", answered.requests, slack), ("token", answered.tokens, slack * mean)):
        computed = moved(client.computed.get(unit, ()), answered.before, after)
        if computed is not None and computed[0] < count - spare:
            return f"{computed[0]:,} of {count:,} answered {unit}s ({computed[1]})"
    return None


def _overstated(client: Client, answered: AnswerTotals, after: Counters) -> str | None:
    """That answers count more cached tokens than the engine's own counter of them; None where they do not."""
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
    """Counters once they stand still; None where they do not, go back, or cannot be read."""
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
    """Why answers of a round may come from something else than the engine; none where nothing speaks for it."""
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
