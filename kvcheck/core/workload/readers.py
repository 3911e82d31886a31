"""Readers: who reads the cache, how a packed page is read, and which reads make no wait of their own.

Invariants:
- Every reader goes through the one guarded read; readers differ in the lane, the piece, and when they wait.
"""

from __future__ import annotations

from dataclasses import dataclass

INDEX_READERS = (("key", "scale"), ("",), ("scale", "key"))
"""The readers of a packed index page, pass by pass: one for keys and one for scales, or one for both at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """Who reads besides the forward pass, layer by layer.

    early_send: a second lane reads a request's cached prefix beside its first pass, as an early send to a decode node
    or a draft model does. replay_every: every so many passes is a replayed graph, whose reads make no waits of their
    own; 0: none is. one_layer: only the first layer of each space is written and read; what a pass samples depends on
    positions, not on how many layers say the same, so a reference run needs no more.
    """

    early_send: bool = False
    replay_every: int = 0
    one_layer: bool = False
