"""Legal calls at an edge: each one tells of an engine whose class gets it wrong, and of no other.

Invariants:
- A faulty class differs from the engine's own in the one thing that its row is about.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.buffers import BufferSet
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.request import Request, RunningRequest
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.receiver import InboundRoom, Receiver
from kvcheck.core.cache.transfer.sender import Sender
from kvcheck.core.targets.misuse.pair_rounds import pair_attempts
from kvcheck.core.targets.misuse.rounds import round_attempts
from kvcheck.core.targets.misuse.scene import Scene
from kvcheck.core.targets.misuse.sizes import page_bytes, size_attempts, unit_bytes
from kvcheck.core.targets.parts import FIXED, TargetParts
from kvcheck.core.workload.shapes import TINY_SHAPES, shape


def told(parts: TargetParts, name: str) -> set[str]:
    """The names of the calls that go wrong."""
    scene = Scene(parts, shape(name))
    made = [each.make() for each in (*size_attempts(scene), *round_attempts(scene), *pair_attempts(scene))]
    return {each.partition(":")[0] for each in made if isinstance(each, str)}


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_nothing_is_told_of_the_code_as_it_is(name: str) -> None:
    assert told(FIXED, name) == set()


class ShortConv(KVPool):
    """Keeps one input of the convolution too few."""

    def __init__(self, shape: ModelShape, *values: Any, **named: Any) -> None:
        super().__init__(replace(shape, conv_kernel=shape.conv_kernel - 1), *values, **named)


class LongRanges(BufferSet):
    """The addresses go on behind the last byte."""

    def storage_ranges(self) -> dict[str, tuple[int, int]]:
        return {name: (start, stop + 8) for name, (start, stop) in super().storage_ranges().items()}


class FullAlone(KVPool):
    """Forgets that window pages can be scarcer."""

    @property
    def pages_free(self) -> int:
        return self.allocators["full"].available


class FirstChunk(Offload):
    """Saves the rows of the first chunk alone, and then the same ones again."""

    def _saved_rows(self, extent, space, buffer):  # type: ignore[no-untyped-def]
        rows: IndexArray = super()._saved_rows(extent, space, buffer)
        return rows[np.arange(len(rows)) % 8192]


class OwnNumbers(Offload):
    """Counts its values as if no other one were on the backend."""

    def _next_number(self) -> int:
        self._count += 1
        return self._count


class OneMore(Scheduler):
    """Lets one prompt more than it should be prefilled."""

    def _admit(self) -> None:
        own = self.config
        self.config = replace(own, max_prefilling=own.max_prefilling + 1)
        super()._admit()
        self.config = own


class OneMoreRuns(Scheduler):
    """Lets one request more than it should run."""

    def _join_ready(self) -> None:
        own = self.config
        self.config = replace(own, max_running=own.max_running + 1)
        super()._join_ready()
        self.config = own


class LeavesAPage(Scheduler):
    """Keeps a page that nobody needs."""

    def _reserved(self) -> int:
        return super()._reserved() + len(self._prefilling)


class KeepsWaiting(Scheduler):
    """An abort does not find what waits."""

    def abort(self, request_id: int) -> bool:
        return all(each.request_id != request_id for each in self._waiting) and super().abort(request_id)


class ResumesAlone(Scheduler):
    """A retracted request waits until nothing else runs."""

    def _resume(self) -> None:
        if not self._running:
            super()._resume()


class BlockedByTheFirst(Scheduler):
    """Whoever waits for the store blocks all behind it."""

    def _awaits_store(self, request: Request) -> bool:
        return super()._awaits_store(request) or self._fetching() > 0


class KeepsNothing(Scheduler):
    """Offers a prompt to the tree at the end alone."""

    def _cache_prompt(self, active: RunningRequest) -> None:
        return None


class AsksAll(DecodeScheduler):
    """Asks for every prompt at once."""

    def _admit(self) -> None:
        own = self.config
        self.config = replace(own, max_prefilling=100)
        super()._admit()
        self.config = own


class JoinsNothing(DecodeScheduler):
    """Runs a request without what came with it."""

    def _join(self, active: RunningRequest) -> None:
        active.metadata = None
        super()._join(active)


class Unmarked(Receiver):
    """Leaves in the memory of a room what was there."""

    def _mark(self, receiving: InboundRoom) -> None:
        return None


class Silent(Receiver):
    """Ends a room without the reason."""

    def fail(self, receiving: InboundRoom, reason: str) -> None:
        super().fail(receiving, "")


class Credulous(Receiver):
    """Hears everybody, and waits for everybody's seal."""

    def poll(self) -> None:
        own = self.sources
        self.sources = {**own, "another-0": own["prefill-0"]}
        super().poll()
        self.sources = own


class WaitsForEver(Sender):
    """Gives a room that was asked for before it is opened no deadline."""

    def open(self, room: int, request: int, tokens: int, *, attempt: int = 0) -> None:
        super().open(room, request, tokens, attempt=attempt)
        self._rooms[room].deadline = None


class LosesAborts(Sender):
    """Gives no reason for a room that failed, so it never looks like one that did."""

    def reason(self, room: int) -> str:
        return ""


class RefusesInSilence(Sender):
    """Refuses a room that it never opened, and tells nobody."""

    def refuse(self, room: int, attempt: int, reason: str) -> None:
        self._wants.end(room, attempt, reason)


class SendsAnyLength(Sender):
    """Looks at what a rank has asked for after it has sent it."""

    def _each_peer(self, sending, write):  # type: ignore[no-untyped-def]
        for peer in self._peers:
            write(peer)
        super()._each_peer(sending, lambda peer: None)


@pytest.mark.parametrize(
    ("parts", "name", "calls"),
    [
        (replace(FIXED, pool=ShortConv), "qwen3-next-tiny", {"the bytes of every buffer"}),
        (replace(FIXED, buffers=LongRanges), "llama-3-tiny", {"the bytes of every buffer"}),
        (replace(FIXED, pool=FullAlone), "gpt-oss-tiny", {"the pages that the scarcest space can give"}),
        (replace(FIXED, offload=FirstChunk), "llama-3-tiny", {"save and restore of more rows than a chunk has"}),
        (replace(FIXED, offload=OwnNumbers), "llama-3-tiny", {"save with a second Offload on the same backend"}),
        (
            replace(FIXED, scheduler=OneMore),
            "llama-3-tiny",
            {"one prompt more than may be prefilled together", "one fetch more than may be prefilled together"},
        ),
        (replace(FIXED, scheduler=OneMoreRuns), "llama-3-tiny", {"one request more than may run together"}),
        (replace(FIXED, scheduler=LeavesAPage), "llama-3-tiny", {"prompts that just fill all pages"}),
        (replace(FIXED, scheduler=KeepsWaiting), "llama-3-tiny", {"abort of a request that waits"}),
        (replace(FIXED, scheduler=ResumesAlone), "llama-3-tiny", {"resume beside a request that runs"}),
        (
            replace(FIXED, scheduler=BlockedByTheFirst),
            "llama-3-tiny",
            {"a prompt behind one that is fetched"},
        ),
        (replace(FIXED, scheduler=KeepsNothing), "llama-3-tiny", {"the tokens that are offered"}),
        (replace(FIXED, decode_scheduler=AsksAll), "llama-3-tiny", {"one prompt more than may be on its way"}),
        (replace(FIXED, decode_scheduler=JoinsNothing), "llama-3-tiny", {"a prompt from end to end"}),
        (replace(FIXED, receiver=Unmarked), "llama-3-tiny", {"the memory of a room that is asked for"}),
        (replace(FIXED, receiver=Silent), "llama-3-tiny", {"the reason of an abort at the other end"}),
        (
            replace(FIXED, receiver=Credulous),
            "llama-3-tiny",
            {"messages of a rank that is no peer", "a prompt from end to end"},
        ),
        (replace(FIXED, sender=RefusesInSilence), "llama-3-tiny", {"refusal of a room that is asked for"}),
        (
            replace(FIXED, sender=SendsAnyLength),
            "llama-3-tiny",
            {"a prompt that has another length at the other end"},
        ),
        (replace(FIXED, sender=WaitsForEver), "llama-3-tiny", {"open of a room that is asked for"}),
        (
            replace(FIXED, sender=LosesAborts),
            "llama-3-tiny",
            {
                "abort of a prompt that nobody has asked for",
                "the reason of an abort at the other end",
                "open of a room that was aborted",
                "a room that a decode rank could not take",
            },
        ),
    ],
)
def test_a_faulty_class_is_told_by_its_call(parts: TargetParts, name: str, calls: set[str]) -> None:
    assert told(parts, name) == calls


def test_bytes_of_a_page_and_a_slot() -> None:
    """Against numbers that were worked out by hand: 4 tokens of 2 heads, and an index page of 64 tokens."""
    llama, nsa, mamba = shape("llama-3-tiny"), shape("glm-5.1-tiny"), shape("qwen3-next-tiny")
    assert page_bytes(llama) == dict.fromkeys(("k", "v"), llama.page_size * llama.num_kv_heads * llama.head_dim * 2)
    assert unit_bytes(nsa) == {("full", "latent"): 2 * 64 * 16 * 2, ("full", "index_k_with_scale"): 2 * 8448}
    assert unit_bytes(mamba)["state", "conv"] == len(mamba.state_layers) * 16 * 3 * mamba.conv_dtype.itemsize
