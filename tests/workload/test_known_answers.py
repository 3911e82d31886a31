"""The known-answer decoder on a pool by itself: right answers, and which row of which layer each of them needs.

Invariants:
- No scheduler and no target takes part: requests are computed chunk by chunk on an eager backend.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.transfer.metadata import MetadataRow, metadata_fields
from kvcheck.core.workload.events import Event, Saw, Verified
from kvcheck.core.workload.handover import expected_row
from kvcheck.core.workload.jobs import Job
from kvcheck.core.workload.known_answers import KnownAnswerDecoder
from kvcheck.core.workload.known_attention import known_attention
from kvcheck.core.workload.known_model import asked, known_model, least_prompt
from kvcheck.core.workload.shapes import ANSWERING_SHAPES, shape

PROMPT, OUTPUT, CHUNK = 21, 14, 8
FIELDS = metadata_fields(16)
FAR_BACK = {"llama-answers": 5, "llama-fp8-answers": 5, "deepseek-answers": 5, "gpt-oss-answers": 9}
OWN, FAR = 1, 2
"""Requests that read themselves, and that read far back."""


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

    def __init__(self, name: str, *jobs: Job) -> None:
        self.shape = shape(name)
        backend = EagerBackend()
        sizes = PoolSizes(pages=40, requests=4, max_tokens=64, window_pages=40 if self.shape.window_layers else 0)
        self.pool = KVPool(self.shape, sizes, backend=backend)
        self.events: list[Event] = []
        self.jobs = {each.request: each for each in jobs}
        self.decoder = KnownAnswerDecoder(self.pool, backend, jobs, self.events.append, FIELDS, {})
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
        return self.pool.sets[spec.name].write_view(buffer)[spec.layers.index(layer), loc]


@pytest.mark.parametrize("name", ANSWERING_SHAPES)
def test_answers_are_those_that_follow_from_the_prompts(name: str) -> None:
    server = Server(name, job(OWN), job(FAR), job(3, author=FAR))
    said = server.decode(server.prefill(OWN, FAR, 3))
    assert said == {each: known_model(server.shape).answers(server.jobs[each]) for each in (OWN, FAR, 3)}
    period = known_model(server.shape).readers[0].distance + 1
    assert len(set(said[FAR])) == period, "as many values as stand between a token and what it reads"
    verified = [event for event in server.events if isinstance(event, Verified)]
    assert {event.buffer for event in verified} == {buffer.name for _, buffer in server.pool.buffers()}


@pytest.mark.parametrize("name", ANSWERING_SHAPES)
@pytest.mark.parametrize("request_id", [OWN, FAR])
def test_a_row_that_a_token_reads_decides_it_in_every_layer(name: str, request_id: int) -> None:
    for layer in range(shape(name).num_layers):
        buffer = "latent" if shape(name).family == "mla" else "v"
        server = Server(name, job(OWN), job(FAR))
        server.prefill(OWN, FAR)
        right = known_model(server.shape).answers(server.jobs[request_id])
        server.words(layer, buffer, request_id, PROMPT - FAR_BACK[name]).zero_()
        said = server.passed({request_id: server.holdings[request_id].committed + 1})[request_id]
        # The row that a request reads itself by is written by the pass that reads it.
        assert (said == right[1]) == (request_id == OWN), layer


def test_rows_of_eight_bits_come_back_as_they_were_with_their_scales() -> None:
    preset = shape("llama-fp8-answers")
    server = Server(preset.name, job(FAR))
    model, told = known_model(preset), server.pool.attention
    attention = known_attention(model, preset, told)
    tokens = torch.from_numpy(model.prompt(job(FAR)))
    x = model.normed(model.tensors["model.embed_tokens.weight"][tokens])
    rows = attention.stored(0, x, torch.arange(PROMPT))
    keys, values = attention.keys_and_values(0, rows)
    plain = known_attention(model, dataclasses.replace(preset, scale_block=0, kv_dtype=torch.float32), told)
    wide_keys, wide_values = plain.keys_and_values(0, plain.stored(0, x, torch.arange(PROMPT)))
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


def test_a_family_without_weights_is_refused() -> None:
    with pytest.raises(UsageError, match="of family nsa; there is for mha, swa, mla"):
        known_model(shape("glm-5.1-tiny"))
