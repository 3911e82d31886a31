"""Bug c put back, piece by piece: state lists of different lengths are trimmed, broadcast, or not checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvcheck.core.base.errors import TargetError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.transfer.blocks import PageRun
from kvcheck.core.cache.transfer.messages import Want
from kvcheck.core.cache.transfer.sender import OutboundRoom, Sender
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED


def _by_place(source: PageRun, target: PageRun, needed: range) -> tuple[IndexArray, IndexArray]:
    return source.pages[max(0, needed.start - source.first) :][: len(needed)], target.pages[: len(needed) + 1]


class TrimsOneSide(Sender):
    """A shorter source list is cut to the target's length, which changes nothing; a longer one is left alone."""

    def _pair(self, source: PageRun, target: PageRun, *, needed: range, what: str) -> IndexArray:
        if "state" not in what:
            return super()._pair(source, target, needed=needed, what=what)
        mine, theirs = _by_place(source, target, needed)
        if len(mine) < len(theirs):
            mine = mine[: len(theirs)]
            theirs = theirs[: len(mine)]
        elif len(theirs) and len(mine) > len(theirs):  # the run is written whole, over the rows behind
            theirs = theirs[0] + np.arange(len(mine), dtype=np.int64)
        return np.stack((mine[: len(theirs)], theirs), axis=1)


class TrimsTail(Sender):
    def _pair(self, source: PageRun, target: PageRun, *, needed: range, what: str) -> IndexArray:
        if "state" not in what:
            return super()._pair(source, target, needed=needed, what=what)
        mine, theirs = _by_place(source, target, needed)
        shorter = min(len(mine), len(theirs))
        return np.stack((mine[:shorter], theirs[:shorter]), axis=1)


class Broadcasts(Sender):
    def _pair(self, source: PageRun, target: PageRun, *, needed: range, what: str) -> IndexArray:
        if "state" not in what:
            return super()._pair(source, target, needed=needed, what=what)
        mine, theirs = _by_place(source, target, needed)
        longer = max(len(mine), len(theirs)) if len(mine) and len(theirs) else 0
        return np.stack((np.resize(mine, longer), np.resize(theirs, longer)), axis=1)


class TrimChangesRequest(Sender):
    def _state_pairs(self, sending: OutboundRoom, want: Want) -> dict[str, IndexArray]:
        assert sending.holding is not None
        length = len(self._run(want, "state", "full").pages)
        if 0 < length < len(sending.holding.pages):
            sending.holding.pages = sending.holding.pages[:length]
        return super()._state_pairs(sending, want)


class StateResultIgnored(Sender):
    def _send_state(
        self, sending: OutboundRoom, want: Want, peer: str, pairs: Mapping[str, IndexArray], after: Sequence[Signal]
    ) -> None:
        try:
            super()._send_state(sending, want, peer, pairs, after)
        except TargetError:
            return


_C = "SGLang #18727 and #23323 (state index lists of different lengths)"

_mutant = partial(
    Mutant,
    bug="c",
    scenario="pd-transfer",
    shape="glm-5.1-tiny",
    killed_by="protocol",
    code="KV301",
)
STATE_PAIRS: tuple[Mutant, ...] = (
    _mutant(
        name="align-trims-one-side",
        parts=replace(FIXED, sender=TrimsOneSide),
        shows="A source list shorter than the target's is 'trimmed' to the target's length; a longer one is not.",
        matters="The run is written whole: it ends in the next page of the decode pool, which is another request's.",
        example=f"{_C}: the trim that changed nothing.",
    ),
    _mutant(
        name="align-trims-tail",
        parts=replace(FIXED, sender=TrimsTail),
        shows="The longer of two state lists loses its tail, with a warning.",
        matters="The last index pages are never written, and windows that start on different pages are paired wrongly.",
        example=f"{_C}: the fix that was merged.",
    ),
    _mutant(
        name="align-broadcasts",
        parts=replace(FIXED, sender=Broadcasts),
        shape="gpt-oss-tiny",
        shows="Two lists of unequal lengths are broadcast against each other.",
        matters="One page is written over several, or several over one, and no error is raised.",
        example=f"{_C}: array arithmetic on lists of 1 and n pages.",
    ),
    _mutant(
        name="trim-changes-request",
        parts=replace(FIXED, sender=TrimChangesRequest),
        killed_by="accounting",
        code="KV401",
        shows="The trim cuts the request's own list of pages.",
        matters="What was cut off is never freed, and the request's later chunks miss it.",
        example="SGLang's transfer worker shortened the chunk's indices in place, for the destinations after it too.",
    ),
    _mutant(
        name="state-result-ignored",
        parts=replace(FIXED, sender=StateResultIgnored),
        code="KV603",
        shows="A state write fails, and the sender reports success.",
        matters="Without a seal the request decodes with another's state; with one it waits until it times out.",
        example="SGLang before 0.5.17 ignored what the extra transfer returned.",
    ),
)
