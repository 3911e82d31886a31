"""Probe token-moves: move_kv_cache of a pool, which a server calls to keep one branch of a tree of drafts.

Tokens of two pages move to slots of two other pages. In half of the schedules they move by one place instead, onto
slots that other tokens of the same call leave.

Invariants:
- Of a page of index keys, the key and the scale of each token move. Rows that are no target stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvcheck.core.probes.frame.buffer_views import BufferView
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.pool_copy import shuffled
from kvcheck.core.probes.sglang.rig.pools import (
    INDEX_HEAD_DIM,
    PAGES,
    SCALE_BYTES,
    SmallPool,
    pool_names,
    small_pool,
    take,
)

OWNER, OTHER = 1, 2
"""Requests: the owner of the moved tokens, and the owner of all others."""
PLAINEST = "mha"
SINGLE = ("token", "window")
"""Units whose rows are tokens."""
NATIVE = "SGLANG_NATIVE_MOVE_KV_CACHE"
"""Variable of the engine that moves the tokens by torch. The compiled kernel needs a device."""
LATENT = ("nsa",)
"""Pools that releases use only with chains of drafts."""
DRAFTS = "a server that drafts trees (--speculative-eagle-topk above 1) with this pool: no other moves its tokens"
"""The condition of findings on the pools in LATENT."""


class TokenMoves:
    def needs(self, subject: str) -> tuple[str, ...]:
        return ("server.variables", *dict.fromkeys((*pool_names(PLAINEST), *pool_names(subject))))

    def control(self, rig: Rig) -> None:
        with _native(rig):
            made = small_pool(rig, PLAINEST)
            tokens = take(made, 2)
            _move(rig, made, tokens[:1], tokens[-1:], None)

    def measure(self, rig: Rig) -> None:
        with _native(rig):
            made = small_pool(rig, rig.subject)
            pages = shuffled(rig, take(made, PAGES - 3).view(-1, made.page_size))
            source = _drawn(rig, pages[:2].reshape(-1), 2 + rig.mix.below(6))
            target = _drawn(rig, pages[2:4].reshape(-1), len(source))
            if rig.schedule % 2:  # they move up by one: onto the slots of those before them
                target = torch.cat((target[:1], source[:-1]))
            _move(rig, made, source, target, DRAFTS if rig.subject in LATENT else None)
            rig.judge.count("requests", 2)


def _drawn(rig: Rig, tokens: torch.Tensor, count: int) -> torch.Tensor:
    left = tokens.tolist()
    return torch.tensor([left.pop(rig.mix.below(len(left))) for _ in range(count)], dtype=torch.int64)


@contextmanager
def _native(rig: Rig) -> Iterator[None]:
    if not hasattr(rig.names["server.variables"], NATIVE):
        raise CannotDrive(f"this release has no {NATIVE}, and its moves are compiled ones")
    override = getattr(rig.names["server.variables"], NATIVE).override(True)
    override.__enter__()
    try:
        yield
    finally:
        override.__exit__(None, None, None)  # without the exception: with one it would not restore the variable


def _move(rig: Rig, made: SmallPool, source: torch.Tensor, target: torch.Tensor, condition: str | None) -> None:
    kind, held = type(made.pool).__name__, made.writer.found.buffers
    if not hasattr(made.pool, "move_kv_cache"):
        raise CannotDrive(f"{kind} of this release has no move_kv_cache")
    for each in held:
        made.writer.write_field(each, OTHER, range(len(each.rows)))
        if each.unit in SINGLE:
            made.writer.write_field(each, OWNER, _ids(made, each, source))
    wanted = [_moved(made, each, source, target) for each in held]
    with rig.stubs.refused("move_kv_cache"):
        fault = attempt(lambda: rig.watched(lambda: made.pool.move_kv_cache(target, source)), rig.package)
    what = f"{kind}: tokens {source.tolist()} moved to {target.tolist()}"
    if isinstance(fault, Fault):
        if not fault.is_engine:
            raise CannotDrive(f"move_kv_cache: {fault.text} ({fault.where})")
        text = f"{what}: move_kv_cache raised {fault.text} ({fault.where})"
        rig.judge.find("KV902", "liveness", text, condition=condition)
    rig.judge.count("orderings_checked")
    for each, rows in zip(held, wanted, strict=True):
        _compare(rig, each, rows, what, condition)


def _moved(made: SmallPool, held: BufferView, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Expected rows of a buffer after the move: [rows, bytes]."""
    before, after = held.rows.clone(), held.rows.clone()
    if held.unit in SINGLE:
        after[_ids(made, held, target)] = before[_ids(made, held, source)]
    elif held.unit == "page":
        size = made.page_size
        if before.shape[1] != size * (INDEX_HEAD_DIM + SCALE_BYTES):
            raise CannotDrive(f"{held.name} has pages of {before.shape[1]} bytes, of which nobody knows the tokens")
        for first, count in ((0, INDEX_HEAD_DIM), (size * INDEX_HEAD_DIM, SCALE_BYTES)):
            for start, end in zip(source.tolist(), target.tolist(), strict=True):
                here, there = first + start % size * count, first + end % size * count
                after[end // size, there : there + count] = before[start // size, here : here + count]
    return after


def _ids(made: SmallPool, held: BufferView, tokens: torch.Tensor) -> list[int]:
    return [row for owned in made.owned(tokens) if owned.unit == held.unit for row in owned.ids]


def _compare(rig: Rig, held: BufferView, wanted: torch.Tensor, what: str, condition: str | None) -> None:
    """The first row is padding."""
    judge, seen = rig.judge, held.rows
    judge.reads += 1
    judge.words[held.name] = judge.words.get(held.name, 0) + seen[1:].numel() // 8
    wrong = torch.nonzero((seen[1:] != wanted[1:]).any(1)).view(-1)
    if len(wrong):
        row = 1 + int(wrong[0])
        text = (
            f"{what}: {held.unit} {row} of {held.name}, layer {held.layer}, is not what the move makes of it; "
            f"{int((seen[row] != wanted[row]).sum())} of its {seen.shape[1]} bytes and {len(wrong)} rows are wrong"
        )
        judge.find(
            "KV301", "content", text, buffer=held.name, layer=held.layer, row=row, request=OWNER, condition=condition
        )
