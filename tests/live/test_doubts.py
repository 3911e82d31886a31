"""Doubts whether answers are the engine's own, and whether its server still answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rigs.asked import http
from rigs.live_client import ScriptedClient, exchange
from rigs.raw_server import RawServer, whole

from kvcheck.core.base.record import Finding
from kvcheck.core.live.clients.asking import is_well
from kvcheck.core.live.doubts import AnswerTotals, CounterCheck, compare, doubts, is_one_server
from kvcheck.core.live.exchange import AbortRequest, Counters, End, Exchange, Question
from kvcheck.core.live.health import judge_health

ASKED = Question(number=4, ids=(1, 3, 9), expected=(5,))
LIMIT_S = 60.0


def test_answers_under_their_own_names_raise_no_doubt() -> None:
    assert doubts([exchange(ASKED, cached=0), exchange(ASKED, cached=2)]) == []
    assert doubts([exchange(ASKED, rid="r4"), exchange(ASKED, rid="cmpl-r4-0")]) == []
    assert doubts([exchange(ASKED), exchange(ASKED)]) == []


def test_an_answer_under_another_name_may_be_stored() -> None:
    (found,) = doubts([exchange(ASKED, rid="r4"), exchange(ASKED, rid="cmpl-r3")])
    assert "name of another request" in found


def test_an_answer_that_says_less_than_others_may_be_stored_unless_it_was_aborted() -> None:
    (found,) = doubts([exchange(ASKED, cached=0), exchange(ASKED, cached=None)])
    assert "1 answers do not say" in found
    aborted = exchange(ASKED, abort=AbortRequest(after=0), end=End.ABORTED, cached=None, rid="r3")
    assert doubts([exchange(ASKED, cached=0), aborted]) == []


COMPUTED = {"request": ("e:requests",), "token": ("e:tokens",)}
FRESH = [exchange(Question(number=100 + i, ids=(1, 3, 9), expected=(5, 6)), cached=0) for i in range(8)]


class Counting(ScriptedClient):
    """Shows these readings of (requests, tokens, hits), one after the other, and then the last one."""

    def __init__(self, *rows: tuple[int, int, int], starts: Sequence[float] = ()) -> None:
        super().__init__(computed=COMPUTED, counted={"hit-token": ("e:hits",)})
        self.rows, self.starts, self.new = rows, starts, 0

    def counters(self) -> Counters:
        at = min(self._readings, len(self.rows) - 1)
        self._readings += 1
        shown = {name: float(n) for name, n in zip(("e:requests", "e:tokens", "e:hits"), self.rows[at], strict=True)}
        start = {"process_start_time_seconds": self.starts[min(at, len(self.starts) - 1)]} if self.starts else {}
        return {**shown, **start}


def count_new(client: Counting, whole: bool) -> Sequence[Exchange]:
    """New prompts are sent. whole: the engine counts each of them."""
    if whole:
        requests, tokens, hits = client.rows[-1]
        client.rows = ((requests + 8, tokens + 16, hits),)
    client.new += 1
    return FRESH


def compared(client: Counting, answered: int = 20, *, cached: int = 0, whole: bool = True) -> CounterCheck:
    """20 answers of two tokens, after counters that stood at 0. whole: the engine counts each new prompt."""
    begun = AnswerTotals(before=client.rows and dict.fromkeys(("e:requests", "e:tokens", "e:hits"), 0.0))
    if client.starts:
        begun.before = {**begun.before, "process_start_time_seconds": client.starts[0]}
    begun.add([exchange(Question(number=i, ids=(1, 3, 9), expected=(5, 6)), cached=cached) for i in range(answered)])

    return compare(
        client, begun, client.counters(), ask_new=lambda: count_new(client, whole), sleep=lambda seconds: None
    )


@pytest.mark.parametrize(
    ("client", "whole", "is_one"),
    [
        (Counting((20, 40, 0)), True, True),
        (Counting((20, 40, 0)), False, False),  # another server answers some of the new prompts
        (Counting((9, 18, 0), (5, 10, 0), (9, 18, 0), (5, 10, 0)), True, False),  # two servers in turns
        (ScriptedClient(computed=COMPUTED, moved={"e:other": 0.0}), True, False),  # nothing counts requests
        (ScriptedClient(computed=COMPUTED), True, False),
    ],
)
def test_one_server_is_shown_by_counters_of_new_prompts(client: ScriptedClient, whole: bool, is_one: bool) -> None:
    def ask_new() -> Sequence[Exchange]:
        return count_new(client, whole) if isinstance(client, Counting) else FRESH

    assert is_one_server(client, client.counters(), ask_new=ask_new, sleep=lambda seconds: None) == is_one


def test_fewer_requests_than_answers_are_told_once_new_prompts_are_counted_whole() -> None:
    client = Counting((9, 18, 0))
    found = compared(client)
    assert client.new == 2
    assert found.elsewhere is not None and "25 of 36 answered requests (e:requests)" in found.elsewhere
    assert "answered tokens (e:tokens)" in str(compared(Counting((20, 18, 0))).elsewhere)


@pytest.mark.parametrize(
    ("client", "whole", "is_told"),
    [
        (Counting((20, 40, 0)), True, False),
        (Counting((900, 9000, 70)), True, False),  # others use the server
        (Counting((19, 38, 0)), True, False),  # one that is late for ever
        (Counting((9, 18, 0), (9, 18, 0), (15, 30, 0), (20, 40, 0)), True, False),  # counters come late
        (Counting((9, 18, 0)), False, True),  # new prompts are not counted either: another server answers
        (Counting((9, 18, 0), (5, 10, 0), (9, 18, 0), (5, 10, 0)), True, True),  # two servers in turns
        (Counting((9, 18, 0), (9, 18, 0), starts=(1.0, 2.0)), True, True),  # it was started again
    ],
)
def test_late_or_incomplete_counters_say_nothing_of_a_proxy(client: Counting, whole: bool, is_told: bool) -> None:
    found = compared(client, whole=whole)
    assert found.elsewhere is None and found.contradicted is None
    assert bool(found.notes) == is_told


def test_aborted_answers_need_not_be_counted() -> None:
    begun = AnswerTotals(before={})
    begun.add(
        [exchange(ASKED, abort=AbortRequest(after=0), end=End.ABORTED), exchange(ASKED, end=End.REFUSED, tokens=())]
    )
    assert (begun.requests, begun.tokens) == (0, 0)


def test_cached_tokens_beyond_the_own_counter_are_contradicted_and_fewer_are_not() -> None:
    over = compared(Counting((20, 40, 160)), cached=16).contradicted
    assert over is not None and "320 cached tokens" in over and "(e:hits) moved by 160" in over
    assert compared(Counting((20, 40, 320)), cached=16).contradicted is None
    assert compared(Counting((20, 40, 9000)), cached=16).contradicted is None
    late = Counting((20, 40, 160), (20, 40, 160), (20, 40, 320))
    assert compared(late, cached=16).contradicted is None


def at(number: int, began_s: float, ended_s: float, end: End = End.DONE) -> Exchange:
    asked = Question(number=number, ids=(1, 3, 9), expected=(5,))
    tokens = (5,) if end is End.DONE else ()
    return exchange(asked, began_s=began_s, ended_s=ended_s, end=end, tokens=tokens, reason=f"{end.value} told")


def health(exchanges: list[Exchange], *, alive: bool = True) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    return judge_health(ScriptedClient(alive=alive), exchanges, timeout_s=LIMIT_S, sleep=lambda seconds: None)


def test_a_server_that_answers_is_well() -> None:
    assert health([at(0, 0, 1), at(1, 0, 2)]) == ((), ())
    assert health([at(0, 0, 1), at(1, 0, 2, End.REFUSED)], alive=False) == ((), ()), "a refusal is no matter of health"


def test_a_server_that_takes_no_connection_afterwards_has_died() -> None:
    found, _ = health([at(0, 0, 1), at(2, 1, 2, End.UNREACHED), at(1, 0, 1.5, End.CUT)], alive=False)
    assert [(each.code, each.request) for each in found] == [("KV806", 1)]
    assert "takes no connection any more" in found[0].message


def test_a_server_that_is_up_again_is_not_said_to_have_died() -> None:
    found, reasons = health([at(0, 0, 1), at(1, 1, 2, End.UNREACHED)])
    assert found == () and "1 request found no connection" in reasons[0]


def test_a_request_that_is_never_answered_by_an_idle_server_hangs() -> None:
    found, _ = health([at(0, 0, 1), at(1, 0, LIMIT_S, End.SILENT)])
    assert [(each.code, each.request) for each in found] == [("KV806", 1)]
    assert "larger --timeout" in found[0].message


def test_all_requests_without_an_answer_are_one_finding() -> None:
    found, _ = health([at(number, 0, LIMIT_S, End.SILENT) for number in range(4)])
    assert len(found) == 1 and "request 0 and 3 more" in found[0].message


def test_a_request_that_waits_behind_others_is_no_finding() -> None:
    busy = [at(number, 0, number * 10.0) for number in range(6)]
    found, reasons = health([*busy, at(9, 0, LIMIT_S, End.SILENT)])
    assert found == () and "while others were answered" in reasons[0]
    found, reasons = health([at(0, 1, 2 * LIMIT_S), at(9, 0, LIMIT_S, End.SILENT)])
    assert found == () and reasons, "another one runs on to its answer"


@pytest.mark.parametrize(
    ("status", "alive"), [("200 OK", True), ("404 X", True), ("405 X", True), ("401 X", True), ("503 X", False)]
)
def test_a_server_without_a_health_call_is_up_and_one_that_says_it_is_broken_is_not(status: str, alive: bool) -> None:
    with RawServer(whole({}, status=status)) as server:
        assert is_well(http(server.url), "/health") is alive
    assert not is_well(http(server.url), "/health"), "nothing listens any more"
