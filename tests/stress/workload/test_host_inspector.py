"""HostInspector: what lies on the host is compared with what was computed, and each kind of damage is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rigs.cache import Rig, rig_of

from kvcheck.core.base import content
from kvcheck.core.cache.events import Event, LookedUp
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.stress.workload.events import Forward, Saw, Verified
from kvcheck.core.stress.workload.host_inspector import HostHits, HostInspector
from kvcheck.core.stress.workload.mismatch import Mismatch
from kvcheck.core.stress.workload.shapes import TINY_SHAPES, shape

CHAINS = {1: (b"a", b"ab", b"abc"), 2: (b"a", b"ab", b"abx")}
"""Two requests: the second shares two pages with the first, and so reads the first's words there."""
UNITS = {b"a": 4, b"ab": 0, b"abc": 7, b"abx": 2}
AUTHORS = {b"a": (1, 0), b"ab": (1, 1), b"abc": (1, 2), b"abx": (2, 2)}


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}
        self.found: list[Mismatch] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Verified):
            self.words[event.buffer] = self.words.get(event.buffer, 0) + event.words
        elif isinstance(event, Saw):
            self.found.append(event.mismatch)


def codes_of(name: str, request: int) -> torch.Tensor:
    """Codes of three pages: of request 1 its own, of request 2 its own from the third page on."""
    size = shape(name).page_size
    positions = np.arange(3 * size, dtype=np.int64)
    authors = np.where((positions < 2 * size) | (request == 1), 1, 2).astype(np.int64)
    return content.codes(authors, positions)


def rows_of(name: str, space: str, buffer: BufferSpec, layer: int, key: bytes) -> torch.Tensor:
    """A page or slot of one layer by the rule: [r, W]."""
    size, (request, page) = shape(name).page_size, AUTHORS[key]
    codes = codes_of(name, request)[page * size : (page + 1) * size]
    if space == "state":
        codes = codes[-1:]
    if buffer.rows is not Granularity.PAGE:
        site = content.Site(space, buffer.name, "", layer)
        return codes[:, None] ^ content.mask(site, buffer.row_bytes // 8)
    blocks = []
    for piece in buffer.pieces:
        count = piece.size_bytes // (4 if piece.size_bytes % 8 else 8)
        mask = content.mask(content.Site(space, buffer.name, piece.name, layer), count)
        words = codes[:, None] ^ mask
        if piece.size_bytes % 8:
            words = words.view(torch.int32)[:, ::2].contiguous()
        blocks.append(words.contiguous().view(torch.uint8).reshape(-1))
    return torch.cat(blocks).view(torch.int64)[None]


def filled(name: str) -> tuple[Rig, HostInspector, Sink]:
    """A host that holds the four pages, by the rule, and an inspector that knows who computed them."""
    rig, sink = rig_of(name), Sink()
    for space, buffer in rig.pool.buffers():
        for key, unit in UNITS.items():
            if space == "state" and unit > 5:
                continue
            write(rig, name, space, buffer, key, unit)
    inspector = HostInspector(shape(name), lambda request: codes_of(name, request), sink.emit)
    for request, chain in CHAINS.items():
        inspector.computed(request, chain)
    return rig, inspector, sink


def write(rig: Rig, name: str, space: str, buffer: BufferSpec, key: bytes, unit: int) -> None:
    """Put a page's words into a host unit."""
    spec = rig.pool.sets[space].spec
    words = torch.stack([rows_of(name, space, buffer, layer, key) for layer in spec.layers])
    view = dict(rig.host._unit_views(space, unit))[buffer.name]
    assert view.shape == words.shape
    view.copy_(words)


def inspect(rig: Rig, inspector: HostInspector, space: str, keys: tuple[bytes, ...]) -> None:
    inspector.inspect(rig.host, space, keys, np.array([UNITS[key] for key in keys], dtype=np.int64))


SPACES = [(name, space) for name in TINY_SHAPES for space in rig_of(name).pool.sets]


def keys_of(space: str) -> tuple[bytes, ...]:
    return (b"a", b"ab", b"abx") if space == "state" else tuple(UNITS)


@pytest.mark.parametrize(("name", "space"), SPACES)
def test_pages_as_they_were_computed_are_compared_to_the_last_word(name: str, space: str) -> None:
    rig, inspector, sink = filled(name)
    inspect(rig, inspector, space, keys_of(space))
    assert sink.found == []
    spec, rows = rig.pool.sets[space].spec, {Granularity.TOKEN: rig.pool.page_size}
    assert sink.words == {
        f"host:{each.name}": len(keys_of(space)) * len(spec.layers) * rows.get(each.rows, 1) * each.row_bytes // 8
        for each in spec.buffers
    }


@pytest.mark.parametrize(("name", "space"), SPACES)
def test_one_damaged_word_is_found_in_its_buffer_and_layer(name: str, space: str) -> None:
    for at, each in enumerate(rig_of(name).pool.sets[space].spec.buffers):
        rig, inspector, sink = filled(name)
        view = dict(rig.host._unit_views(space, UNITS[b"ab"]))[each.name]
        view[-1, -1, -1] ^= 1 << 3
        inspect(rig, inspector, space, keys_of(space))
        (found,) = sink.found
        spec = rig.pool.sets[space].spec
        assert (found.space, found.buffer, found.layer) == (space, spec.buffers[at].name, spec.layers[-1])
        assert found.tier == "host"
        assert (found.request, found.page, found.count) == (1, UNITS[b"ab"], 1)
        size = rig.pool.page_size
        assert size <= found.position < 2 * size
        if each.rows is Granularity.TOKEN:
            assert (found.row, found.position) == (size - 1, 2 * size - 1)
        if each.pieces:  # the last word of a page is the last token's last piece
            assert found.piece == each.pieces[-1].name


@pytest.mark.parametrize(("name", "space"), [each for each in SPACES if each != ("qwen3-next-tiny", "full")])
def test_layers_that_changed_places_are_found_in_both(name: str, space: str) -> None:
    rig, inspector, sink = filled(name)
    buffer = rig.pool.sets[space].spec.buffers[0]
    view = dict(rig.host._unit_views(space, UNITS[b"a"]))[buffer.name]
    view[[0, 1]] = view[[1, 0]]
    inspect(rig, inspector, space, keys_of(space))
    layers = rig.pool.sets[space].spec.layers
    assert {(each.layer, each.page, each.buffer) for each in sink.found} == {
        (layer, UNITS[b"a"], buffer.name) for layer in layers[:2]
    }


@pytest.mark.parametrize(("name", "space"), SPACES)
def test_another_requests_page_is_found_in_every_buffer(name: str, space: str) -> None:
    rig, inspector, sink = filled(name)
    spec = rig.pool.sets[space].spec
    for buffer in spec.buffers:
        write(rig, name, space, buffer, b"abx", UNITS[b"a"])
    inspect(rig, inspector, space, keys_of(space))
    assert {(each.buffer, each.layer) for each in sink.found} == {
        (buffer.name, layer) for buffer in spec.buffers for layer in spec.layers
    }
    assert {(each.page, each.request, each.author) for each in sink.found} == {(UNITS[b"a"], 1, 1)}


def test_a_state_of_an_earlier_moment_is_found() -> None:
    rig, inspector, sink = filled("qwen3-next-tiny")
    for buffer in rig.pool.sets["state"].spec.buffers:
        write(rig, "qwen3-next-tiny", "state", buffer, b"a", UNITS[b"ab"])
    inspect(rig, inspector, "state", (b"ab",))
    assert {each.buffer for each in sink.found} == {"conv", "ssm"}
    size = rig.pool.page_size
    assert {each.position for each in sink.found} == {2 * size - 1}  # the last token of the page that it stands behind


@pytest.mark.parametrize(("name", "space"), SPACES)
def test_a_page_that_nobody_computed_is_reported(name: str, space: str) -> None:
    rig, inspector, sink = filled(name)
    inspector.inspect(rig.host, space, (b"unheard of",), np.array([UNITS[b"a"]], dtype=np.int64))
    assert sink.found
    assert {(each.request, each.page) for each in sink.found} == {(0, UNITS[b"a"])}


def test_who_computed_a_prefix_says_what_it_holds() -> None:
    name = "llama-3-tiny"
    rig, _, sink = filled(name)
    asked: list[int] = []

    def codes(request: int) -> torch.Tensor:
        asked.append(request)
        return codes_of(name, request)

    inspector = HostInspector(shape(name), codes, sink.emit)
    for request in (1, 2):
        inspector.computed(request, CHAINS[request])
    inspect(rig, inspector, "full", (b"ab", b"abx"))
    assert (asked, sink.found) == ([1, 2], [])


@pytest.mark.parametrize(("name", "space"), [each for each in SPACES if each[1] != "state"])
def test_equal_outputs_of_equal_prompts_are_each_their_authors_but_never_mixed(name: str, space: str) -> None:
    rig, inspector, sink = filled(name)
    inspector.computed(2, CHAINS[1])  # request 2 computed "abc" as well, and its third page has words of its own
    inspect(rig, inspector, space, (b"abc",))
    buffers, unit = rig.pool.sets[space].spec.buffers, UNITS[b"abc"]
    mixed = dict(rig.host._unit_views(space, unit))[buffers[0].name]
    word = int(mixed[0, 0, 0])
    for buffer in buffers:
        write(rig, name, space, buffer, b"abx", unit)
    inspect(rig, inspector, space, (b"abc",))
    assert sink.found == []
    mixed[0, 0, 0] = word
    inspect(rig, inspector, space, (b"abc",))
    assert sink.found


# Pages of a request that came from the host


def lookup(request: int, *, device: int, pages: int) -> LookedUp:
    return LookedUp(request, (b"a", b"b", b"c"), pages, device, False, 0)


def test_what_lies_behind_the_device_s_pages_was_loaded() -> None:
    heard: list[Event] = []
    hits = HostHits(heard.append)
    told = [lookup(1, device=1, pages=3), lookup(2, device=2, pages=2), Forward(1, 24, 30)]
    for event in told:
        hits(event)
    assert heard == told
    assert (hits.pages(1, 3), hits.pages(2, 2), hits.pages(3, 0)) == (range(1, 3), range(2, 2), range(0))


def test_the_last_lookup_counts_and_only_where_the_request_began_behind_it() -> None:
    hits = HostHits(lambda event: None)
    hits(lookup(1, device=0, pages=3))
    hits(lookup(1, device=1, pages=2))
    assert hits.pages(1, 2) == range(1, 2)
    assert hits.pages(1, 0) == range(0), "computed anew: nothing was loaded"
    assert hits.pages(1, 3) == range(0), "what the first lookup found was given up"
