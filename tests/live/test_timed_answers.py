"""Answers that are timed: a stream whose events are noted by a clock that a test turns."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from fakes.server import Fake
from rigs.asked import ALPHABET, COUNT, QUESTIONS, SPOKEN, WORDS, client, http
from rigs.raw_server import RawServer, stream, whole

from kvcheck.core.live.clients.asking import Call, converse
from kvcheck.core.live.clients.completions import take_completion
from kvcheck.core.live.clients.reading import Reply
from kvcheck.core.live.exchange import Answer, End, Sending

ENGINES = (*SPOKEN, "openai", "llamacpp")


def timed(url: str, engine: str, number: int = 0) -> Answer:
    return client(engine, url).ask(Sending(question=QUESTIONS[number], rid=f"r{number}", is_timed=True))


def piece(ids: list[int], finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"token_ids": ids, "finish_reason": finish}]}


def by_clock(*events: object, ends: bool = True) -> Answer:
    """The answer to these events, each of which is read a second after the one before."""
    seconds = count(100)
    with RawServer(stream(*events, ends=ends)) as server:
        call = Call(
            server=http(server.url),
            path="/v1/completions",
            body={},
            streamed={"stream": True},
            take=lambda event, reply: take_completion(event, reply, WORDS.get),
        )
        return converse(call, None, Reply(), is_timed=True, clock=lambda: float(next(seconds)))


def test_the_first_and_the_last_event_with_tokens_are_noted() -> None:
    answer = by_clock(piece([]), piece([5, 6]), piece([7]), piece([8], "length"), {"choices": [], "usage": None})
    assert (answer.end, answer.tokens) == (End.DONE, (5, 6, 7, 8))
    # began at 100; the events were read at 101 to 105, the first without a token and the last without one
    assert (answer.began_s, answer.first_s, answer.last_s, answer.ended_s) == (100.0, 102.0, 104.0, 106.0)
    assert answer.first_tokens == 2


def test_events_that_were_kept_back_and_came_together_are_one() -> None:
    """As a proxy that buffers sends them: no time lies between them, and none is made up."""
    kept = b"".join(f"data: {json.dumps(piece(ids))}\n\n".encode() for ids in ([5], [6], [7]))
    answer = by_clock(kept, piece([8]), piece([9], "length"))
    assert (answer.first_s, answer.first_tokens, answer.last_s) == (101.0, 3, 103.0)
    whole_answer = by_clock(kept + f"data: {json.dumps(piece([8], 'length'))}\n\n".encode())
    assert (whole_answer.first_tokens, whole_answer.end) == (4, End.DONE), "it was not streamed"


@pytest.mark.parametrize(
    ("events", "end", "first_s"),
    [
        ([piece([5])], End.CUT, 101.0),
        ([piece([]), {"error": {"message": "gone"}}], End.REFUSED, None),
        ([piece([5]), {"choices": 3}], End.UNREADABLE, 101.0),
    ],
)
def test_a_stream_that_breaks_keeps_the_times_until_then(events: list[object], end: End, first_s: float | None) -> None:
    answer = by_clock(*events)
    assert (answer.end, answer.first_s) == (end, first_s)


@pytest.mark.parametrize("engine", SPOKEN)
def test_every_engine_streams_a_timed_answer_and_says_what_it_reused(engine: str) -> None:
    with Fake(ALPHABET, engine) as fake:
        given = [timed(fake.url, engine, number) for number in range(4)]
    for number, answer in enumerate(given):
        assert (answer.end, answer.tokens) == (End.DONE, QUESTIONS[number].expected)
        assert answer.first_s is not None and answer.last_s is not None
        assert answer.began_s <= answer.first_s <= answer.last_s <= answer.ended_s
        assert answer.first_tokens is not None and 0 < answer.first_tokens < COUNT
    assert [answer.cached for answer in given] == [0, 0, 0, 80]


def test_a_timed_request_asks_for_no_log_probabilities_where_tokens_come_as_ids() -> None:
    event: dict[str, dict[str, Any]] = {
        "sglang": {"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}, "completion_tokens": 1}},
        "vllm": piece([5], "length"),
        "openai": piece([5], "length"),
        "llamacpp": {"tokens": [5], "stop": True},
    }
    sent: dict[str, str] = {}
    for engine in ENGINES:
        paths = dict.fromkeys(("/generate", "/v1/completions", "/completion"), stream(event[engine]))
        with RawServer(paths={"/v1/models": whole({"data": [{"id": "m"}]}), **paths}) as server:
            assert timed(server.url, engine).tokens == (5,)
            sent[engine] = server.asked[-1][1]
    assert all('"stream": true' in body for body in sent.values())
    assert "logprob" not in sent["sglang"] and "logprob" not in sent["vllm"]
    assert '"n_probs": 0' in sent["llamacpp"]
    # ids are no field of the plain call: there the words of the log-probabilities are the tokens
    assert '"logprobs": 1' in sent["openai"]
