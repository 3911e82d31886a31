"""What a host pool refuses: each with its error, its message, and nothing changed.

Invariants:
- After a refusal the host memory is poison as before and the device words are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rigs.host import UNITS, Rig, check_device, check_host, ids, rig_of

from kvcheck.core.base.errors import KvcheckError, LayoutMismatch, LengthMismatch, UsageError
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.hicache.host_pool import COPY_METHODS, HostPool
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.workload.shapes import shape

Call = Callable[[Rig], object]


def backing(host: object, device: object, **changed: Any) -> Call:
    """A backup of glm-5.1-tiny with some arguments changed."""

    def call(rig: Rig) -> object:
        given: dict[str, Any] = {"space": "full", "buffers": ["latent"], "words": rig.words["full"], **changed}
        return rig.pool.backup_chunks(
            given["space"], given["buffers"], host=np.array(host), device=np.array(device), words=given["words"]
        )

    return call


def loading(host: Sequence[int], device: Sequence[int], layer: int = 0) -> Call:
    return lambda rig: rig.load("full", layer, host, device)


def words_of(make: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """A backup whose device words were changed."""
    return lambda rig: backing([0], [1], words={"latent": make(rig.words["full"]["latent"])})(rig)


@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (backing([0, 1], [1]), LengthMismatch, "as many host ids as device ids, got 2 and 1"),
        (loading([0], [1, 2]), LengthMismatch, "as many host ids as device ids, got 1 and 2"),
        (backing([0, 9], [1, 2]), LayoutMismatch, r"backup, host ids: expected 0 to 8, got \[9\]"),
        (backing([-1], [1]), LayoutMismatch, r"expected 0 to 8, got \[-1\]"),
        (backing([0], [10]), LayoutMismatch, r"backup of latent, device ids: expected 1 to 9, got \[10\]"),
        (backing([0], [0]), LayoutMismatch, r"expected 1 to 9, got \[0\]"),
        (loading([9], [1]), LayoutMismatch, r"load, host ids: expected 0 to 8, got \[9\]"),
        (loading([0], [0]), LayoutMismatch, r"load of latent, device ids: expected 1 to 9, got \[0\]"),
        (loading([0], [10]), LayoutMismatch, r"expected 1 to 9, got \[10\]"),
        (backing([3, 3], [1, 2]), LayoutMismatch, r"each target once, got \[3, 3\]"),
        (loading([0, 1], [2, 2]), LayoutMismatch, r"each target once, got \[2, 2\]"),
        (backing([[0]], [[1]]), LayoutMismatch, r"expected ids \[n\] of whole numbers"),
        (backing([0.0], [1]), LayoutMismatch, "whole numbers, got float64"),
        (loading([0], [1], layer=2), LayoutMismatch, r"expected layers within \[0, 2\), got \[2, 3\)"),
        (loading([0], [1], layer=-1), LayoutMismatch, r"got \[-1, 0\)"),
        (backing([0], [1], space="state"), LayoutMismatch, r"no space 'state'; it has \['full'\]"),
        (backing([0], [1], buffers=["k"]), LayoutMismatch, r"out of \['latent', 'index_k_with_scale'\], got \['k'\]"),
        (backing([0], [1], buffers=["latent"] * 2), LayoutMismatch, "expected different buffers"),
        (backing([0], [1], words={}), LayoutMismatch, "no device words for buffer latent"),
        (words_of(lambda words: words[:1]), LayoutMismatch, "expected device words int64"),
        (words_of(lambda words: words[:, :-1]), LayoutMismatch, "a multiple of 64"),
        (words_of(lambda words: words[..., :-1]), LayoutMismatch, "expected device words int64"),
        (words_of(lambda words: words.view(torch.uint8)), LayoutMismatch, "expected device words int64"),
        (lambda rig: rig.pool.unit_words("full", "latent", 9), LayoutMismatch, "a unit of 0 to 8, got 9"),
        (lambda rig: rig.pool.unit_words("full", "latent", -1), LayoutMismatch, "a unit of 0 to 8, got -1"),
        (lambda rig: rig.pool.pack("full", 9), LayoutMismatch, "a unit of 0 to 8, got 9"),
        (
            lambda rig: rig.pool.unpack("full", 0, rig.pool.pack("full", 0)[1:]),
            LengthMismatch,
            "20992 bytes, got 20991",
        ),
        (lambda rig: rig.pool.unpack("full", 0, rig.pool.pack("full", 0).view(torch.int64)), LayoutMismatch, "bytes"),
        (lambda rig: rig.pool.footprint("full", ["latent"], ids([9]), layers=(0, 1)), LayoutMismatch, "0 to 8"),
        (lambda rig: rig.pool.footprint("full", ["k"], ids([0]), layers=(0, 1)), LayoutMismatch, "out of"),
        (lambda rig: rig.pool.footprint("full", ["latent"], ids([0]), layers=(1, 1)), LayoutMismatch, "layers"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_leaves_everything_alone(
    call: Call, error: type[KvcheckError], message: str, method: str
) -> None:
    rig = rig_of("glm-5.1-tiny", "page-first", method)
    before = {name: words.clone() for name, words in rig.other["full"].items()}
    with pytest.raises(error, match=message):
        call(rig)
    check_host(rig, "full", {})
    check_device(rig, "full", {}, before, [])


def test_a_pool_that_cannot_be_made_takes_no_memory() -> None:
    preset, backend = shape("gpt-oss-tiny"), EagerBackend()
    specs = POOLS.load(preset.family)(preset)
    good: dict[str, Any] = {"units": UNITS, "page_size": 4, "layout": "page-first", "method": "kernel"}
    for changed, error, message in (
        ({"layout": "page-last"}, UsageError, "unknown host layout 'page-last'; known: layer-first, page-first, page-"),
        ({"method": "memcpy"}, UsageError, "unknown copy method 'memcpy'; known: kernel, direct"),
        ({"units": {"full": 3}}, LayoutMismatch, "host space window needs at least one page or slot, got None"),
        ({"units": {"full": 3, "window": 0}}, LayoutMismatch, "host space window needs at least one page or slot"),
    ):
        with pytest.raises(error, match=message):
            HostPool(specs, backend=backend, **{**good, **changed})
        assert backend.allocated() == {}
    assert HostPool(specs, backend=backend, **good).size_bytes() == sum(backend.allocated().values()) > 0
