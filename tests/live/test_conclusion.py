"""What the rounds of a scenario come to: pass, finding, and each reason for neither."""

from __future__ import annotations

import dataclasses
import time
from itertools import takewhile

import pytest
from rigs.live_client import ALPHABET, ScriptedClient, right

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence, Finding, Verdict
from kvcheck.core.live.conclusion import RoundCell, common_place
from kvcheck.core.live.exchange import Answer, Sending
from kvcheck.core.live.line import LivePlan
from kvcheck.core.live.runner import LiveRunner, RoundResult
from kvcheck.core.live.scenarios import LIVE_SCENARIOS

PLAN = LivePlan(
    scenario="prefix-cache", target="http://127.0.0.1:1", known_answers="m", engine="scripted", requests=8, longest=512
)


def progress(wanted: int = 1, scenario: str = "prefix-cache") -> RoundCell:
    flags = {"hit": "start it with a cache", "retract": "use a smaller pool"}
    return RoundCell(plan=PLAN, scenario=LIVE_SCENARIOS.load(scenario), flags=flags, wanted=wanted)


def result(observed: dict[str, int], **fields: object) -> RoundResult:
    return RoundResult(evidence=Evidence(schedules=1, requests=3, observed=observed), **fields)  # type: ignore[arg-type]


def finding(request: int, layer: int | None = 1, page: int | None = 2) -> Finding:
    return Finding(code="KV801", oracle="known-answers", message="m", request=request, layer=layer, page=page)


@pytest.mark.parametrize(
    ("observed", "fields", "reason"),
    [
        ({"token": 0, "hit": 1}, {}, "no token was judged"),
        ({"token": 9, "hit": 0}, {}, "hit: 0 of 1 requests"),
        ({"token": 9}, {}, "the server does not say how many requests there were; start it with a cache"),
        ({"token": 9, "hit": 1}, {"reasons": ("3 requests were refused",)}, "3 requests were refused"),
        ({"token": 9, "hit": 1, "hit-token": 5}, {"moved": {"hit-token": 0}}, "stood still or is not shown"),
    ],
)
def test_what_a_pass_lacks_is_the_reason(observed: dict[str, int], fields: dict[str, object], reason: str) -> None:
    each = progress()
    each.add(result(observed, **fields))
    row = each.result()
    assert (row.verdict, row.code) == (Verdict.UNKNOWN, "KV990") and reason in (row.reason or "")


def test_a_finding_ends_the_scenario_and_no_reason_hides_it() -> None:
    each = progress(wanted=5)
    each.add(result({"token": 0}, findings=(finding(1),), reasons=("something was refused",)))
    assert each.is_done
    assert (each.result().verdict, each.result().reason) == (Verdict.FAIL, None)


def test_rounds_that_are_missing_are_no_pass() -> None:
    each = progress(wanted=2)
    each.add(result({"token": 9, "hit": 1, "hit-token": 5}, moved={"hit-token": 0}))
    assert not each.is_done and each.result().verdict is Verdict.UNKNOWN
    each.add(result({"token": 9, "hit": 1, "hit-token": 5}, moved={"hit-token": 10}))
    assert each.is_done and each.result().verdict is Verdict.PASS, "a counter that moved in one round is no doubt"


def test_most_requests_name_the_place() -> None:
    assert common_place([finding(1), finding(2), finding(3, layer=0)]) == (1, 2, 2)
    assert common_place([finding(1), finding(1), finding(3, layer=0)]) is None
    assert common_place([finding(1), finding(2, layer=None), finding(3, layer=None)]) == (1, 2, 3)
    assert common_place([finding(1, page=None)]) is common_place([]) is None


@pytest.mark.parametrize(("loaded", "verdict"), [({"load-back": 4}, Verdict.PASS), ({}, Verdict.UNKNOWN)])
def test_a_scenario_with_several_kinds_of_evidence_needs_one_of_them(loaded: dict[str, int], verdict: Verdict) -> None:
    each = progress(scenario="hicache")
    each.add(result({"token": 9, "host-hit": 0, **loaded}))
    assert each.result().verdict is verdict


def begun(answer: object) -> LiveRunner:
    client = ScriptedClient(answer)  # type: ignore[arg-type]
    runner = LiveRunner(client, ALPHABET, timeout_s=5, sleep=lambda seconds: None)
    runner.begin(client.served(), names=3)
    return runner


def test_a_first_cold_request_that_is_wrong_is_judged_where_the_next_is_right() -> None:
    seen: list[Sending] = []

    def answer(sending: Sending) -> Answer | None:
        seen.append(sending)
        wrong = (ALPHABET.lost(2, None),) * len(sending.question.expected)
        return right(sending, tokens=wrong) if len(seen) == 1 else None

    done = begun(answer).run(PLAN)
    assert [each.code for each in done.findings] == ["KV801"]
    assert done.findings[0].request == seen[0].question.number


def test_a_server_that_is_wrong_from_the_first_token_on_three_times_serves_another_model() -> None:
    with pytest.raises(UsageError, match="3 cold requests"):
        begun(lambda sending: right(sending, tokens=(9,) * 8))


def test_a_server_that_counts_other_tokens_in_a_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="counted 99 tokens in a prompt"):
        begun(lambda sending: right(sending, prompt_tokens=99))


def test_a_round_of_a_right_server_has_no_finding_and_no_reason() -> None:
    done = begun(lambda sending: right(sending, cached=0)).run(PLAN)
    assert done.findings == () and done.reasons == ()
    assert done.evidence.observed["token"] > 100 and done.evidence.observed["hit"] == 0


def test_a_round_that_time_cut_short_is_told_and_no_reason_against_a_pass() -> None:
    prompts: list[tuple[int, ...]] = []

    def answer(sending: Sending) -> Answer:
        time.sleep(0.05)
        ids = sending.question.ids
        pairs = [zip(ids, row, strict=False) for row in prompts]
        alike = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]
        prompts.append(ids)
        return right(sending, cached=max(alike, default=0) // 16 * 16)

    runner = begun(answer)
    until = time.monotonic() + 2.0
    done = runner.run(dataclasses.replace(PLAN, requests=60, concurrency=1), until=until)
    assert done.reasons == ()
    assert "round 1 was cut short" in done.notes[0]
    each = progress()
    each.add(done)
    assert each.result().verdict is Verdict.PASS


def test_rounds_of_one_run_number_their_requests_on() -> None:
    numbers: list[int] = []
    runner = begun(lambda sending: numbers.append(sending.question.number))
    runner.run(PLAN)
    first = set(numbers)
    numbers.clear()
    runner.run(PLAN)
    assert first and numbers and not first & set(numbers)


def test_a_round_of_which_nothing_was_sent_is_no_pass() -> None:
    done = begun(lambda sending: right(sending, cached=16)).run(PLAN, until=0.0)
    assert "no request of a round was sent" in done.reasons[0]
