"""A server that died or hung, beside one that is only slow, busy or restarted."""

from __future__ import annotations

import pytest
from rigs.asked import http
from rigs.live_client import ScriptedClient, exchange
from rigs.raw_server import RawServer, whole

from kvcheck.core.base.record import Finding
from kvcheck.core.live.clients.asking import is_well
from kvcheck.core.live.exchange import End, Exchange, Question
from kvcheck.core.live.health import judge_health

LIMIT_S = 60.0


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
