"""Requests by clients, to a server that speaks as the engine does and to answers that are written out."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.server import BROKEN, Fake
from fakes.speech import KEY
from rigs.asked import ALPHABET, COUNT, QUESTIONS, SPOKEN, WORDS, ask, client, http, wrong
from rigs.raw_server import RawServer, stream, whole

from kvcheck.core.live.clients import PAIRS, asking
from kvcheck.core.live.clients.client import Reach, Trouble
from kvcheck.core.live.exchange import AbortRequest, End, Tier


@pytest.mark.parametrize("engine", SPOKEN)
def test_a_right_server_gives_right_tokens_and_says_what_it_reused(engine: str) -> None:
    with Fake(ALPHABET, engine) as fake:
        asked = client(engine, fake.url)
        given = [ask(asked, number) for number in range(4)]
    for number, answer in enumerate(given):
        assert answer.end is End.DONE and wrong(answer, number) == 0
        assert answer.logprobs is not None and len(answer.logprobs) == COUNT and max(answer.logprobs) < 0
        assert answer.prompt_tokens == len(QUESTIONS[number].ids)
        assert answer.finish == "length" and answer.reason is None and answer.after_abort is None
        assert 0 < answer.began_s <= answer.ended_s
    assert [answer.cached for answer in given] == [0, 0, 0, 80]
    if engine == "sglang":
        assert given[3].cached_by == {Tier.DEVICE: 80, Tier.HOST: 0}
        assert given[0].cached_by == {Tier.DEVICE: 0, Tier.HOST: 0} and given[0].retractions == 0


@pytest.mark.parametrize("engine", SPOKEN)
@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        ("hang", [End.SILENT] * 2),
        ("hang-once", [End.DONE, End.DONE, End.SILENT, End.DONE]),
        ("dies", [End.DONE, End.DONE, End.DONE, End.UNREACHED]),
        ("some-500", [End.DONE, End.DONE, End.REFUSED, End.DONE]),
        ("garbage", [End.UNREADABLE] * 2),
        ("half", [End.CUT] * 2),
        ("slow", [End.DONE]),
        ("needs-key", [End.REFUSED]),
    ],
)
def test_each_broken_server_has_its_end(engine: str, fault: str, ends: list[End]) -> None:
    assert fault in BROKEN
    with Fake(ALPHABET, engine, fault=fault) as fake:
        asked = client(engine, fake.url)
        given = [ask(asked, number) for number in range(len(ends))]
        assert asked.is_alive() is (fault != "dies"), "who asks for a key is up"
    assert [answer.end for answer in given] == ends
    assert all((answer.reason is None) is (answer.end is End.DONE) for answer in given)
    assert fault != "slow" or given[0].ended_s - given[0].began_s >= 0.2


def test_a_server_that_is_gone_is_not_reached() -> None:
    with Fake(ALPHABET) as fake:
        url = fake.url
    assert ask(client("sglang", url)).end is End.UNREACHED
    with pytest.raises(Trouble):
        client("sglang", url).served()
    assert not client("sglang", url).is_alive()


@pytest.mark.parametrize("engine", SPOKEN)
def test_a_closed_connection_keeps_the_tokens_that_arrived(engine: str) -> None:
    with Fake(ALPHABET, engine, token_s=0.02) as fake:
        asked = client(engine, fake.url)
        some, none, all_of_it = (ask(asked, abort=AbortRequest(after=after)) for after in (3, 0, 99))
    assert some.end is End.ABORTED and some.tokens == QUESTIONS[0].expected[:3] and some.reason is None
    assert none.end is End.ABORTED and none.tokens == ()
    assert all_of_it.end is End.DONE and wrong(all_of_it, 0) == 0 and all_of_it.prompt_tokens == 84


@pytest.mark.parametrize("engine", SPOKEN)
def test_an_abort_by_the_engines_call_says_what_came_long_after(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "GRACE_S", 0.05)
    with Fake(ALPHABET, engine, token_s=0.02) as fake:
        answer = ask(client(engine, fake.url), abort=AbortRequest(after=3, by_call=True))
    assert answer.end is End.ABORTED and answer.finish == "abort"
    assert 3 <= len(answer.tokens) < COUNT and answer.tokens == QUESTIONS[0].expected[: len(answer.tokens)]
    assert answer.after_abort is not None and answer.after_abort <= len(answer.tokens) - 3
    late = {}
    for token_s in (0.02, 0.0):
        with Fake(ALPHABET, engine, fault="after-abort", token_s=token_s) as fake:
            answer = ask(client(engine, fake.url), abort=AbortRequest(after=3, by_call=True))
        assert answer.end is End.DONE
        late[token_s] = answer.after_abort or 0
    assert late[0.02] > 5 and late[0.0] == 0, "tokens soon after an abort may have been made before it"


def test_a_call_to_abort_that_fails_is_told_and_the_answer_goes_on() -> None:
    events = [{"choices": [{"token_ids": [7], "finish_reason": None}]}] * 3
    last = {"choices": [{"token_ids": [], "finish_reason": "length"}]}
    paths = {"/v1/completions": stream(*events, last), "/v1/models": whole({"data": [{"id": "m"}]})}
    with RawServer(paths=paths) as server:
        of_vllm, of_openai = (
            ask(client(name, server.url), abort=AbortRequest(after=1, by_call=True)) for name in ("vllm", "openai")
        )
    assert of_vllm.end is of_openai.end is End.DONE and of_vllm.tokens == of_openai.tokens == (7, 7, 7)
    assert "status 404" in str(of_vllm.reason) and of_openai.reason is not None and of_vllm.after_abort is None


def test_what_is_sent_reads_the_cache_and_can_be_retracted() -> None:
    sent = {}
    for engine in SPOKEN:
        with Fake(ALPHABET, engine) as fake:
            ask(client(engine, fake.url), priority=2)
            (sent[engine],) = fake.bodies
    sglang, vllm = sent["sglang"], sent["vllm"]
    assert sglang["input_ids"] == vllm["prompt"] == list(QUESTIONS[0].ids)
    assert sglang["logprob_start_len"] == -1 and "ignore_eos" not in sglang["sampling_params"]
    assert sglang["sampling_params"] == {"temperature": 0.0, "max_new_tokens": COUNT}
    assert not [name for name in vllm if name.startswith("prompt_logprobs") or name == "echo"]
    assert vllm["temperature"] == 0.0 and vllm["max_tokens"] == COUNT and vllm["ignore_eos"] is True
    assert (sglang["priority"], vllm["priority"]) == (2, -2)
    assert (sglang["rid"], vllm["request_id"]) == ("r0", "r0")


GOOD: dict[str, dict[str, Any]] = {
    "sglang": {
        "output_ids": [5, 6],
        "meta_info": {
            "finish_reason": {"type": "length", "status_code": None},
            "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
            **{"completion_tokens": 2, "prompt_tokens": 4, "cached_tokens": 3, "num_retractions": 1},
            "cached_tokens_details": {"device": 1, "host": 2, "storage": 0, "storage_backend": "file"},
        },
    },
    "vllm": {
        "choices": [{"token_ids": [5, 6], "finish_reason": "length", "logprobs": {"token_logprobs": [-0.5, -0.25]}}],
        "usage": {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}},
    },
    "llamacpp": {
        **{"tokens": [5, 6], "stop": True, "stop_type": "limit", "tokens_evaluated": 4, "timings": {"cache_n": 3}},
        "completion_probabilities": [{"logprob": -0.5}, {"logprob": -0.25}],
    },
}
GOOD["openai"] = GOOD["vllm"]
STRANGE = [True, -1, 1.5, 10**30, "7", [], {}, [[]], "x" * 10**5, float("nan"), -float("inf")]


NO_COUNTS = STRANGE[:5]
TOKENS = frozenset({"output_ids", "token_ids", "tokens"})
SIZES = frozenset({"prompt_tokens", "completion_tokens", "tokens_evaluated", "num_retractions"})
CACHED = frozenset({"cached_tokens", "cache_n", "device", "host", "storage"})


def changed(good: Any) -> Iterator[tuple[tuple[Any, ...], object, Any]]:
    """(field, strange value, answer): each field of an answer, and all of it, replaced by each strange value."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield from places(value[key], (*path, key))

    for path in places(good, ()):
        for strange in [*STRANGE, None]:
            held = {"all": copy.deepcopy(good)}
            at: Any = held
            for key in ("all", *path)[:-1]:
                at = at[key]
            at[("all", *path)[-1]] = strange
            yield path, strange, held["all"]


@pytest.mark.parametrize("engine", GOOD)
def test_a_strange_value_anywhere_is_unreadable_or_not_said(engine: str) -> None:
    models = [whole({"data": [{"id": "m"}]})] if engine in ("vllm", "openai") else []
    cases = list(changed(GOOD[engine]))
    with RawServer(*models, *(whole(answer) for _, _, answer in cases)) as server:
        asked = client(engine, server.url)
        given = [ask(asked) for _ in cases]
    seen = set()
    for (path, strange, _), answer in zip(cases, given, strict=True):
        seen.add(answer.end)
        assert answer.end in (End.UNREADABLE, End.DONE), (path, strange)
        assert (answer.reason is None) is (answer.end is End.DONE) and len(answer.reason or "") < 400
        assert answer.logprobs is None or len(answer.logprobs) == len(answer.tokens)
        is_count = not (TOKENS | SIZES | CACHED).isdisjoint(path) and any(strange is each for each in NO_COUNTS)
        assert not is_count or answer.end is End.UNREADABLE, (path, strange)
        assert path or answer.end is End.UNREADABLE
    assert seen == {End.UNREADABLE, End.DONE}


@pytest.mark.parametrize("engine", GOOD)
def test_a_good_answer_is_read(engine: str) -> None:
    models = [whole({"data": [{"id": "m"}]})] if engine in ("vllm", "openai") else []
    with RawServer(*models, whole(GOOD[engine])) as server:
        answer = ask(client(engine, server.url))
    assert (answer.end, answer.tokens, answer.logprobs) == (End.DONE, (5, 6), (-0.5, -0.25))
    assert (answer.cached, answer.prompt_tokens) == (3, 4)
    assert answer.finish == ("limit" if engine == "llamacpp" else "length")
    if engine == "sglang":
        assert answer.cached_by == {Tier.DEVICE: 1, Tier.HOST: 2, Tier.STORAGE: 0} and answer.retractions == 1


def of_sglang(ids: list[int], total: int | None, finish: str | None = None, **more: object) -> dict[str, object]:
    reason = None if finish is None else {"type": finish, **more}
    return {"output_ids": ids, "meta_info": {"completion_tokens": total, "finish_reason": reason}}


@pytest.mark.parametrize(
    ("events", "end", "tokens"),
    [
        ([of_sglang([5], 1), of_sglang([5, 6], 2), of_sglang([5, 6], 2, "length")], End.DONE, (5, 6)),
        ([of_sglang([5], 1), of_sglang([6], 2), of_sglang([], 2, "length")], End.DONE, (5, 6)),
        ([of_sglang([5], 1), of_sglang([6], 2), of_sglang([6], 2, "abort")], End.ABORTED, (5, 6)),
        ([of_sglang([], 0, "abort", status_code=503, message="full")], End.REFUSED, ()),
        ([of_sglang([5], 1), of_sglang([7, 6], 2)], End.UNREADABLE, (5,)),
        ([of_sglang([5], 1), of_sglang([6], 9)], End.UNREADABLE, (5,)),
        ([of_sglang([5], 1), {"error": {"message": "gone"}}], End.REFUSED, (5,)),
        ([of_sglang([5], 1)], End.CUT, (5,)),
    ],
)
def test_a_stream_of_sglang_is_read_in_both_forms(events: list[object], end: End, tokens: tuple[int, ...]) -> None:
    with RawServer(stream(*events)) as server:
        answer = ask(client("sglang", server.url), abort=AbortRequest(after=99))
    assert (answer.end, answer.tokens) == (end, tokens)


@pytest.mark.parametrize(
    ("choice", "tokens"),
    [
        ({"token_ids": [5, 6], "text": "x"}, (5, 6)),
        ({"logprobs": {"tokens": ["token_id:5", "token_id:6"]}}, (5, 6)),
        ({"logprobs": {"tokens": ["<much>", " " + ALPHABET.words()[300]]}, "text": "x"}, (5, 300)),
        ({"text": f"<much> {ALPHABET.words()[300]}"}, (5, 300)),
        ({"text": f"<much>{ALPHABET.words()[300]}\n"}, (5, 300)),
        ({"text": ""}, ()),
        ({"text": "Once upon a time"}, None),
        ({"text": "node999999"}, None),
        ({"logprobs": {"tokens": ["token_id:-1"]}}, None),
        ({"logprobs": {"tokens": ["token_id:" + "9" * 5000]}}, None),
        ({}, None),
    ],
)
def test_tokens_come_as_ids_or_as_words_of_the_model(choice: dict[str, object], tokens: tuple[int, ...] | None) -> None:
    models, said = whole({"data": [{"id": "m"}]}), whole({"choices": [{**choice, "finish_reason": "length"}]})
    with RawServer(models, said) as server:
        answer = ask(client("openai", server.url))
    assert answer.end is (End.UNREADABLE if tokens is None else End.DONE)
    assert answer.tokens == (tokens or ())


def reached(*fakes: Fake) -> list[Reach]:
    return [Reach(server=http(fake.url), token_of=WORDS.get) for fake in fakes]


def test_a_pair_is_asked_with_one_room_and_says_what_the_prefill_server_reused() -> None:
    with Fake(ALPHABET, mode="prefill") as prefill, Fake(ALPHABET, mode="decode", token_s=0.005) as decode:
        reaches = reached(prefill, decode)
        pair = PAIRS.load("sglang")(prefill=reaches[0], decode=reaches[1])
        served = pair.served()
        assert served.mode == "pair" and served.bootstrap == ("127.0.0.1", 8998)
        answer = ask(pair)
        assert answer.end is End.DONE and wrong(answer, 0) == 0 and answer.cached == 0
        aborted = ask(pair, abort=AbortRequest(after=3))
        assert aborted.tokens == QUESTIONS[0].expected[:3] and aborted.reason is None
        rooms = [[body["bootstrap_room"] for body in fake.bodies] for fake in (prefill, decode)]
        assert rooms[0] == rooms[1] and len(set(rooms[0])) == 2
        assert pair.is_alive() and pair.counters() is not None
        pair.retract()
        assert "/pause_generation" not in [path for path, _ in prefill.calls]
        with pytest.raises(Trouble, match="no prefill server"):
            PAIRS.load("sglang")(prefill=reaches[1], decode=reaches[0]).served()


def test_a_pair_names_the_half_that_failed() -> None:
    with Fake(ALPHABET, mode="prefill", fault="garbage") as prefill, Fake(ALPHABET, mode="decode") as decode:
        reaches = reached(prefill, decode)
        answer = ask(PAIRS.load("sglang")(prefill=reaches[0], decode=reaches[1]))
    assert answer.end is End.DONE and answer.reason is not None and "prefill server: unreadable" in answer.reason


def test_a_key_is_in_no_reason_and_no_fact() -> None:
    with Fake(ALPHABET, fault="needs-key") as fake:
        given = ask(client("sglang", fake.url, key=KEY))
        assert given.end is End.DONE
        refused = ask(client("sglang", fake.url, key="other-key"))
    assert refused.end is End.REFUSED and refused.reason is not None
    assert "other-key" not in refused.reason and "<key>" in refused.reason
    assert KEY not in json.dumps([given.reason, refused.reason])


def test_a_request_that_hangs_at_a_prefill_server_holds_up_no_exit() -> None:
    with (
        Fake(ALPHABET, "sglang", mode="prefill", fault="hang") as prefill,
        Fake(ALPHABET, "sglang", mode="decode") as decode,
    ):
        reaches = reached(prefill, decode)
        pair = PAIRS.load("sglang")(prefill=reaches[0], decode=reaches[1])
        before = set(threading.enumerate())
        threading.Thread(target=ask, args=(pair,), daemon=True).start()
        while not prefill.bodies:
            time.sleep(0.01)
        assert all(thread.daemon for thread in threading.enumerate() if thread not in before)
