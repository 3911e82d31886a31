"""The memory of a room at both ends: its pages and slots, their names, and the regions that peers may write.

Invariants:
- Sender, receiver and seal compute a prompt's units by the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray, first_seen_page, pages_for
from kvcheck.core.cache.backend.backend import Footprint
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.transfer.blocks import PageRun
from kvcheck.core.cache.transfer.layout import EndLayout
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.wire import Wire

Units = Mapping[tuple[str, str], IndexArray]
"""Physical pages or slots by leg and space, in logical order."""


def register_memory(wire: Wire, pool: KVPool, metadata: MetadataBuffers, seals: torch.Tensor) -> None:
    """Register all memory of a rank."""
    wire.register("seals", seals.view(-1))
    wire.register("metadata", metadata.memory())
    for space, buffer in pool.buffers():
        words = pool.sets[space].write_view(buffer.name)
        wire.register(f"{space}.{buffer.name}", words.view(torch.uint8).view(-1))


def needed_pages(layout: EndLayout, space: str, tokens: int) -> range:
    """Logical pages that a prompt needs: of a window, those that its next position sees."""
    first = first_seen_page(tokens, layout.window, layout.page_size) if space == "window" else 0
    return range(first, pages_for(tokens, layout.page_size))


def held_run(layout: EndLayout, holding: Holding, space: str, tokens: int) -> PageRun:
    """Pages of a holding's first `tokens` tokens, without leading pages that are gone."""
    pages = holding.window_pages if space == "window" else holding.pages
    held = pages[: pages_for(tokens, layout.page_size)]
    gone = int(np.argmax(held > 0)) if len(held) else 0
    return PageRun(gone, held[gone:])


def room_units(layout: EndLayout, holding: Holding, tokens: int) -> Units:
    """Pages and slots that a prompt transfers."""
    units: dict[tuple[str, str], IndexArray] = {}
    for leg, space in layout.parts:
        if space == "state":
            units[leg, space] = np.array([holding.state_slot], dtype=np.int64)
        else:
            needed = needed_pages(layout, space, tokens)
            pages = holding.window_pages if space == "window" else holding.pages
            units[leg, space] = pages[needed.start : needed.stop]
    return units


def room_footprints(layout: EndLayout, units: Units, request: int) -> tuple[Footprint, ...]:
    touched = []
    for (leg, space), ids in units.items():
        buffers = [each for each in layout.buffers if (each.leg, each.space) == (leg, space)]
        names = tuple(each.name for each in buffers)
        owners = np.full(len(ids), request, dtype=np.int64)
        touched.append(Footprint(space, names, (0, buffers[0].rows.layers), ids.copy(), owners=owners))
    return tuple(touched)
