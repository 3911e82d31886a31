"""The layer gate: its ring, and which lane waits for what, as an onlooker of the backend is told."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from litmus.onlooker import Inbox, Onlooker

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.hicache.layer_gate import LayerGate

LAYERS = 3
LANES = ("h2d", "h2d.side")


@dataclass(slots=True)
class Gate:
    """A gate over two load lanes, and what its backend was told. events: records of (producer, layer), by lane."""

    gate: LayerGate
    backend: EagerBackend
    onlooker: Onlooker
    events: dict[tuple[int, int], list[int]]

    def load(self) -> int:
        """Arm the next entry and queue all its layers."""
        producer = self.gate.begin()
        assert producer is not None
        for layer in range(LAYERS):
            before = len(self.onlooker.told)
            self.gate.layer_done(producer, layer, tuple(self.backend.lane(name) for name in LANES))
            told = self.onlooker.told[before:]
            assert [(row[0], row[2]) for row in told] == [("recorded", lane) for lane in LANES]
            self.events[producer, layer] = [int(row[1]) for row in told]
        return producer

    def waited(self, layer: int, lane: str, *, whole: bool = False) -> list[Inbox]:
        """What a reader on that lane was made to wait for."""
        before = len(self.onlooker.told)
        if whole:
            self.gate.wait_whole(self.backend.lane(lane))
        else:
            self.gate.wait(layer, self.backend.lane(lane))
        return self.onlooker.told[before:]

    def waits_for(self, producers: list[int], layer: int, lane: str) -> list[Inbox]:
        """What it has to be."""
        return [("lane_waited", record, lane) for each in producers for record in self.events[each, layer]]


def gate_of(entries: int = 3) -> Gate:
    onlooker = Onlooker()
    backend = EagerBackend(onlooker)
    return Gate(LayerGate(backend, lanes=len(LANES), layers=LAYERS, entries=entries), backend, onlooker, {})


@pytest.mark.parametrize("lane", ["forward", "draft"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_reader_waits_on_its_own_lane_for_its_own_layer_on_every_load_lane(layer: int, lane: str) -> None:
    rig = gate_of()
    first, second = rig.load(), rig.load()
    for consumed in ([second], [first], [first, second], [second, first, second]):
        rig.gate.consume(consumed)
        expected = rig.waits_for(list(dict.fromkeys(consumed)), layer, lane)
        assert len(expected) == 2 * len(set(consumed))
        assert rig.waited(layer, lane) == expected
    rig.gate.consume([])
    assert rig.waited(layer, lane) == []


def test_before_a_graph_is_replayed_its_lane_waits_for_the_last_layer_of_every_load() -> None:
    rig = gate_of()
    rig.gate.consume([rig.load(), rig.load()])
    assert rig.waited(0, "graph", whole=True) == rig.waits_for([0, 1], LAYERS - 1, "graph")
    rig.gate.retire(0)
    assert rig.waited(0, "graph", whole=True) == rig.waits_for([1], LAYERS - 1, "graph")


def test_nobody_waits_for_a_load_that_the_host_has_seen_finish() -> None:
    rig = gate_of()
    rig.gate.consume([rig.load(), rig.load()])
    rig.gate.retire(0)
    assert rig.waited(2, "forward") == rig.waits_for([1], 2, "forward")
    rig.gate.retire(1)
    assert rig.waited(2, "forward") == []


@pytest.mark.parametrize("entries", [2, 3])
def test_the_ring_has_no_room_while_the_next_entry_in_turn_is_in_flight(entries: int) -> None:
    rig = gate_of(entries)
    assert [rig.load() for _ in range(entries)] == list(range(entries))
    rig.gate.retire(entries - 1)
    assert rig.gate.begin() is None
    rig.gate.retire(0)
    assert rig.gate.has_room and rig.load() == 0


@given(steps=st.lists(st.sampled_from(["begin", "retire"]), max_size=20), entries=st.integers(1, 4))
def test_the_ring_is_a_queue_of_as_many_loads(steps: list[str], entries: int) -> None:
    rig = gate_of(entries)
    flying: list[int] = []
    begun = 0
    for step in steps:
        if step == "retire" and flying:
            rig.gate.retire(flying.pop(0))
        elif step == "begin":
            assert rig.gate.has_room == (len(flying) < entries)
            producer = rig.gate.begin()
            assert producer == (begun % entries if len(flying) < entries else None)
            if producer is not None:
                flying.append(producer)
                begun += 1


@pytest.mark.parametrize(("layers", "entries"), [(0, 1), (1, 0), (-1, 3)])
def test_a_gate_without_layers_or_entries_is_refused(layers: int, entries: int) -> None:
    with pytest.raises(LengthMismatch):
        LayerGate(EagerBackend(), lanes=1, layers=layers, entries=entries)
