"""Case: fill rows with content words and verify them, compared with memcpy and with reading the memory once.

A fill reads no rows, so its limit is writing as many bytes once.

Invariants:
- Both cases use rows as wide as the shape's widest token row, and as many as the size takes.
- The check of an arm that verifies also gives it rows with one wrong word, which the arm has to name.
"""

from __future__ import annotations

from functools import partial

import torch

from kvcheck.core.base.errors import WrongOutput
from kvcheck.core.bench.arms import Arm, Comparison, Maker, Point, Setting, same
from kvcheck.core.bench.memory import FreshMemory, memcpy
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.kernels.content import rows_torch
from kvcheck.kernels.content_rows import fill, fill_torch, verify, verify_torch

SIZES_BYTES = (256 << 10, 8 << 20, 128 << 20)
"""In the second-level cache, in the third, and in memory: only the last is beside what one core reads of that."""

KEY = 0x5EED


def fill_points(setting: Setting) -> tuple[Point, ...]:
    """Writing rows of content words, compared with memcpy of as many bytes."""
    return tuple(
        _point(
            "content-fill",
            setting,
            size,
            {
                "memcpy": partial(_memcpy, shape=setting.shape, size=size),
                "fill": partial(_fill, shape=setting.shape, size=size, is_torch=False),
                "fill-torch": partial(_fill, shape=setting.shape, size=size, is_torch=True),
                "write": partial(_write, shape=setting.shape, size=size),
            },
            limit="write",
        )
        for size in SIZES_BYTES
    )


def verify_points(setting: Setting) -> tuple[Point, ...]:
    """Verifying every word of rows, compared with reading as many bytes once."""
    return tuple(
        _point(
            "content-verify",
            setting,
            size,
            {
                "read": partial(_read, shape=setting.shape, size=size),
                "verify": partial(_verify, shape=setting.shape, size=size),
                "verify-digest": partial(_verify, shape=setting.shape, size=size, key=KEY),
                "verify-torch": partial(_verify, shape=setting.shape, size=size, is_torch=True),
            },
            limit="read",
        )
        for size in SIZES_BYTES
    )


def _point(case: str, setting: Setting, size: int, makers: dict[str, Maker], *, limit: str) -> Point:
    """The first arm is the baseline of all others."""
    base, *arms = makers
    return Point(
        case=case,
        size=_label(size),
        shape=setting.shape.name,
        bytes=size,
        makers=makers,
        comparisons=tuple(Comparison(arm=arm, baseline=base, limit=limit) for arm in arms if arm != limit),
    )


def _label(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def row_words(shape: ModelShape) -> int:
    """Words of the widest token row of the shape."""
    return (
        max(
            buffer.row_bytes
            for spec in POOLS.load(shape.family)(shape)
            for buffer in spec.buffers
            if buffer.rows is Granularity.TOKEN
        )
        // 8
    )


def _parts(memory: FreshMemory, shape: ModelShape, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows [T, W], codes [T], mask [W], all random."""
    wide = row_words(shape)
    count = max(1, size // (8 * wide))
    return memory.words(count, wide), memory.words(count), memory.words(wide)


def _memcpy(memory: FreshMemory, shape: ModelShape, size: int) -> Arm:
    source, target = _parts(memory, shape, size)[0], _parts(memory, shape, size)[0]
    return Arm(call=memcpy(target, source), check=lambda: same("memcpy", target, source), clock="events")


def _write(memory: FreshMemory, shape: ModelShape, size: int) -> Arm:
    rows = _parts(memory, shape, size)[0]
    write = rows.numpy().fill if rows.device.type == "cpu" else rows.fill_

    def check() -> None:
        if not bool((rows == KEY).all()):
            raise WrongOutput("a word was not written; a wrong output has no price")

    return Arm(call=lambda: write(KEY), check=check, clock="events")


def _read(memory: FreshMemory, shape: ModelShape, size: int) -> Arm:
    rows = _parts(memory, shape, size)[0].view(-1)
    found: list[torch.Tensor] = []

    def call() -> None:
        found[:] = [rows.sum()]

    def check() -> None:
        if int(found[0]) != int(rows.cpu().numpy().sum()):
            raise WrongOutput("the sum of all words is wrong; a wrong output has no price")

    return Arm(call=call, check=check, clock="events")


def _fill(memory: FreshMemory, shape: ModelShape, size: int, *, is_torch: bool) -> Arm:
    rows, codes, mask = _parts(memory, shape, size)
    write = fill_torch if is_torch else fill
    return Arm(
        call=lambda: write(rows, codes, mask),
        check=lambda: same("filled rows", rows, rows_torch(codes, mask, torch.int64)),
        clock="events",
    )


def _verify(
    memory: FreshMemory, shape: ModelShape, size: int, *, key: int | None = None, is_torch: bool = False
) -> Arm:
    rows, codes, mask = _parts(memory, shape, size)
    fill(rows, codes, mask)
    look = verify_torch if is_torch else verify
    count: list[torch.Tensor] = []

    def call() -> None:
        count[:] = [look(rows, codes, mask, key=key).differing]

    def check() -> None:
        row = int(memory.random.integers(len(rows)))
        rows[row, 0] ^= 1
        seen = look(rows, codes, mask, key=key).differing
        if bool(count[0].any()) or int(seen.sum()) != 1 or not bool(seen[row]):
            raise WrongOutput(f"verify: expected no row, then row {row} to differ; got {int(seen.sum())} rows")

    return Arm(call=call, check=check, clock="events")
