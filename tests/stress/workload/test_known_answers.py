"""The known-answer decoder on a pool by itself: right answers, and which row of which layer each of them needs."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from rigs.llama_forward import Cache
from rigs.qwen3_next_forward import Qwen3NextForward

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.events import Event
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.transfer.metadata import MetadataRow, metadata_fields
from kvcheck.core.model import FAMILIES
from kvcheck.core.model.qwen3_next import QWEN3_NEXT
from kvcheck.core.stress.workload.events import Saw, Verified
from kvcheck.core.stress.workload.handover import expected_row
from kvcheck.core.stress.workload.jobs import Job
from kvcheck.core.stress.workload.known_answers import KnownAnswerDecoder
from kvcheck.core.stress.workload.known_attention import Asking, HeadAttention, known_attention
from kvcheck.core.stress.workload.known_model import DeltaNet, asked, known_model, least_prompt
from kvcheck.core.stress.workload.passes import piece_of_tokens
from kvcheck.core.stress.workload.shapes import ANSWERING_SHAPES, shape

PROMPT, OUTPUT, CHUNK = 21, 14, 8
FIELDS = metadata_fields(16)
OWN, FAR, SHARED = 1, 2, 3
"""Requests that read themselves, that read far back, and that read what the second one brought."""
STATES = "qwen3-next-answers"
BACK_IN_STATE = 3


def job(request: int, prompt: int = PROMPT, output: int = OUTPUT, author: int | None = None) -> Job:
    """author: of the first tokens of the prompt, where another request brought them."""
    shared = ((author, prompt // 2),) if author is not None else ()
    return Job(
        request=request,
        arrival=0,
        prompt_tokens=prompt,
        output_tokens=output,
        blocks=(*shared, (request, prompt - sum(count for _, count in shared))),
        wants_logprobs=False,
        speculative=False,
        wants_hidden=False,
    )


class Server:
    """Requests on one pool, computed one after another."""

    def __init__(self, name: str, *jobs: Job, from_host: range = range(0)) -> None:
        """from_host: pages of each request that count as loaded."""
        self.shape = shape(name)
        backend = EagerBackend()
        sizes = PoolSizes(
            pages=40, requests=4, max_tokens=64, window_pages=40 if self.shape.window_layers else 0, state_slots=4
        )
        self.pool = KVPool(self.shape, sizes, backend=backend)
        self.events: list[Event] = []
        self.jobs = {each.request: each for each in jobs}
        self.decoder = KnownAnswerDecoder(
            self.pool, backend, jobs, self.events.append, FIELDS, {}, host_pages=lambda request, first: from_host
        )
        self.holdings: dict[int, Holding] = {}

    def passed(self, stops: dict[int, int]) -> dict[int, int]:
        """One pass in which each request goes on to a length. Returns what each samples."""
        chunks = []
        for request, stop in stops.items():
            if request not in self.holdings:
                opened = self.pool.open(request)
                assert opened is not None
                self.holdings[request] = opened
            holding = self.holdings[request]
            assert self.pool.grow(holding, stop, query=holding.committed)
            chunks.append(Chunk(request, holding, holding.committed, stop))
        self.decoder.forward(chunks)
        for chunk in chunks:
            self.pool.commit(chunk.holding, chunk.stop)
            self.pool.evict_window(chunk.holding, chunk.stop)
        return dict(zip(stops, self.decoder.collect(), strict=True))

    def prefill(self, *requests: int) -> dict[int, int]:
        """All prompts in chunks. Returns the first tokens."""
        tokens: dict[int, int] = {}
        while left := {each: at for each in requests if (at := self._next(each)) is not None}:
            tokens |= self.passed(left)
        return tokens

    def _next(self, request: int) -> int | None:
        committed = self.holdings[request].committed if request in self.holdings else 0
        prompt = self.jobs[request].prompt_tokens
        return min(prompt, committed + CHUNK) if committed < prompt else None

    def decode(self, first: dict[int, int]) -> dict[int, tuple[int, ...]]:
        """The whole output of each request, after its first token."""
        said = {request: [token] for request, token in first.items()}
        while left := [each for each in said if len(said[each]) < self.jobs[each].output_tokens]:
            sampled = self.passed({each: self.holdings[each].committed + 1 for each in left})
            for request, token in sampled.items():
                said[request].append(token)
        return {request: tuple(tokens) for request, tokens in said.items()}

    def words(self, layer: int, buffer: str, request: int, position: int) -> torch.Tensor:
        """The row of a request's token in the pool."""
        spec = next(each for each in self.pool.specs if layer in each.layers)
        holding = self.holdings[request]
        pages = holding.window_pages if spec.name == "window" else holding.pages
        loc = int(pages[position // self.pool.page_size]) * self.pool.page_size + position % self.pool.page_size
        for packed in (each for each in spec.buffers if each.pieces):
            for piece in (each for each in packed.pieces if each.name == buffer):
                words = self.pool.sets[spec.name].write_view(packed.name)[spec.layers.index(layer)]
                return piece_of_tokens(words, piece, self.pool.page_size)[divmod(loc, self.pool.page_size)]
        return self.pool.sets[spec.name].write_view(buffer)[spec.layers.index(layer), loc]


@pytest.mark.parametrize("name", ANSWERING_SHAPES)
def test_answers_are_those_that_follow_from_the_prompts(name: str) -> None:
    server = Server(name, job(OWN), job(FAR), job(SHARED, author=FAR))
    said = server.decode(server.prefill(OWN, FAR, SHARED))
    model = known_model(server.shape)
    assert said == {each: model.answers(server.jobs[each]) for each in (OWN, FAR, SHARED)}
    back = {each: max(model.distances(server.jobs[each])) for each in said}
    far = server.shape.window - 1 if server.shape.window_layers else 5
    assert (back[OWN], back[FAR]) == (BACK_IN_STATE if name == STATES else 0, far)
    assert PROMPT // 2 < back[SHARED] < PROMPT - 2, "a mark that the other one brought"
    if name != STATES:
        assert len(set(said[FAR])) == far + 1, "as many values as stand between a token and what it reads"
    verified = [event for event in server.events if isinstance(event, Verified)]
    assert {event.buffer for event in verified} == {buffer.name for _, buffer in server.pool.buffers()}


@pytest.mark.parametrize("name", ANSWERING_SHAPES)
@pytest.mark.parametrize("request_id", [OWN, FAR, SHARED])
def test_a_row_that_a_token_reads_decides_it_in_every_layer(name: str, request_id: int) -> None:
    preset, jobs = shape(name), (job(OWN), job(FAR), job(SHARED, author=FAR))
    model = known_model(preset)
    right = model.answers(jobs[request_id - 1])
    for layer, back in enumerate(model.distances(jobs[request_id - 1])):
        if layer in preset.state_layers:
            continue
        for buffer in {"mla": ["latent"], "nsa": ["latent", "key", "scale"]}.get(preset.family, ["v"]):
            server = Server(name, *jobs)
            server.prefill(OWN, FAR, SHARED)
            server.words(layer, buffer, request_id, PROMPT - back).zero_()
            said = server.passed({request_id: server.holdings[request_id].committed + 1})[request_id]
            # The row that a request reads itself by is written by the pass that reads it.
            assert (said == right[1]) == (back == 0), (layer, buffer)


@pytest.mark.parametrize("request_id", [OWN, FAR])
@pytest.mark.parametrize("buffer", ["conv", "ssm"])
def test_a_state_decides_the_next_token_in_every_layer(request_id: int, buffer: str) -> None:
    for local in range(len(shape(STATES).state_layers)):
        server = Server(STATES, job(OWN), job(FAR))
        server.prefill(OWN, FAR)
        states = server.pool.sets["state"].write_view(buffer)[local]
        other = server.holdings[OWN + FAR - request_id].state_slot
        states[server.holdings[request_id].state_slot] = states[other]
        said = server.passed(dict.fromkeys((OWN, FAR), PROMPT + 1))
        right = {each: known_model(server.shape).answers(job(each))[1] for each in (OWN, FAR)}
        assert {each for each in said if said[each] != right[each]} == {request_id}, local


def test_a_state_layer_computes_what_the_plain_forward_does() -> None:
    preset = shape(STATES)
    model = known_model(preset)
    config = QWEN3_NEXT.config(model.parameters)
    plain = Qwen3NextForward(config, QWEN3_NEXT.tensors(model.parameters), torch.float32)
    x = model.tensors["model.embed_tokens.weight"][torch.from_numpy(model.prompt(job(FAR)))]
    state = {"conv": torch.zeros(preset.conv_dim * 3 // 2, dtype=torch.int64)}
    state["ssm"] = torch.zeros(4 * 128 * 128 // 2, dtype=torch.int64)
    cache, net = Cache([], [], []), DeltaNet(model, preset)
    for start, stop in ((0, 8), (8, 9), (9, PROMPT)):
        added, state = net.added(0, model.normed(x[start:stop]), state, times=1)
        wanted = plain.attended(0, x[start:stop], torch.arange(start, stop), cache, 0)
        assert torch.allclose(added, wanted, rtol=1e-4, atol=1e-4)
        assert torch.allclose(state["conv"].view(torch.float32).view(-1, 3), cache.keys[0].T, rtol=1e-5)
        assert torch.allclose(state["ssm"].view(torch.float32), cache.values[0].flatten(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ANSWERING_SHAPES)
def test_a_query_that_is_turned_back_asks_as_weights_for_that_distance_do(name: str) -> None:
    preset, back = shape(name), 5
    model = known_model(preset)
    told = Server(name, job(FAR)).pool.attention
    far = copy.copy(model)
    far.tensors = {
        key: torch.from_numpy(np.ascontiguousarray(each))
        for key, each in FAMILIES.load(model.family).tensors(dataclasses.replace(model.parameters, distance=back))
    }
    x = model.normed(model.tensors["model.embed_tokens.weight"][torch.from_numpy(model.prompt(job(FAR)))])
    positions = torch.arange(PROMPT)
    hidden = positions[None] > positions[:, None]
    for layer in sorted({*preset.full_layers, *preset.window_layers}):
        mine, other = known_attention(model, preset, told), known_attention(far, preset, told)
        rows = mine.stored(layer, x, positions)
        written = other.stored(layer, x, positions)
        assert all(torch.equal(rows[key], written[key]) for key in rows), "keys and values serve all requests"
        got = mine.added(layer, Asking(x, positions - back, hidden), rows)[2 + back :]
        wanted = other.added(layer, Asking(x, positions, hidden), rows)[2 + back :]
        assert wanted.abs().max() > 0.5
        assert torch.allclose(got, wanted, atol=1e-3)


@pytest.mark.parametrize("page", range(PROMPT // 8 + 1))
def test_rows_of_the_host_are_counted_where_an_answer_reads_them(page: int) -> None:
    """A request that reads 5 back with its first answer reads token 15, then 16 and so on; a page has 8.

    A token has 132 bytes of an index page, which are 16 whole words.
    """
    server = Server("deepseek-v3.2-answers", job(FAR, output=5), from_host=range(page, page + 1))
    server.decode(server.prefill(FAR))
    counted = dict.fromkeys(("latent", "index_k_with_scale"), 0)
    for event in server.events:
        if isinstance(event, Verified) and event.buffer.startswith("host:"):
            counted[event.buffer.removeprefix("host:")] += event.words
    rows = {1: 1, 2: 4}.get(page, 0) * 2
    assert counted == {"latent": rows * 576 * 4 // 8, "index_k_with_scale": rows * 16}


@pytest.mark.parametrize(("prompt", "rows"), [(PROMPT, 0), (9, 3)])
def test_a_state_of_the_host_counts_while_tokens_before_it_are_read(prompt: int, rows: int) -> None:
    """Of a prompt of 9 tokens behind a page, token 8 reads token 5, and the two tokens after it read 6 and 7."""
    server = Server(STATES, job(FAR, prompt=prompt), from_host=range(1))
    server.decode(server.prefill(FAR))
    words = [each.words for each in server.events if isinstance(each, Verified) and each.buffer == "host:ssm"]
    assert words == [3 * 4 * 128 * 128 * 4 // 8] * rows


def test_rows_of_eight_bits_come_back_as_they_were_with_their_scales() -> None:
    preset = shape("llama-fp8-answers")
    server = Server(preset.name, job(FAR))
    model, told = known_model(preset), server.pool.attention
    attention = known_attention(model, preset, told)
    tokens = torch.from_numpy(model.prompt(job(FAR)))
    x = model.normed(model.tensors["model.embed_tokens.weight"][tokens])
    rows = attention.stored(0, x, torch.arange(PROMPT))
    assert isinstance(attention, HeadAttention)
    keys, values = attention.keys_and_values(rows)
    plain = known_attention(model, dataclasses.replace(preset, scale_block=0, kv_dtype=torch.float32), told)
    assert isinstance(plain, HeadAttention)
    wide_keys, wide_values = plain.keys_and_values(plain.stored(0, x, torch.arange(PROMPT)))
    for got, wide in ((keys, wide_keys), (values, wide_values)):
        # E4M3 has 3 bits behind the leading one; below 2**-6 its steps are equal. Scales here are 2**-7 at the most.
        assert torch.allclose(got, wide, rtol=2**-4, atol=2**-10 * 2**-7)
    assert (rows["k_scale"].view(torch.float32) < 2**-6).all(), "a scale that is applied twice drowns a lookup"


def test_a_request_goes_on_from_the_token_that_came_with_its_prompt() -> None:
    server = Server("llama-answers", job(FAR))
    right = known_model(server.shape).answers(job(FAR))
    first = server.prefill(FAR)[FAR]
    assert server.decoder.metadata(FAR)["output_ids"].tolist() == [right[0]] == [first]
    row = MetadataRow(expected_row(job(FAR), first, FIELDS), FIELDS)
    server.decoder.join(FAR, row)
    assert not [event for event in server.events if isinstance(event, Saw)]
    row.field("output_ids")[0] = right[0] + 1
    server.decoder.join(FAR, row)
    assert [event.mismatch.buffer for event in server.events if isinstance(event, Saw)] == ["metadata.output_ids"]
    assert server.passed({FAR: PROMPT + 1})[FAR] == right[1], "a token that reads far back does not read that one"


def test_a_prompt_that_asks_nothing_is_made_longer_and_otherwise_refused() -> None:
    preset = shape("gpt-oss-answers")
    least = least_prompt(preset)
    assert least == 2 + 10
    short = job(4, prompt=3, output=20, author=1)
    longer = asked(short, preset)
    assert (longer.prompt_tokens, longer.total_tokens) == (least, short.total_tokens)
    assert longer.blocks == ((1, 1), (4, least - 1))
    assert asked(dataclasses.replace(short, output_tokens=2), preset).output_tokens == 1
    only = dataclasses.replace(short, blocks=((1, 3),))
    assert asked(only, preset).blocks == ((1, 3), (4, least - 3))
    assert asked(job(4, prompt=least), preset) == job(4, prompt=least)
    with pytest.raises(UsageError, match=f"at least {least} tokens; got a prompt of 3"):
        known_model(preset).prompt(short)


def test_a_shared_prefix_is_the_same_tokens() -> None:
    model = known_model(shape("llama-answers"))
    mine, theirs = model.prompt(job(3, author=2)), model.prompt(job(2))
    assert np.array_equal(mine[: PROMPT // 2], theirs[: PROMPT // 2])
    assert not np.array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("glm-5.1-tiny", "cannot hold the rows of deepseek-v32; expected latent_dim 576, got 16"),
        ("deepseek-v3-tiny", "cannot hold the rows of deepseek-v3; expected latent_dim 576, got 16"),
        ("qwen3-next-tiny", "head-dim of a known-answer model is from 64 to 256; got 16"),
        ("llama-3-tiny", "head of 8 dimensions"),
    ],
)
def test_a_shape_that_is_too_narrow_is_refused(name: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        known_model(shape(name))
