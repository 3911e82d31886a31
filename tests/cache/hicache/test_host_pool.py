"""The host tier: every layout and method moves the same words to the same places."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from rigs.host import SPACES, UNITS, check_device, check_host, ids, of_unit, rig_of, run

from kvcheck.core.base.errors import DoubleFree, LayoutMismatch
from kvcheck.core.cache.backend.backend import Operation, Place
from kvcheck.core.cache.backend.cuda import CudaBackend
from kvcheck.core.cache.hicache import host_pool
from kvcheck.core.cache.hicache.host_pool import COPY_METHODS, HOST_LAYOUTS
from kvcheck.core.stress.workload.shapes import TINY_SHAPES

# Bytes of a page or slot, worked out by hand: layers * (rows * row bytes, summed over the buffers).
UNIT_BYTES = {
    ("glm-5.1-tiny", "full"): 2 * (64 * 32 + 8448),
    ("deepseek-v3.2-tiny", "full"): 2 * (64 * 40 + 8448),
    ("deepseek-v3-tiny", "full"): 2 * (8 * 32),
    ("llama-3-tiny", "full"): 2 * (4 * 32 + 4 * 32),
    ("llama-3-fp8-tiny", "full"): 2 * (8 * 64 + 8 * 64 + 8 * 32 + 8 * 32),
    ("gpt-oss-tiny", "full"): 2 * (4 * 32 + 4 * 32),
    ("gpt-oss-tiny", "window"): 2 * (4 * 32 + 4 * 32),
    ("qwen3-next-tiny", "full"): 1 * (8 * 32 + 8 * 32),
    ("qwen3-next-tiny", "state"): 3 * (96 + 128),
}


def id_lists(units: int, first: int, count: int) -> st.SearchStrategy[list[int]]:
    """Different ids: a permutation, or rising with gaps so that runs of all lengths come up."""
    permuted = st.permutations(range(first, first + units)).map(lambda each: each[:count])
    return permuted | permuted.map(sorted)


@examples(10)
@given(data=st.data())
@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize(("name", "space"), SPACES)
def test_units_go_to_the_host_and_come_back_bit_for_bit(
    name: str, space: str, layout: str, method: str, data: st.DataObject
) -> None:
    units = UNITS[space]
    count = data.draw(st.integers(0, units), "count")
    host = data.draw(id_lists(units, 0, count), "host")
    device = data.draw(id_lists(units + 2, 1, count), "device")
    target = data.draw(id_lists(units + 2, 1, count), "target")
    chunk = data.draw(st.sampled_from([1, 2, 3, 64]), "chunk")
    with patch.object(host_pool, "CHUNK_UNITS", chunk):
        rig = rig_of(name, layout, method, extra=2)
        run(data.draw(st.permutations(rig.backup(space, host, device)), "chunks"))
        check_host(rig, space, dict(zip(host, device, strict=True)))
        before = {name: words.clone() for name, words in rig.other[space].items()}
        held = dict(zip(target, device, strict=True))
        layers = data.draw(st.permutations(range(len(rig.specs[space].layers))), "layers")
        for done, layer in enumerate(layers):
            run(data.draw(st.permutations(rig.load(space, layer, host, target)), "chunks"))
            check_device(rig, space, held, before, layers[: done + 1])


@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize(("name", "space"), SPACES)
def test_memory_lies_as_the_layout_says(name: str, space: str, method: str) -> None:
    for layout in HOST_LAYOUTS:
        rig = rig_of(name, layout, method)
        run(rig.backup(space, [4, 0], [2, 3]))
        for buffer in rig.buffers(space):
            memory = rig.backend.memory[f"host.{layout}.{space}.{buffer}"]
            assert memory.is_contiguous()
            words, r = rig.words[space][buffer], rig.rows(space, buffer)
            layers, _, width = words.shape
            flat = memory.view(-1, width)
            for host, device in ((4, 2), (0, 3)):
                for layer in range(layers):
                    for o in range(r):
                        row = {
                            "layer-first": (layer * UNITS[space] + host) * r + o,
                            "page-first": (host * r + o) * layers + layer,
                            "page-first-direct": (host * layers + layer) * r + o,
                        }[layout]
                        assert torch.equal(flat[row], words[layer, device * r + o]), (layout, buffer, host, layer, o)


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize(("name", "space"), SPACES)
def test_a_packed_unit_is_the_same_in_every_layout_and_unpacks_into_any(name: str, space: str, layout: str) -> None:
    rig = rig_of(name, layout)
    run(rig.backup(space, [1, 3], [2, 5]))
    packed = rig.pool.pack(space, 3)
    expected = [of_unit(rig.words[space][each], 5, rig.rows(space, each)) for each in rig.buffers(space)]
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, torch.cat([words.contiguous().view(torch.uint8).flatten() for words in expected]))
    assert len(packed) == rig.pool.unit_bytes(space) == UNIT_BYTES[name, space]
    shifted = torch.cat((torch.zeros(3, dtype=torch.uint8), packed))[3:]  # as cut out of a larger payload
    for other in HOST_LAYOUTS:
        fresh = rig_of(name, other)
        fresh.pool.unpack(space, 4, shifted)
        check_host(fresh, space, {4: 5})  # the words of both rigs are equal
        assert torch.equal(fresh.pool.pack(space, 4), packed)


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize(("name", "space"), SPACES)
def test_what_leaves_the_pool_is_a_copy(name: str, space: str, layout: str) -> None:
    rig = rig_of(name, layout)
    run(rig.backup(space, [0, 1], [1, 2]))
    packed = rig.pool.pack(space, 1)
    kept = [packed, *(rig.pool.unit_words(space, buffer, 1) for buffer in rig.buffers(space))]
    assert all(words.is_contiguous() for words in kept)
    before = [words.clone() for words in kept]
    rig.pool.unpack(space, 1, torch.zeros_like(packed))
    assert all(torch.equal(now, then) for now, then in zip(kept, before, strict=True))
    for each in kept:
        each.fill_(7)
    assert not any(rig.pool.unit_words(space, buffer, 1).any() for buffer in rig.buffers(space))
    payload = torch.full_like(packed, 9)
    rig.pool.unpack(space, 1, payload)
    payload.fill_(1)
    assert rig.pool.pack(space, 1).unique().tolist() == [9]


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("name", TINY_SHAPES)
def test_memory_is_pinned_counted_apart_and_given_back_once(name: str, layout: str) -> None:
    rig = rig_of(name, layout)
    backend = rig.backend
    names = {f"host.{layout}.{space}.{buffer}" for space in rig.specs for buffer in rig.buffers(space)}
    held = {key: size for key, size in backend.allocated().items() if key.startswith("host.")}
    assert set(held) == names and {backend.places[key] for key in names} == {Place.PINNED}
    assert sum(held.values()) == sum(UNITS[space] * UNIT_BYTES[name, space] for space in rig.specs)
    rig.pool.free()
    assert not [key for key in backend.allocated() if key.startswith("host.")]
    with pytest.raises(DoubleFree):
        rig.pool.free()
    with pytest.raises(LayoutMismatch):
        rig.pool.pack("full", 0)


def moved_blocks(layout: str, host: Sequence[int], device: Sequence[int], *, chunk: int) -> list[list[int]]:
    """Words that each block of a backup covers, chunk by chunk, for one buffer of 2 layers, 4 rows and 4 words."""
    rig = rig_of("llama-3-tiny", layout, "direct")
    moved: list[list[int]] = []
    with (
        patch.object(host_pool, "CHUNK_UNITS", chunk),
        patch.object(host_pool, "copy_block_torch", lambda target, source: moved[-1].append(target.numel())),
    ):
        chunks = rig.pool.backup_chunks("full", ["k"], host=ids(host), device=ids(device), words=rig.words["full"])
        for chunk in chunks:
            moved.append([])
            chunk()
    return moved


def test_direct_copies_take_maximal_runs_of_both_sides_and_single_pages_where_layers_interleave() -> None:
    host, device, page = [0, 1, 2, 4, 5, 7], [3, 4, 5, 6, 8, 9], 2 * 4 * 4
    assert moved_blocks("layer-first", host, device, chunk=64) == [[3 * page, page, page, page]]
    assert moved_blocks("layer-first", host, device, chunk=4) == [[3 * page, page], [page, page]]
    assert moved_blocks("layer-first", [5, 4, 3], [3, 2, 1], chunk=64) == [[page, page, page]]
    for layout in ("page-first", "page-first-direct"):
        assert moved_blocks(layout, host, device, chunk=64) == [[page] * 6]


@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_ids_are_copied_when_the_copy_is_planned(layout: str, method: str) -> None:
    rig = rig_of("glm-5.1-tiny", layout, method)
    host, device = ids([0, 1, 2]), ids([4, 5, 6])
    buffers, words = rig.buffers("full"), rig.words["full"]
    saving = rig.pool.backup_chunks("full", buffers, host=host, device=device, words=words)
    footprint = rig.pool.footprint("full", buffers, host, layers=(0, 2))
    assert (host.tolist(), device.tolist()) == ([0, 1, 2], [4, 5, 6])
    host[:], device[:] = 8, 1
    run(saving)
    check_host(rig, "full", {0: 4, 1: 5, 2: 6})
    assert footprint.rows.tolist() == [0, 1, 2]
    host[:], device[:] = [2, 1, 0], [1, 2, 3]
    before = {name: each.clone() for name, each in rig.other["full"].items()}
    loading = rig.pool.load_chunks("full", buffers, layer=1, host=host, device=device, words=rig.other["full"])
    host[:], device[:] = 5, 9
    run(loading)
    check_device(rig, "full", {1: 6, 2: 5, 3: 4}, before, [1])


def test_row_ids_are_read_when_the_part_runs_and_only_by_the_kernel_method() -> None:
    for layout in HOST_LAYOUTS:
        rig = rig_of("llama-3-tiny", layout, "kernel")
        chunks = rig.backup("full", [0], [1])
        device_rows = [each for each in rig.backend.indices if each.tolist() == [4, 5, 6, 7]]
        assert len(device_rows) == 2  # keys and values
        for each in device_rows:
            each += 4
        run(chunks)
        check_host(rig, "full", {0: 2})
        direct = rig_of("llama-3-tiny", layout, "direct")
        assert direct.backup("full", [0], [1]) and direct.load("full", 0, [0], [1])
        assert direct.backend.indices == []


@pytest.mark.gpu
@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize(("name", "space"), SPACES)
def test_units_cross_between_pinned_memory_and_the_device(name: str, space: str, layout: str, method: str) -> None:
    backend = CudaBackend()
    rig = rig_of(name, layout, method, backend=backend)
    torch.cuda.synchronize()
    before = {name: words.cpu() for name, words in rig.other[space].items()}
    host, device, target = [1, 2, 0, 4], [2, 3, 5, 1], [4, 5, 1, 2]
    lanes = backend.lane("d2h"), backend.lane("h2d")
    saved = backend.submit(Operation("save", tuple(rig.backup(space, host, device))), lane=lanes[0])
    layers = range(len(rig.specs[space].layers))
    for layer in layers:
        chunks = tuple(rig.load(space, layer, host, target))
        backend.submit(Operation("load", chunks), lane=lanes[1], after=(saved,))
    backend.drain()
    check_host(rig, space, dict(zip(host, device, strict=True)))
    check_device(rig, space, dict(zip(target, device, strict=True)), before, layers)
