"""Calls of each engine, and answers that are timed as they come."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from fakes.server import Fake
from fakes.speech import KEY
from rigs.asked import ALPHABET, COUNT, QUESTIONS, SPOKEN, WORDS, ask, client, http
from rigs.raw_server import HANG, RawServer, stream, whole

from kvcheck.core.live.clients import detect
from kvcheck.core.live.clients.asking import CompletionCall, converse
from kvcheck.core.live.clients.client import Trouble
from kvcheck.core.live.clients.openai import take_completion
from kvcheck.core.live.clients.reading import PartialAnswer
from kvcheck.core.live.exchange import Answer, End, Sending

PROPS = {"default_generation_settings": {"n_ctx": 512}, "total_slots": 2, "build_info": "b1", "model_alias": "m"}
ENGINES = (*SPOKEN, "openai", "llamacpp")


@pytest.mark.parametrize("engine", SPOKEN)
def test_an_engine_is_known_by_what_it_answers(engine: str) -> None:
    with Fake(ALPHABET, engine) as fake:
        assert detect(http(fake.url)) == engine
    with Fake(ALPHABET, engine, fault="needs-key") as fake:
        assert detect(http(fake.url, key=KEY)) == engine
        with pytest.raises(Trouble, match="status 401") as caught:
            detect(http(fake.url, key="another-" + KEY))
        assert KEY not in str(caught.value)


def test_other_servers_are_known_too() -> None:
    with RawServer(paths={"/props": whole(PROPS)}) as server:
        assert detect(http(server.url)) == "llamacpp"
    with RawServer(paths={"/v1/models": whole({"data": [{"id": "m", "owned_by": "me"}]})}) as server:
        assert detect(http(server.url)) == "openai"
    with RawServer(whole(b"<html>")) as server, pytest.raises(Trouble, match="expected JSON"):
        detect(http(server.url))
    with RawServer(whole([1])) as server, pytest.raises(Trouble, match="as none of sglang"):
        detect(http(server.url))
    with RawServer(HANG) as server, pytest.raises(Trouble, match="no byte"):
        detect(http(server.url))


def test_a_server_says_what_it_is() -> None:
    with Fake(ALPHABET, "sglang", pool=1600) as fake:
        served = client("sglang", fake.url).served()
        assert (served.version, served.model, served.longest) == ("0.5.23", "m", 512)
        assert (served.pool, served.page, served.has_host_tier, served.has_storage) == (1600, 16, False, False)
        assert served.has_priorities is True and served.mode is None and served.bootstrap is None
        assert KEY not in repr(served)
    with Fake(ALPHABET, "vllm", pool=1600) as fake:
        served = client("vllm", fake.url).served()
        assert (served.version, served.model, served.longest, served.pool) == ("0.32.0", "m", 512, 1600)
        assert (served.page, served.has_host_tier, served.has_priorities) == (16, None, None)
    with RawServer(paths={"/props": whole(PROPS)}) as server:
        served = client("llamacpp", server.url).served()
        assert (served.version, served.model, served.longest, served.pool) == ("b1", "m", 512, None)


@pytest.mark.parametrize(
    ("engine", "paths"),
    [
        ("sglang", {"/server_info": {"max_total_num_tokens": "many"}}),
        ("sglang", {"/model_info": {"served_model_name": 7}}),
        ("sglang", {"/model_info": {}, "/v1/models": {"data": 3}}),
        ("sglang", {"/v1/models": {"data": []}}),
        ("vllm", {"/v1/models": {"data": []}}),
        ("vllm", {"/v1/models": {"data": [{"id": {}}]}}),
        ("vllm", {}),
        ("openai", {"/v1/models": {"data": [7]}}),
        ("llamacpp", {"/props": [1]}),
    ],
)
def test_what_a_server_says_of_itself_is_not_trusted(engine: str, paths: dict[str, object]) -> None:
    given = {path: whole(body) for path, body in paths.items()}
    with RawServer(paths=given) as server, pytest.raises(Trouble) as caught:
        client(engine, server.url).served()
    assert "\n" not in str(caught.value)


def test_counters_of_several_addresses_are_summed() -> None:
    text = 'vllm:prompt_tokens_cached_by_source_total{{source="{}"}} {}\n'
    metrics = text.format("disk", 3) + text.format("external_unspecified", 4) + text.format("host", 5)
    config = 'vllm:cache_config_info{block_size="32"} 1\nvllm:kv_block_lifetime_seconds_count 2\n'
    answer = whole((metrics + config).encode(), kind="text/plain")
    with RawServer(paths={"/metrics": answer}) as one, RawServer(paths={"/p/metrics": answer}) as other:
        asked = client("vllm", one.url, one.url, f"{other.url}/p/metrics")
        read = asked.counters()
        assert read is not None
        counted = {kind: [read[name] for name in names if name in read] for kind, names in asked.counted.items()}
        assert counted == {"hit-token": [], "host-hit": [10], "storage-hit": [14], "evict": [2 * 32 * 2], "retract": []}
        with pytest.raises(Trouble, match="has no metrics"):
            client("vllm", one.url, one.url, f"{other.url}/elsewhere").counters()


def test_a_server_without_metrics_has_none_and_one_that_breaks_says_so() -> None:
    with RawServer(paths={}) as server:
        assert client("sglang", server.url).counters() is None
    with RawServer(whole(b"<html>it works</html>", kind="text/html")) as server, pytest.raises(Trouble, match="html"):
        client("sglang", server.url).counters()
    with RawServer(whole(b"", status="500 X")) as server, pytest.raises(Trouble, match="status 500"):
        client("sglang", server.url).counters()


@pytest.mark.parametrize("engine", SPOKEN)
def test_retraction_and_flushing_reach_the_engine(engine: str) -> None:
    with Fake(ALPHABET, engine) as fake:
        asked = client(engine, fake.url)
        assert [ask(asked, number).cached for number in (0, 3)] == [0, 80]
        asked.retract()
        asked.flush()
        assert ask(asked, 3).cached == 0
        called = [path for path, _ in fake.calls if "cache" in path or "generation" in path]
    assert (
        called
        == {
            "sglang": ["/pause_generation", "/continue_generation", "/flush_cache?timeout=30"],
            "vllm": ["/reset_prefix_cache?reset_running_requests=true", "/reset_prefix_cache"],
        }[engine]
    )


@pytest.mark.parametrize("engine", SPOKEN)
def test_a_cache_that_cannot_be_emptied_is_trouble(engine: str) -> None:
    with Fake(ALPHABET, engine) as fake:
        fake.model.admit("runs", list(QUESTIONS[0].ids), 3)
        with pytest.raises(Trouble, match=r"POST /(flush|reset)"):
            client(engine, fake.url).flush()


def test_a_pause_is_always_followed_by_a_call_to_go_on() -> None:
    with RawServer(paths={"/continue_generation": whole({})}) as server:
        with pytest.raises(Trouble, match="/pause_generation: status 404"):
            client("sglang", server.url).retract()
        assert [head.split()[1] for head, _ in server.asked] == ["/pause_generation", "/continue_generation"]
    with RawServer(paths={"/pause_generation": whole({})}) as server, pytest.raises(Trouble, match="stays paused"):
        client("sglang", server.url).retract()
    with RawServer(paths={}) as server, pytest.raises(Trouble, match="VLLM_SERVER_DEV_MODE"):
        client("vllm", server.url).retract()


def timed(url: str, engine: str, number: int = 0) -> Answer:
    return client(engine, url).ask(Sending(question=QUESTIONS[number], rid=f"r{number}", is_timed=True))


def piece(ids: list[int], finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"token_ids": ids, "finish_reason": finish}]}


def by_clock(*events: object, ends: bool = True) -> Answer:
    """The answer to these events, each of which is read a second after the one before."""
    seconds = count(100)
    with RawServer(stream(*events, ends=ends)) as server:
        call = CompletionCall(
            server=http(server.url),
            path="/v1/completions",
            body={},
            streamed={"stream": True},
            take=lambda event, reply: take_completion(event, reply, WORDS.get),
        )
        return converse(call, None, PartialAnswer(), is_timed=True, clock=lambda: float(next(seconds)))


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
