"""Case: load a prefix from the host tier next to a decode step that waits by layer, for the whole load, or not.

The check wipes the loaded pages before the load, so it detects an arm that reads without a load. An arm without a wait
is correct on one thread only; it is the baseline. With concurrent lanes its step races with its load: there the loaded
pages are checked, and a step over them.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kvcheck.core.base.cells import STREAMED
from kvcheck.core.bench.arms import Arm, ArmComparison, BenchSetting, Point, same
from kvcheck.core.bench.case_decode import SIZE
from kvcheck.core.bench.decode_work import DecodeStep
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import Node, SpaceCopy, Transfer, make_copy
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.pools.shape import ModelShape

RACES = "no-wait races with its load: its loaded pages are checked, and a step over them, not what it read"


def points(setting: BenchSetting) -> tuple[Point, ...]:
    ways = ("no-wait", "layer-wise", "whole-wait")
    shape = setting.shape
    return (
        Point(
            case="layer-load",
            size=SIZE,
            shape=shape.name,
            bytes=None,
            makers={way: partial(_arm, shape=shape, way=way) for way in ways},
            comparisons=tuple(ArmComparison(arm=way, baseline="no-wait") for way in ways[1:]),
            note=RACES if setting.kind in STREAMED else "one core copies and computes: waits cost, nothing overlaps",
        ),
    )


def _arm(memory: FreshMemory, *, shape: ModelShape, way: str) -> Arm:
    backend = memory.backend()
    step = DecodeStep(memory, shape, backend)
    pool = step.pool
    spaces = [name for name in pool.paged if name in pool.sets]
    pages = {name: step.context_pages(name) for name in spaces}
    units = {spec.name: len(pages.get(spec.name, np.zeros(1))) for spec in pool.specs}
    host = HostPool(
        pool.specs, units=units, page_size=pool.page_size, layout="layer-first", method="direct", backend=backend
    )
    controller = TransferController(pool, host, backend)
    root = PrefixTree(pool.page_size).root
    copies = tuple(
        make_copy(name, np.arange(len(pages[name]), dtype=np.int64), pages[name], [b""] * len(pages[name]), owners=1)
        for name in spaces
    )
    backup = _transfer(0, "backup", copies, root)
    controller.backup(backup)
    controller.wait(backup)
    take = step.guarded if way == "layer-wise" else step.bare

    def call() -> None:
        load = _transfer(1, "load", copies, root)
        controller.queue_load(load)
        controller.start_loads()
        assert load.producer is not None, "every earlier load has been taken"
        controller.gate.consume([load.producer] if way == "layer-wise" else [])
        if way == "whole-wait":
            controller.wait(load)
        take()
        controller.wait(load)
        controller.finished_loads()
        controller.take_load()

    def check() -> None:
        step.bare()
        expected = step.numbers()
        loaded = [
            (f"loaded pages of {name}.{buffer.name}", pool.sets[name].write_view(buffer.name), rows)
            for name in spaces
            for buffer in pool.sets[name].spec.buffers
            if len(rows := step.context_rows(name, buffer))
        ]
        kept = [words[:, rows] for _, words, rows in loaded]
        for _, words, rows in loaded:
            words[:, rows] = 0
        backend.drain()
        call()
        backend.drain()
        for (what, words, rows), before in zip(loaded, kept, strict=True):
            same(what, words[:, rows], before)
        if way == "no-wait" and memory.kind in STREAMED:
            step.bare()
        same("attention over loaded pages", step.numbers(), expected)

    return Arm(call=call, check=check)


def _transfer(number: int, kind: str, copies: tuple[SpaceCopy, ...], lock: Node) -> Transfer:
    return Transfer(number=number, kind=kind, request=1, nodes=[], copies=copies, lock=lock)
