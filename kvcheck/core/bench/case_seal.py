"""Case: seal a transferred request with the digest of all its bytes at both ends, compared with moving those bytes.

The baseline is the cheapest transfer: from the source's pages to one block and from there to the target's pages, in one
memory. Over a network the cost of the seal is a smaller share.
"""

from __future__ import annotations

from functools import partial

import torch

from kvcheck.core.base.errors import WrongOutput
from kvcheck.core.bench.arms import Arm, ArmComparison, BenchSetting, Point, same
from kvcheck.core.bench.case_offload import sizes
from kvcheck.core.bench.decode_work import REQUEST, TwoHoldings
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.pools.pool import Holding
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.layout import EndLayout, end_layout
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.receiver import room_units
from kvcheck.core.cache.transfer.seal import Content, Sealer
from kvcheck.core.cache.transfer.wire import Ticket
from kvcheck.core.stress.targets.mutants.pd_transfer import SealWithoutKV
from kvcheck.kernels.page_copy import gather_rows, scatter_rows


def points(setting: BenchSetting) -> tuple[Point, ...]:
    shape = setting.shape
    return tuple(
        Point(
            case="seal",
            size=f"{tokens} tokens",
            shape=shape.name,
            bytes=TwoHoldings.bytes_of(shape, tokens),
            makers={
                "move": partial(_arm, shape=shape, tokens=tokens, moves=True, ends=0),
                "move-sealed": partial(_arm, shape=shape, tokens=tokens, moves=True, ends=2),
                "move-sealed-without-kv": partial(
                    _arm, shape=shape, tokens=tokens, moves=True, ends=2, kind=SealWithoutKV
                ),
                "seal": partial(_arm, shape=shape, tokens=tokens, moves=False, ends=1),
                "read": partial(_read, size=TwoHoldings.bytes_of(shape, tokens)),
            },
            comparisons=(
                ArmComparison(arm="move-sealed", baseline="move"),
                ArmComparison(arm="move-sealed", baseline="move-sealed-without-kv", name="move-sealed-to-mutant"),
                ArmComparison(arm="seal", baseline="move", limit="read", name="plus-seal"),
            ),
            note="beside a move within one memory, the cheapest transfer there is; limit: reading the bytes once",
        )
        for tokens in sizes(shape)[:2]
    )


class _SealEnd:
    def __init__(
        self, kind: type[Sealer], held: TwoHoldings, holding: Holding, layout: EndLayout, row: torch.Tensor
    ) -> None:
        self._sealer = kind(held.pool, layout, held.backend)
        self._content = Content(
            ticket=Ticket(room=3, generation=1, request=REQUEST),
            source_rank=0,
            units=room_units(layout, holding, held.tokens),
            pieces={(each.space, each.name): (0, each.total_shards) for each in layout.buffers},
            row=row,
        )

    def seal(self) -> torch.Tensor:
        return self._sealer.seal(self._sealer.plan(self._content))


def _arm(
    memory: FreshMemory, shape: ModelShape, tokens: int, *, moves: bool, ends: int, kind: type[Sealer] = Sealer
) -> Arm:
    held = TwoHoldings(memory, shape, tokens)
    metadata = MetadataBuffers(
        "decode", slots=1, hidden_size=shape.hidden_size, backend=held.backend, lane=held.pool.forward
    )
    layout = end_layout(held.pool, metadata, whole=shape, rank=0, ranks=1)
    source, target = (_SealEnd(kind, held, each, layout, metadata.row_view(0)) for each in (held.source, held.target))
    pairs = []
    for space, buffer, words in held.buffers():
        # Ranks send whole pages, so a seal covers each page to its end.
        rows = [held.whole_rows(each, space, buffer) for each in (held.source, held.target)]
        pairs.append((words, rows[0], rows[1], memory.words(len(words), len(rows[0]), words.shape[2])))
    seals: list[torch.Tensor] = []

    def move() -> None:
        for words, mine, theirs, block in pairs:
            gather_rows(block, words, mine)
            scatter_rows(words, block, theirs)

    def call() -> None:
        if moves:
            move()
        seals[:] = [end.seal() for end in (source, target)[:ends]]

    def check() -> None:
        if not moves:
            move()
        held.check()
        found = {tuple(each.tolist()) for each in (*seals, source.seal(), target.seal())}
        if len(found) != 1:
            raise WrongOutput(f"seal: expected one seal at both ends, got {len(found)} different ones")

    return Arm(call=call, check=check)


def _read(memory: FreshMemory, size: int) -> Arm:
    words = memory.words(size // 8)
    found: list[torch.Tensor] = []

    def call() -> None:
        found[:] = [words.sum()]

    def check() -> None:
        same("sum", found[0].cpu(), torch.tensor(int(words.cpu().numpy().sum())))

    return Arm(call=call, check=check)
