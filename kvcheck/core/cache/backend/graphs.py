"""Captures of graphs: operations of one lane that are recorded without running, and replayed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcheck.core.base.errors import InternalError
from kvcheck.core.cache.backend.backend import Captured, Footprint, Graph, Lane, Operation, Place, Signal


#     with backend.capture(lane) as graph: ...submit to that lane...
#     pool.before_replay(lane)                   the lane waits for the loads that the graph's reads need
#     backend.replay(graph)                      queues all of it, in the order of the capture
class Captures:
    def __init__(self) -> None:
        self.open: Graph | None = None
        self._newest: dict[int, Graph] = {}

    @contextmanager
    def capture(self, lane: Lane) -> Iterator[Graph]:
        if self.open is not None:
            raise InternalError(f"a capture of lane {self.open.lane.name} is open; expected its end before the next")
        graph = Graph(lane)
        self.open = graph
        try:
            yield graph
        finally:
            self.open = None
        self._newest[lane.index] = graph

    def covers(self, lane: Lane) -> bool:
        return self.open is not None and self.open.lane.index == lane.index

    def take(self, operation: Operation, reads: Sequence[Footprint], writes: Sequence[Footprint]) -> Signal:
        """Add an operation to the open capture. Its signal is never recorded."""
        if self.open is None:
            raise InternalError(f"{operation.name}: expected an open capture, got none")
        if operation.stage is not None or any(each.place is Place.PAGEABLE for each in (*reads, *writes)):
            raise InternalError(f"{operation.name}: a graph cannot hold copies from or to pageable memory")
        if operation.joins_host:
            raise InternalError(f"{operation.name}: a graph cannot hold an operation that makes the process wait")
        self.open.operations.append(Captured(operation, tuple(reads), tuple(writes)))
        return Signal()

    def refuse_record(self, lane: Lane) -> None:
        """Raise inside a capture: the record would refer to the capture, not the replay."""
        if self.covers(lane):
            raise InternalError(f"lane {lane.name} is being captured; record its signals behind the replay")

    def check(self, graph: Graph) -> None:
        """Raise InternalError unless the graph is its lane's newest, and complete."""
        if self.open is not None or self._newest.get(graph.lane.index) is not graph:
            raise InternalError(
                f"expected the newest graph of lane {graph.lane.name}, after its capture; got one that is still open, "
                "of another backend, or of an earlier capture, whose memory the newest one has taken over"
            )
