"""Rooms whose seal never fits: the failure says which buffer, layer and page of which source holds what instead.

The engine differs from the fixed one in what one writer sends; the seal is right, so the room can only be too late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from rigs.settings import with_settings

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.base.record import Finding, Verdict
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.transfer.messages import Want
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket, Wire
from kvcheck.core.cache.transfer.writer import Writer
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant
from kvcheck.core.stress.targets.target import FIXED
from kvcheck.core.stress.workload.events import RoomDrained, Unsealed

Pairs = Mapping[str, IndexArray]
After = Sequence[Signal]


def leaves_out(buffer: str) -> type[Writer]:
    class LeavesOut(Writer):
        def write(self, want: Want, peer: str, leg: str, pairs: Pairs, *, after: After) -> None:
            whole = self._layout
            self._layout = replace(whole, buffers=tuple(each for each in whole.buffers if each.name != buffer))
            super().write(want, peer, leg, pairs, after=after)
            self._layout = whole

    return LeavesOut


class CrossedWire:
    """A wire that writes k where v belongs, and the other way round."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def write(self, peer: str, leg: str, writes: Sequence[RegionWrite], *, ticket: Ticket, after: After) -> Signal:
        other = {"full.k": "full.v", "full.v": "full.k"}
        crossed = [replace(each, target=other.get(each.target, each.target)) for each in writes]
        return self._wire.write(peer, leg, crossed, ticket=ticket, after=after)


class ExchangesBuffers(Writer):
    def write(self, want: Want, peer: str, leg: str, pairs: Pairs, *, after: After) -> None:
        own = self._wire
        self._wire = CrossedWire(own)  # type: ignore[assignment]
        super().write(want, peer, leg, pairs, after=after)
        self._wire = own


class ExchangesHeads(Writer):
    """Of two sources of one row, each writes where the other does."""

    def write(self, want: Want, peer: str, leg: str, pairs: Pairs, *, after: After) -> None:
        own = self._slices[peer]
        self._slices[peer] = {key: replace(each, target_first=1 - each.target_first) for key, each in own.items()}
        super().write(want, peer, leg, pairs, after=after)
        self._slices[peer] = own


class SendsTheFirstPage(Writer):
    """Every page of a prompt is sent as its first one."""

    def write(self, want: Want, peer: str, leg: str, pairs: Pairs, *, after: After) -> None:
        first: dict[str, IndexArray] = {}
        for space, rows in pairs.items():
            page = FIRST_PAGE.setdefault((peer, want.room), rows[0, 0])
            first[space] = np.column_stack([np.full(len(rows), page), rows[:, 1]])
        super().write(want, peer, leg, first, after=after)


FIRST_PAGE: dict[tuple[str, int], int] = {}


def failures(writer: type[Writer], shape: str, ranks: str) -> list[Finding]:
    FIRST_PAGE.clear()
    cell = Plan(scenario="pd-transfer", shape=shape, seed=3, requests=4, strategy="eager", ranks=ranks)
    plan = with_settings(cell, "fault kind:short lists, refusals", is_calm=True)
    outcome = ScheduleRunner(BuiltinTarget(replace(FIXED, writer=writer))).run(plan)
    return [each for each in outcome.findings if each.code == "KV604"]


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("writer", "shape", "ranks", "buffer", "texts"),
    [
        (leaves_out("v"), "llama-3-tiny", "1x1", "v", "v, layer 0, page ... which prefill-0 had ... never written"),
        (leaves_out("v"), "gpt-oss-tiny", "1x1", "v", "v, layer ... never written"),
        (leaves_out("index_k_with_scale"), "glm-5.1-tiny", "1x1", "index_k_with_scale", ".key, layer 0 ... never wr"),
        (leaves_out("ssm"), "qwen3-next-tiny", "1x1", "ssm", "ssm, layer ... slot ... never written"),
        (ExchangesBuffers, "llama-3-tiny", "1x1", "k", "k, layer 0, page ... words of buffer v of request"),
        (ExchangesHeads, "llama-3-tiny", "2x1", "k", "which prefill-0 had to write ... words of head 1 of request"),
        (SendsTheFirstPage, "llama-3-tiny", "1x1", "k", "k, layer 0, page ... holds the bytes of position"),
    ],
)
def test_a_room_that_is_too_late_says_what_its_memory_holds(
    writer: type[Writer], shape: str, ranks: str, buffer: str, texts: str
) -> None:
    found = failures(writer, shape, ranks)
    assert found and found[0].buffer == buffer, found
    assert all(text in found[0].message for text in texts.split(" ... ")), found[0].message
    assert found[0].layer is not None and found[0].page is not None


@pytest.mark.schedules
def test_a_room_with_a_fault_is_looked_at_and_stays_excused() -> None:
    seen: list[Unsealed] = []
    cell = Plan(scenario="pd-transfer", shape="llama-3-tiny", seed=1, strategy="eager")
    plan = with_settings(cell, "rank layout:1x1", "fault kind:losses", "faulty leg:kv")
    outcome = ScheduleRunner(BuiltinTarget()).run(plan, handlers=((Unsealed, seen.append),))
    assert outcome.verdict is Verdict.PASS, outcome.findings
    assert seen and all(each.words and each.rows for each in seen), "a write that vanished left its mark"


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("name", "shape", "schedule"),
    [("abort-frees-what-is-sent", "llama-3-tiny", 8), ("timeout-counts-as-drain", "llama-3-tiny", 23)],
)
def test_a_drained_room_shows_that_memory_was_given_away_too_early(name: str, shape: str, schedule: int) -> None:
    """The request has ended, so nobody reads what came: only its room shows it."""
    seen: list[RoomDrained] = []
    card = mutant(name)
    plan = Plan(scenario="pd-transfer", shape=shape, seed=1, schedule=schedule, strategy="portfolio")
    fixed = ScheduleRunner(BuiltinTarget()).run(plan, handlers=((RoomDrained, seen.append),))
    assert fixed.verdict is Verdict.PASS and seen, fixed.findings
    assert all(each.words for each in seen)
    broken = ScheduleRunner(BuiltinTarget(card.parts)).run(plan)
    found = [each for each in broken.findings if each.oracle == "content"]
    assert found and {each.code for each in found} == {"KV102"}, broken.findings
    assert "the room of request" in found[0].message and found[0].seen_request != found[0].request
