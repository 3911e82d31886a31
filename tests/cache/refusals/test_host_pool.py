"""What a host pool refuses: each with its error, and nothing changed; and the ids and layers at the edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rigs.host import UNITS, Rig, check_device, check_host, ids, rig_of

from kvcheck.core.base.errors import KvcheckError, LayoutMismatch, LengthMismatch, UsageError
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.hicache.host_pool import COPY_METHODS, HostPool, layout_axes
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.stress.workload.shapes import shape

Call = Callable[[Rig], object]


def backing(host: object, device: object, **changed: Any) -> Call:
    """A backup of glm-5.1-tiny with some arguments changed."""

    def call(rig: Rig) -> object:
        given: dict[str, Any] = {"space": "full", "buffers": ["latent"], "words": rig.words["full"], **changed}
        return rig.pool.backup_chunks(
            given["space"], given["buffers"], host=np.array(host), device=np.array(device), words=given["words"]
        )

    return call


def loading(host: object, device: object, layer: int = 0) -> Call:
    return lambda rig: rig.pool.load_chunks(
        "full", ["latent"], layer=layer, host=np.array(host), device=np.array(device), words=rig.other["full"]
    )


def words_of(make: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    return lambda rig: backing([0], [1], words={"latent": make(rig.words["full"]["latent"])})(rig)


def touching(units: object, *, layers: tuple[int, int] = (0, 1), space: str = "full", buffer: str = "latent") -> Call:
    return lambda rig: rig.pool.footprint(space, [buffer], np.array(units), layers=layers)


def unpacking(make: Callable[[torch.Tensor], torch.Tensor], unit: int = 0) -> Call:
    return lambda rig: rig.pool.unpack("full", unit, make(rig.pool.pack("full", 0)))


WRONG_IDS: tuple[tuple[object, object, type[KvcheckError]], ...] = (
    ([0, 1], [1], LengthMismatch),
    ([0], [1, 2], LengthMismatch),
    ([0, 9], [1, 2], LayoutMismatch),
    ([-1], [1], LayoutMismatch),
    ([0], [10], LayoutMismatch),
    ([0], [0], LayoutMismatch),
    ([0.0], [1], LayoutMismatch),
    ([0], [1.0], LayoutMismatch),
    ([[0]], [[1]], LayoutMismatch),
    ([0], [[1]], LayoutMismatch),
)


@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((copying(host, device), error) for host, device, error in WRONG_IDS for copying in (backing, loading)),
        (backing([3, 3], [1, 2]), LayoutMismatch),
        (loading([0, 1], [2, 2]), LayoutMismatch),
        (loading([0], [1], layer=2), LayoutMismatch),
        (loading([0], [1], layer=-1), LayoutMismatch),
        (backing([0], [1], space="state"), LayoutMismatch),
        (backing([0], [1], buffers=["k"]), LayoutMismatch),
        (backing([0], [1], buffers=["latent"] * 2), LayoutMismatch),
        (backing([0], [1], words={}), LayoutMismatch),
        (words_of(lambda words: words[0]), LayoutMismatch),
        (words_of(lambda words: words[1:]), LayoutMismatch),
        (words_of(lambda words: words[:, :-1]), LayoutMismatch),
        (words_of(lambda words: words[..., :-1]), LayoutMismatch),
        (words_of(lambda words: words.view(torch.uint8)), LayoutMismatch),
        (words_of(lambda words: words.view(torch.int32)[..., : words.shape[2]]), LayoutMismatch),
        (touching([9]), LayoutMismatch),
        (touching([-1]), LayoutMismatch),
        (touching([1.0]), LayoutMismatch),
        (touching([0], buffer="k"), LayoutMismatch),
        (touching([0], space="state"), LayoutMismatch),
        (touching([0], layers=(1, 1)), LayoutMismatch),
        (touching([0], layers=(0, 3)), LayoutMismatch),
        (touching([0], layers=(-1, 1)), LayoutMismatch),
        (lambda rig: rig.pool.unit_words("full", "latent", 9), LayoutMismatch),
        (lambda rig: rig.pool.unit_words("full", "latent", -1), LayoutMismatch),
        (lambda rig: rig.pool.pack("full", 9), LayoutMismatch),
        (lambda rig: rig.pool.pack("state", 0), LayoutMismatch),
        (unpacking(lambda packed: packed[1:]), LengthMismatch),
        (unpacking(lambda packed: torch.cat((packed, packed[:1]))), LengthMismatch),
        (unpacking(lambda packed: packed.view(torch.int64)), LayoutMismatch),
        (unpacking(lambda packed: packed.view(torch.int8)), LayoutMismatch),
        (unpacking(lambda packed: packed.view(1, -1)), LayoutMismatch),
        (unpacking(lambda packed: packed, unit=-1), LayoutMismatch),
        (unpacking(lambda packed: packed, unit=9), LayoutMismatch),
    ],
)
def test_what_cannot_be_meant_is_refused_and_leaves_everything_alone(
    call: Call, error: type[KvcheckError], method: str
) -> None:
    rig = rig_of("glm-5.1-tiny", "page-first", method)
    before = {name: words.clone() for name, words in rig.other["full"].items()}
    with pytest.raises(error):
        call(rig)
    check_host(rig, "full", {})
    check_device(rig, "full", {}, before, [])


@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize(("host", "device"), [([0, 8], [1, 9]), ([8, 0], [9, 9]), ([], [])])
def test_the_first_the_last_and_no_id_are_copied(host: Sequence[int], device: Sequence[int], method: str) -> None:
    rig = rig_of("glm-5.1-tiny", "page-first", method)
    for chunk in rig.backup("full", host, device):
        chunk()
    check_host(rig, "full", dict(zip(host, device, strict=True)))
    before = {name: words.clone() for name, words in rig.other["full"].items()}
    for chunk in rig.load("full", 1, [8, 8], [1, 9]):  # one host id twice
        chunk()
    if host:
        check_device(rig, "full", dict.fromkeys((1, 9), dict(zip(host, device, strict=True))[8]), before, [1])
    assert len(rig.pool.footprint("full", ["latent"], ids([0, 8]), layers=(0, 2)).rows) == 2


def test_a_pool_that_cannot_be_made_takes_no_memory() -> None:
    preset, backend = shape("gpt-oss-tiny"), EagerBackend()
    specs = POOLS.load(preset.family)(preset)
    good: dict[str, Any] = {"units": UNITS, "page_size": 4, "layout": "page-first", "method": "kernel"}
    for changed, error in (
        ({"layout": "page-last"}, UsageError),
        ({"method": "memcpy"}, UsageError),
        ({"units": {"full": 3}}, LayoutMismatch),
        ({"units": {"full": 3, "window": 0}}, LayoutMismatch),
    ):
        with pytest.raises(error):
            HostPool(specs, backend=backend, **{**good, **changed})
        assert backend.allocated() == {}
    with pytest.raises(UsageError):
        layout_axes("page-last")
    HostPool(specs, backend=backend, **{**good, "units": {"full": 3, "window": 1}})
    assert sum(backend.allocated().values()) > 0
