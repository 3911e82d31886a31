"""Case: save and restore a retracted request, compared with the upstream method and two plain copies of as many bytes.

The upstream method indexes each layer of each buffer by chunks of token rows and moves the result to the host. Its
first version, the partial method, did not save the index buffer of an NSA model; this buffer is not checked then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcheck.core.bench.arms import Arm, ArmComparison, BenchSetting, Point, same
from kvcheck.core.bench.decode_work import TwoHoldings
from kvcheck.core.bench.memory import FreshMemory, memcpy
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.targets.mutants.retract_resume import SaveSkipsIndex

CHUNK_ROWS = 8192
INDEX = "index_k_with_scale"
TARGET_BYTES = (4 << 20, 16 << 20, 64 << 20)
"""Approximate bytes of a save at each size."""


def points(setting: BenchSetting) -> tuple[Point, ...]:
    return tuple(_point(setting.shape, tokens) for tokens in sizes(setting.shape))


def sizes(shape: ModelShape) -> tuple[int, ...]:
    """Token counts that move about TARGET_BYTES; the last page is partial."""
    one, two = (TwoHoldings.bytes_of(shape, pages * shape.page_size) for pages in (1, 2))
    a_page = max(1, two - one)
    return tuple(
        dict.fromkeys(
            max(2, round(target / a_page)) * shape.page_size - shape.page_size // 2 for target in TARGET_BYTES
        )
    )


def _point(shape: ModelShape, tokens: int) -> Point:
    makers: dict[str, Callable[[FreshMemory], Arm]] = {
        "chunked-index": lambda memory: _upstream(TwoHoldings(memory, shape, tokens), is_partial=False),
        "offload": lambda memory: _offload(TwoHoldings(memory, shape, tokens), Offload),
        "memcpy": lambda memory: _memcpy(memory, TwoHoldings.bytes_of(shape, tokens)),
    }
    comparisons = [ArmComparison(arm="offload", baseline="chunked-index", limit="memcpy")]
    if shape.family == "nsa":
        makers["chunked-partial"] = lambda memory: _upstream(TwoHoldings(memory, shape, tokens), is_partial=True)
        makers["partial-offload"] = lambda memory: _offload(TwoHoldings(memory, shape, tokens), SaveSkipsIndex)
        comparisons += [
            ArmComparison(arm="offload", baseline="chunked-partial", limit="memcpy", name="offload-to-partial"),
            ArmComparison(arm="offload", baseline="partial-offload", limit="memcpy", name="offload-to-mutant"),
        ]
    return Point(
        case="offload-restore",
        size=f"{tokens} tokens",
        shape=shape.name,
        bytes=2 * TwoHoldings.bytes_of(shape, tokens),
        makers=makers,
        comparisons=tuple(comparisons),
        note="bytes count both ways; limit: as many bytes copied out and back by memcpy",
    )


def _offload(moved: TwoHoldings, kind: type[Offload]) -> Arm:
    offload = kind(moved.pool, moved.backend)
    left_out = INDEX if kind is SaveSkipsIndex else ""

    def call() -> None:
        value = offload.save(moved.source)
        moved.backend.wait(value.saved)
        moved.backend.wait(offload.restore(value, moved.target))
        offload.discard(value)

    return Arm(call=call, check=lambda: moved.check(but=left_out))


def _upstream(moved: TwoHoldings, *, is_partial: bool) -> Arm:
    left_out = INDEX if is_partial else ""
    device = moved.backend.device
    table: list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = []
    for space, buffer, words in moved.buffers():
        if buffer.name == left_out:
            continue
        # Rows as the model's type has them: indexing moves elements one by one, so its width matters.
        layers = [layer.view(torch.uint8).view(buffer.dtype) for layer in words]
        source, target = (
            torch.split(moved.rows(holding, space, buffer), CHUNK_ROWS) for holding in (moved.source, moved.target)
        )
        table.append((layers, [*source], [*target]))

    def call() -> None:
        saved = [
            [[layer[rows].to("cpu", non_blocking=True) for rows in source] for layer in layers]
            for layers, source, _ in table
        ]
        _synchronize(device)
        for (layers, _, target), kept in zip(table, saved, strict=True):
            for layer, chunks in zip(layers, kept, strict=True):
                for rows, chunk in zip(target, chunks, strict=True):
                    layer[rows] = chunk.to(device, non_blocking=True)
        _synchronize(device)

    return Arm(call=call, check=lambda: moved.check(but=left_out))


def _memcpy(memory: FreshMemory, size: int) -> Arm:
    source, target = memory.words(size // 8), memory.words(size // 8)
    host = memory.words(size // 8, is_host=True)

    out, back = memcpy(host, source), memcpy(target, host)

    def call() -> None:
        out()
        back()

    return Arm(call=call, check=lambda: same("memcpy", target, source))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
