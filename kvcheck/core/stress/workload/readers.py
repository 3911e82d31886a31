"""Readers: the settings of a run's readers beside the forward pass. Every reader calls the one guarded read."""

from __future__ import annotations

from dataclasses import dataclass

INDEX_READERS = (("key", "scale"), ("",), ("scale", "key"))
"""The readers of a packed index page, pass by pass: one for keys and one for scales, or one for both at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """early_send: a second lane reads a request's cached prefix beside its first pass, as an early send to a decode
    node or a draft model does. replay_every: one pass in so many is a replayed graph, whose reads make no waits; 0:
    none. one_layer: only the first layer of each space is written and read, for the reference run: the tokens are the
    same."""

    early_send: bool = False
    replay_every: int = 0
    one_layer: bool = False
