"""Ids, letters and page arithmetic shared by every layer.

Invariants:
- Page 0 and slot 0 of a device pool are padding: never allocated.
- `loc` is a token's place in a pool: `page * page_size + offset`.

Letters used in shape comments throughout the package:
    L  layers of a buffer          R  rows of a buffer            N  token slots of a pool
    P  tokens a page (page_size)   B  requests of a batch         T  tokens, summed over a batch
    W  64-bit (or 32-bit) words of a row or of a piece of one
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IndexArray: TypeAlias = npt.NDArray[np.int64]
"""Host-side ids: pages, slots or locs; one dimension unless noted."""
PageIndices: TypeAlias = IndexArray


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def floor_to_page(tokens: int, page_size: int) -> int:
    return tokens - tokens % page_size


def first_seen_page(query: int, window: int, page_size: int) -> int:
    """The first logical page that position `query` sees through a window of `window` tokens, itself included."""
    return max(0, query + 1 - window) // page_size


def spans_of(starts: IndexArray, stops: IndexArray) -> IndexArray:
    """[n, 2]: the token ranges [starts[i], stops[i])."""
    spans = np.empty((len(starts), 2), dtype=np.int64)
    spans[:, 0], spans[:, 1] = starts, stops
    return spans


def locs_of(pages: PageIndices, start: int, stop: int, page_size: int) -> IndexArray:
    """Locs of the logical tokens [start, stop) of a request: [stop - start]. pages: its physical ids, in order."""
    positions = np.arange(start, stop, dtype=np.int64)
    locs: IndexArray = pages[positions // page_size] * page_size + positions % page_size
    return locs
