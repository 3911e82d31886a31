"""The sites of a shape: words that its decoder wrote, then moved, are named by where they were written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.transfer.metadata import metadata_fields
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.content import ContentOracle
from kvcheck.core.stress.scenarios.serving import make_setup, request_of, synthetic_load
from kvcheck.core.stress.targets.builtin import BuiltinEngine, BuiltinTarget
from kvcheck.core.stress.workload.footprints import row_sites
from kvcheck.core.stress.workload.shapes import TINY_SHAPES, shape

Harm = Callable[[dict[str, torch.Tensor]], None]
"""Changes the words of buffers: name -> [L, rows, W] int64."""


def findings_after(name: str, harm: Harm) -> list[Finding]:
    """Compute the prompts of some requests, change the memory, compute on, and judge what is then read."""
    history, oracle = History(), ContentOracle()
    history.listen(oracle.handlers())
    tiny = shape(name)
    load = synthetic_load(tiny, pages=64, requests=2, max_running=2, seed=1, chunk="2 pages")
    setup = make_setup(tiny, load, EagerBackend(), history.emit, share_prefixes=False)
    engine = BuiltinTarget().build(setup)
    assert isinstance(engine, BuiltinEngine)
    for job in load.jobs:
        engine.submit(request_of(job))
    engine.step()
    engine.step()
    assert not oracle.findings
    harm({buffer.name: engine.pool.sets[space].write_view(buffer.name) for space, buffer in engine.pool.buffers()})
    engine.step()
    return oracle.findings


def exchange_layers(buffer: str) -> Harm:
    return lambda words: words[buffer].copy_(words[buffer].flip(0))  # type: ignore[arg-type,return-value]


def exchange_heads(buffer: str, heads: int) -> Harm:
    return lambda words: words[buffer].copy_(  # type: ignore[arg-type,return-value]
        words[buffer].unflatten(2, (heads, -1)).flip(2).flatten(2)
    )


def copy_buffer(source: str, target: str) -> Harm:
    return lambda words: words[target].copy_(words[source])  # type: ignore[arg-type,return-value]


CASES = [
    pytest.param("llama-3-tiny", exchange_heads("k", 2), "k", "words of head 1 of request 1, position 0", id="heads"),
    pytest.param(
        "llama-3-tiny", exchange_layers("k"), "k", "the words of layer 1 of request 1, position 0", id="layers"
    ),
    pytest.param("llama-3-tiny", copy_buffer("v", "k"), "k", "the words of buffer v of request 1, pos", id="v in k"),
    pytest.param("deepseek-v3-tiny", exchange_layers("latent"), "latent", "layer 1 of request 1", id="latent layers"),
    pytest.param("gpt-oss-tiny", exchange_layers("k"), "k", "the words of layer", id="layers of a hybrid"),
    pytest.param("qwen3-next-tiny", exchange_layers("ssm"), "ssm", "the words of layer", id="layers of states"),
    pytest.param(
        "glm-5.1-tiny", exchange_layers("index_k_with_scale"), "index_k_with_scale", "words of layer", id="packed pages"
    ),
]


@pytest.mark.parametrize(("name", "harm", "buffer", "story"), CASES)
def test_moved_words_are_named_by_where_the_decoder_wrote_them(name: str, harm: Harm, buffer: str, story: str) -> None:
    found = [each for each in findings_after(name, harm) if each.buffer == buffer]
    told = [each for each in found if each.code == "KV106"]
    assert told and story in told[0].message, found
    assert told[0].seen_request == told[0].request
    assert {each.code for each in found} <= {"KV106", "KV105"}, "a single word of 32 bits names nobody"


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_every_buffer_piece_and_field_has_its_rows(name: str) -> None:
    tiny = shape(name)
    sizes: dict[tuple[str, str], int] = {}
    for row in row_sites(tiny):
        bytes_ = row.words * (4 if row.is_half else 8) * (tiny.page_size if row.piece and row.space == "full" else 1)
        sizes[row.space, row.buffer] = sizes.get((row.space, row.buffer), 0) + bytes_
        assert row.words % row.heads == 0
    specs = POOLS.load(tiny.family)(tiny)
    wanted = {(spec.name, buffer.name): buffer.row_bytes for spec in specs for buffer in spec.buffers}
    fields = {("metadata", f"metadata.{each.name}"): each.size_bytes for each in metadata_fields(tiny.hidden_size)}
    plain = {("metadata", "metadata.output_ids"), ("metadata", "metadata.bootstrap_room")}
    assert sizes == wanted | {place: size for place, size in fields.items() if place not in plain}
