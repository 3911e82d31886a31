"""Faults that are planted in a running engine: what was ordered, which pages it falls on, and what was done.

An order is a file of JSON, so that one server can be given one fault after the other. An engine's plug-in reads it
before each write of the ordered layer, and notes what it has done in the log, an event a line:

    {"kind": "stale", "layer": 2, "page": 1}
    {"event": "planted", "kind": "stale", "layer": 2, "page": 1, "block": 57, "request": "cmpl-a-0",
     "positions": [32, 63]}
    {"event": "reads", "layer": 2, "page": 1, "block": 57, "request": "cmpl-b-0"}
    {"event": "gone", "layer": 2, "block": 57}

A rule of attention that is broken for requests that began with a hit has no page:

    {"kind": "window-longer", "layer": 0}
    {"event": "planted", "kind": "window-longer", "layer": 0, "request": "cmpl-b-0"}

Invariants:
- Standard library alone: this runs in an engine's own process.
- A page is a candidate only where one prefill writes all of it, so that nothing but the fault decides what it holds.
- What was planted is noted with the request it was written for, and so is each other request that has the page in its
  table until it is written again.
- A broken rule is noted once for each request of whose newest token it changed what the layer returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Content = tuple[Any, ...]
"""Tensors of one page."""
STALE, FOREIGN = "stale", "foreign"
WINDOW_LONGER, WINDOW_SHORTER, SINK_LOST, SINK_TWICE = "window-longer", "window-shorter", "sink-lost", "sink-twice"
RULES = (WINDOW_LONGER, WINDOW_SHORTER, SINK_LOST, SINK_TWICE)
"""Kinds that break a rule of attention, not a page."""
KINDS = (STALE, FOREIGN, *RULES)
ORDERS, LOG = "KVCHECK_FAULT_ORDERS", "KVCHECK_FAULT_LOG"
"""Variables with the paths of the order and of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """kind: stale leaves the page's former content, foreign puts another request's page there. window-longer and
    window-shorter: the layer's window has one position more or less; sink-lost: it has no sink; sink-twice: each of its
    sinks is doubled. page: of the request, from 0; negative: from the last page that the prefill fills. same: 1: a
    foreign page is the page of another request in the same place, where there is one. A page is planted once; a rule
    is broken until its order is taken away, and has no page.
    """

    kind: str
    layer: int
    page: int = 0
    same: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.layer < 0:
            raise ValueError(f"an order has a kind of {KINDS} and a layer; got {self}")

    def give(self, path: Path) -> None:
        """Write it to where the plug-in reads it, in one step."""
        draft = path.with_name(f"{path.name}.tmp")
        fields = {name: getattr(self, name) for name in ("kind", "layer", "page", "same")}
        draft.write_text(json.dumps(fields), encoding="utf-8")
        os.replace(draft, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A request in the batch of one step. computed: tokens that the cache held before it. length: tokens after it.
    blocks: the page table, at least as far as `length`.
    """

    request: str
    computed: int
    length: int
    blocks: Sequence[int]

    def filled(self, page_size: int) -> range:
        """Pages of the request that this step writes from their first token to their last; none in a decode."""
        if self.length - self.computed < 2:
            return range(0)
        return range(-(-self.computed // page_size), self.length // page_size)


@dataclass(frozen=True, slots=True)
class Held:
    request: str
    page: int


@dataclass(slots=True)
class Planter:
    orders: Path
    log: Path
    page_size: int
    _order: Order | None = None
    _stamp: tuple[int, int] | None = None
    _is_done: bool = False
    _held: dict[int, Held] = field(default_factory=dict)
    _damaged: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    _began_with_hit: dict[str, bool] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def order(self) -> Order | None:
        """The order as the file has it now; None where it has none, or it has been done."""
        try:
            stat = self.orders.stat()
        except FileNotFoundError:
            self._order, self._stamp = None, None
            return None
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp != self._stamp:
            self._order = Order(**json.loads(self.orders.read_text(encoding="utf-8")))
            self._stamp, self._is_done = stamp, False
            self._told.clear()
        return None if self._is_done else self._order

    def candidates(self, order: Order, rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
        """Rows and the page of each that the order falls on in this step."""
        for row in rows:
            filled = row.filled(self.page_size)
            page = order.page if order.page >= 0 else filled.stop + order.page
            if page in filled:
                yield row, page

    def behind_hits(self, rows: Sequence[Row]) -> list[int]:
        """Which rows are of requests that the cache held a beginning of when they were first computed. Called for each
        step, so that the first one of each request is seen."""
        for row in rows:
            self._began_with_hit.setdefault(row.request, row.computed > 0)
        return [i for i, row in enumerate(rows) if self._began_with_hit[row.request]]

    def broken(self, order: Order, row: Row) -> None:
        if row.request not in self._told:
            self._told.add(row.request)
            self._note({"event": "planted", "kind": order.kind, "layer": order.layer, "request": row.request})

    def sources(self, row: Row, same: int | None = None) -> list[tuple[int, Held]]:
        """Blocks that were written for other requests, the latest first. same: those of this page before all others."""
        own = set(row.blocks[: -(-row.length // self.page_size)])
        found = [
            (block, held)
            for block, held in reversed(self._held.items())
            if held.request != row.request and block not in own
        ]
        return found if same is None else sorted(found, key=lambda each: each[1].page != same)

    def planted(self, order: Order, row: Row, page: int, source: tuple[int, Held] | None) -> None:
        self._is_done = True
        block = row.blocks[page]
        self._damaged[order.layer, block] = {row.request}
        first = page * self.page_size
        event: dict[str, object] = {"event": "planted", "kind": order.kind, "layer": order.layer, "page": page}
        event |= {"block": block, "request": row.request, "positions": [first, first + self.page_size - 1]}
        if source is not None:
            event["source"] = {"block": source[0], "request": source[1].request, "page": source[1].page}
        self._note(event)

    def wrote(self, layer: int, rows: Sequence[Row]) -> None:
        """Note what a step writes in a layer, and who has a damaged page in its table. Called before it is planted."""
        for row in rows:
            for page in range(row.computed // self.page_size, -(-row.length // self.page_size)):
                block = row.blocks[page]
                if page in row.filled(self.page_size):
                    self._held.pop(block, None)
                    self._held[block] = Held(row.request, page)
                elif page * self.page_size >= row.computed:
                    self._held.pop(block, None)  # it is begun for somebody else
                if page * self.page_size >= row.computed and self._damaged.pop((layer, block), None) is not None:
                    self._note({"event": "gone", "layer": layer, "block": block})
        for (where, block), readers in self._damaged.items():
            for row in rows if where == layer else ():
                pages = row.blocks[: -(-row.length // self.page_size)]
                if row.request not in readers and block in pages:
                    readers.add(row.request)
                    event = {"event": "reads", "layer": layer, "page": pages.index(block), "block": block}
                    self._note({**event, "request": row.request})

    def around_write(
        self,
        layer: int,
        rows: Sequence[Row],
        store: Callable[[], None],
        held: Callable[[int], Content],
        put: Callable[[int, Content], None],
    ) -> None:
        """Let a step write into a layer, which `store` does, and damage the ordered page of it, where that changes what
        the page holds. held: a copy of what a block holds; put: write it."""
        order = self.order()
        chosen = []
        if order is not None and order.layer == layer and order.kind not in RULES:
            chosen = [(row, page, held(row.blocks[page])) for row, page in self.candidates(order, rows)]
        self.wrote(layer, rows)
        store()
        for row, page, former in chosen:
            if order is not None and self.order() == order:  # it is not done yet
                self._plant(order, row, page, former, held, put)

    def _plant(
        self,
        order: Order,
        row: Row,
        page: int,
        former: Content,
        held: Callable[[int], Content],
        put: Callable[[int, Content], None],
    ) -> None:
        sources: list[tuple[int, Held] | None] = [None]
        if order.kind == FOREIGN:
            sources = [*self.sources(row, page if order.same else None)]
        now = held(row.blocks[page])
        for source in sources:
            content = former if source is None else held(source[0])
            if not all(one.equal(other) for one, other in zip(now, content, strict=True)):
                put(row.blocks[page], content)
                self.planted(order, row, page, source)
                return

    def _note(self, event: dict[str, object]) -> None:
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(event) + "\n")


def fault_orders(folder: Path) -> Path:
    """Where a server with faults reads its orders (`Order.give`)."""
    return folder.resolve() / "fault_orders.json"


def fault_log(folder: Path) -> Path:
    """Where it notes what it has planted (`events`)."""
    return folder.resolve() / "fault_log.jsonl"


def events(log: Path) -> list[dict[str, object]]:
    """What the log has; none where it does not exist yet."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
