"""Audit: compares what an operation touches, as seen from its tensor calls, with the footprint that it declared.

The audit knows the memory that a backend hands out by its name. A dispatch mode sees each call that a chunk makes. It
maps each tensor argument to its memory and to places there: by the bytes of the view, and by the index tensors of a
gather or scatter.

Invariants:
- It works on the CPU backends only, and it is slow. It checks footprints and does not replace a stress run.
- A chunk may touch less than was declared, never more. Memory without a known name belongs to the operation.
- Accesses outside torch (numpy, lists, other threads) are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import Backend, ChunkWork, Footprint, Lane, Operation, Place, Signal
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS

_ONE_DIMENSION = frozenset({"index_select", "index_copy_", "index_fill_", "index_add_"})
"""Calls of the form (tensor, dimension, index tensor, ...)."""
_MANY_DIMENSIONS = frozenset({"index", "index_put_", "_index_put_impl_"})
"""Calls of the form (tensor, index tensors, ...)."""
_SHAPES_ONLY = frozenset(
    (
        "view",
        "slice",
        "select",
        "as_strided",
        "alias",
        "detach",
        "unsqueeze",
        "squeeze",
        "expand",
        "permute",
        "transpose",
        "t",
        "split",
        "unbind",
        "_unsafe_view",
        "_reshape_alias",
        "empty_like",
    )
)
"""Calls that look at a tensor's shape and not at its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """An allocation as footprints name it: places [layers, units, tokens], all of one size.

    first: id of the first unit.
    """

    space: str
    buffer: str
    layers: int
    units: int
    tokens: int = 1
    first: int = 0

    def named(self, footprint: Footprint) -> npt.NDArray[np.bool_]:
        """Which places the footprint holds: bool [layers, units, tokens]."""
        places = np.zeros((self.layers, self.units, self.tokens), dtype=np.bool_)
        if footprint.space == self.space and self.buffer in footprint.buffers:
            for index, unit in enumerate((footprint.rows - self.first).tolist()):
                if 0 <= unit < self.units:
                    whole = footprint.spans is None or self.tokens == 1
                    span = slice(None) if whole or footprint.spans is None else slice(*footprint.spans[index].tolist())
                    places[slice(*footprint.layers), unit, span] = True
        return places


@dataclass(frozen=True, slots=True)
class Excess:
    """A place that an operation touched and had not declared."""

    operation: str
    verb: str
    memory: Memory
    place: int

    def finding(self) -> Finding:
        """The finding KV306 for this place."""
        layer, unit, token = (int(n) for n in np.unravel_index(self.place, _dimensions(self.memory)))
        row = token if self.memory.tokens > 1 else None
        where = f"layer {layer}, unit {unit + self.memory.first}" + ("" if row is None else f", row {row}")
        return Finding(
            code="KV306",
            oracle="audit",
            buffer=self.memory.buffer,
            layer=layer,
            page=unit + self.memory.first,
            row=row,
            message=f"{self.operation} {self.verb} {self.memory.space}.{self.memory.buffer}, {where}, "
            "which no footprint of it names",
        )


Naming = Callable[[str, Sequence[int]], Memory | None]
"""The memory for an allocation of that name and shape; None if footprints do not name it."""


def naming(shape: ModelShape) -> Naming:
    """The memory of an engine of that shape: pool buffers, tables, metadata slots, offloaded values."""
    buffers = {(spec.name, buffer.name): buffer for spec in POOLS.load(shape.family)(shape) for buffer in spec.buffers}

    def name_memory(name: str, lengths: Sequence[int]) -> Memory | None:
        rank, colon, plain = name.rpartition(":")
        scope = rank + colon  # of a rank of a pair, which names its spaces and its memory alike
        kind, *rest = plain.split(".")
        if kind == "device":
            space, buffer = rest
            tokens = shape.page_size if buffers[space, buffer].rows is Granularity.TOKEN else 1
            return Memory(
                space=scope + space, buffer=buffer, layers=lengths[0], units=lengths[1] // tokens, tokens=tokens
            )
        if kind == "table":
            return Memory(space=f"{scope}table", buffer=rest[0], layers=1, units=lengths[0], tokens=lengths[1])
        if kind == "offload":
            number, space, buffer = rest
            return Memory(
                space=f"{scope}host.offload", buffer=f"{space}.{buffer}", layers=lengths[0], units=1, first=int(number)
            )
        if kind.startswith("metadata"):
            return Memory(space=scope + kind, buffer="metadata", layers=1, units=lengths[0])
        return None

    return name_memory


class AuditBackend:
    """A CPU backend whose operations are watched. `found`: for each call that touched too much, the first such
    place."""

    def __init__(self, inner: Backend, name_memory: Naming) -> None:
        self.name, self.device = inner.name, inner.device
        self.found: list[Excess] = []
        self.judged = 0
        self._inner = inner
        self._name_memory = name_memory
        self._memories: dict[str, tuple[torch.Tensor, Memory]] = {}
        self.lane, self.index, self.signal = inner.lane, inner.index, inner.signal
        self.record, self.wait, self.query = inner.record, inner.wait, inner.query
        self.drain, self.idle, self.allocated = inner.drain, inner.idle, inner.allocated
        self.capture, self.replay = inner.capture, inner.replay

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """Allocate, and note the memory under that name."""
        tensor = self._inner.empty(name, shape, dtype, place)
        memory = self._name_memory(name, shape)
        if memory is not None and tensor.numel():
            self._memories[name] = (tensor, memory)
        return tensor

    def release(self, name: str) -> None:
        self._inner.release(name)
        self._memories.pop(name, None)

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        """Submit the operation with every chunk watched."""
        chunks = tuple(self._watched(operation.name, chunk, tuple(reads), tuple(writes)) for chunk in operation.chunks)
        return self._inner.submit(replace(operation, chunks=chunks), lane=lane, reads=reads, writes=writes, after=after)

    def findings(self) -> tuple[Finding, ...]:
        """One finding for each kind of operation and buffer."""
        kinds = {(e.operation, e.verb, e.memory.space, e.memory.buffer): e for e in reversed(self.found)}
        return tuple(kinds[kind].finding() for kind in sorted(kinds))[:MAX_FINDINGS]

    def _watched(
        self, name: str, chunk: ChunkWork, reads: tuple[Footprint, ...], writes: tuple[Footprint, ...]
    ) -> ChunkWork:
        def watched() -> None:
            with _Watch(self._memories) as watch:
                chunk()
            for verb, memory, places in watch.touched:
                self.judged += len(places)
                named = np.zeros(_dimensions(memory), dtype=np.bool_)
                for footprint in reads if verb == "reads" else writes:
                    named |= memory.named(footprint)
                beyond = places[~named.reshape(-1)[places]]
                if len(beyond):
                    self.found.append(Excess(name, verb, memory, int(beyond[0])))

        return watched


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which places of known memory the calls inside it touch."""

    def __init__(self, memories: Mapping[str, tuple[torch.Tensor, Memory]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: list[tuple[str, Memory, IndexArray]] = []
        self._memories = {tensor.untyped_storage().data_ptr(): (tensor, memory) for tensor, memory in memories.values()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled, and torch would import its compiler, which takes seconds, to leave this out."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _SHAPES_ONLY:
            given = {spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)}
            for position, spec in enumerate(func._schema.arguments):
                value = {**given, **(kwargs or {})}.get(spec.name)
                index = _index(name, args) if position == 0 else None
                for tensor in _tensors(value):
                    self._note(tensor, "writes" if spec.alias_info and spec.alias_info.is_write else "reads", index)
        return func(*args, **(kwargs or {}))

    def _note(self, tensor: torch.Tensor, verb: str, index: tuple[Any, ...] | None) -> None:
        known = self._memories.get(tensor.untyped_storage().data_ptr())
        if known is None or not tensor.numel():
            return
        whole, memory = known
        place_bytes = whole.numel() * whole.element_size() // (memory.layers * memory.units * memory.tokens)
        offsets = _offsets(tensor)
        if index is not None:
            offsets = offsets[index]
        places: IndexArray = np.unique((offsets.reshape(-1) + tensor.data_ptr() - whole.data_ptr()) // place_bytes)
        self.touched.append((verb, memory, places))


def _offsets(tensor: torch.Tensor) -> IndexArray:
    """The byte offset of each element from the view's first one, in the view's shape."""
    offsets: IndexArray = np.zeros((), dtype=np.int64)
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(length) * stride * tensor.element_size()
    return offsets


def _index(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The index that narrows the first argument of a gather or scatter to some of its elements."""
    if name in _ONE_DIMENSION:
        return (*(slice(None),) * int(args[1]), args[2].numpy())
    if name in _MANY_DIMENSIONS:
        return tuple(slice(None) if each is None else each.numpy() for each in args[1])
    return None


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def _dimensions(memory: Memory) -> tuple[int, int, int]:
    return memory.layers, memory.units, memory.tokens
