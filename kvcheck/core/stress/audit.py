"""Audit: compares an operation's accesses with its declared footprint.

A dispatch mode maps each tensor argument of a torch call to places of named memory: by the bytes of the view, and by
the index tensors of a gather or scatter.

Invariants:
- It works on the CPU backends only, and changes neither the operations nor their order.
- A chunk may touch less than was declared, never more. Declared places lie inside their page, slot or table row.
- Memory without a name belongs to one operation: if a second one touches it, footprints should have named it.
- Accesses outside torch (numpy, lists, other threads) are not seen, nor the part of a row that several ranks write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import Backend, ChunkWork, Footprint, Lane, Operation, Place, Signal
from kvcheck.core.cache.backend.scoped import PassingBackend
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.named_memory import Masks, NamedAllocation, Naming, Places, by_own_name
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


@dataclass(frozen=True, slots=True)
class Excess:
    operation: str
    verb: str
    memory: NamedAllocation
    place: int

    @property
    def kind(self) -> tuple[str, ...]:
        return self.operation, self.verb, self.memory.space, self.memory.buffer or ""

    def finding(self) -> Finding:
        layer, unit, token = self.memory.at(self.place)
        row = token if self.memory.tokens > 1 else None
        where = f"layer {layer}, unit {unit + self.memory.first}" + ("" if row is None else f", row {row}")
        return Finding(
            code="KV306",
            oracle="audit",
            buffer=self.memory.buffer,
            layer=layer,
            page=unit + self.memory.first,
            row=row,
            message=f"{self.operation} {self.verb} {self.memory.name}, {where}, which no footprint of it names",
        )


@dataclass(frozen=True, slots=True)
class Shared:
    operation: str
    verb: str
    writer: str
    size_bytes: int

    @property
    def kind(self) -> tuple[str, ...]:
        return self.operation, self.verb, self.writer, ""

    def finding(self) -> Finding:
        return Finding(
            code="KV306",
            oracle="audit",
            message=f"{self.operation} {self.verb} {self.size_bytes} bytes that an earlier {self.writer} wrote, in "
            "memory that no backend handed out, so no footprint can name it",
        )


@dataclass(frozen=True, slots=True)
class Beyond:
    operation: str
    verb: str
    memory: NamedAllocation
    span: tuple[int, int, int]

    @property
    def kind(self) -> tuple[str, ...]:
        return self.operation, f"declares what it {self.verb}", self.memory.space, self.memory.buffer or ""

    def finding(self) -> Finding:
        unit, start, stop = self.span
        return Finding(
            code="KV306",
            oracle="audit",
            buffer=self.memory.buffer,
            page=unit,
            message=f"{self.operation} declares that it {self.verb} {self.memory.name}, unit {unit}, rows {start} to "
            f"{stop}, and a unit has {self.memory.tokens}",
        )


def is_audited(plan: Plan) -> bool:
    """Whether the schedule, or its replay, runs under the audit. The first one lies within the floor of a cell."""
    is_ours = plan.is_in_process and plan.target == "builtin" and plan.backend == "simulated"
    return is_ours and plan.extras is None and plan.strategy != "flip" and plan.schedule % AUDIT_ROUND == AUDITED


AUDIT_ROUND, AUDITED = 7, 2
"""One schedule in seven: it shares no factor with the numbers of settings, so each of them is audited."""

AUDIT = "audit of footprints"

WATCHED_FIRST = 24
"""Of each name: operations of one name come from one place in the code, so a mistake shows early."""

AUDITED_EVERY = 8
"""In a stress run: of operations of one name, one in eight after the first ones, which halves the CPU time."""


@dataclass(slots=True)
class _Known:
    named: dict[int, tuple[NamedAllocation, int]] = field(default_factory=dict)
    """The memory, and the bytes of one of its places."""

    written: dict[int, tuple[StorageWeakRef, int, str]] = field(default_factory=dict)
    """The memory, which may be gone and its address reused, and number and name of its writer."""

    def writer(self, address: int) -> tuple[int, str] | None:
        memory, number, name = self.written.get(address, (None, 0, ""))
        return None if memory is None or memory.expired() else (number, name)  # type: ignore[no-untyped-call]


class AuditBackend(PassingBackend):
    """`found`: the first excess of each call, and the first span beyond its unit of each footprint. every: of each name
    of an operation, the first WATCHED_FIRST are watched and then one in so many."""

    def __init__(self, inner: Backend, name_memory: Naming, *, every: int = 1) -> None:
        super().__init__(inner)
        self.found: list[Excess | Shared | Beyond] = []
        self.judged = 0
        self._name_memory = name_memory
        self._known = _Known()
        self._addresses: dict[str, int] = {}
        self._masks = Masks()
        self._every = every
        self._counts: Counter[str] = Counter()

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        tensor = self.inner.empty(name, shape, dtype, place)
        if tensor.numel():
            address = self._addresses[name] = tensor.untyped_storage().data_ptr()
            memory = self._name_memory(name, shape) or by_own_name(name, shape)
            self._known.named[address] = (memory, tensor.numel() * tensor.element_size() // prod(memory.lengths))
        return tensor

    def release(self, name: str) -> None:
        self.inner.release(name)
        if (address := self._addresses.pop(name, None)) is not None:
            del self._known.named[address]

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        watched = operation
        if self._is_watched(operation.name):
            watched = self._with_watch(operation, tuple(reads), tuple(writes))
        return self.inner.submit(watched, lane=lane, reads=reads, writes=writes, after=after)

    def findings(self) -> tuple[Finding, ...]:
        kinds = {each.kind: each for each in reversed(self.found)}
        return tuple(kinds[kind].finding() for kind in sorted(kinds))[:MAX_FINDINGS]

    def _is_watched(self, name: str) -> bool:
        self._counts[name] += 1
        return self._counts[name] <= WATCHED_FIRST or not self._counts[name] % self._every

    def _with_watch(
        self, operation: Operation, reads: tuple[Footprint, ...], writes: tuple[Footprint, ...]
    ) -> Operation:
        declared = _Declared(self._counts.total(), operation.name, reads, writes)
        self.found += declared.beyond([memory for memory, _ in self._known.named.values()])
        watched = replace(operation, chunks=self._all_watched(declared, operation.chunks))
        if (stage := operation.stage) is not None:
            watched = replace(watched, stage=lambda: self._staged(declared, stage))
        return watched

    def _all_watched(self, declared: _Declared, chunks: Sequence[ChunkWork]) -> tuple[ChunkWork, ...]:
        return tuple(self._watched(declared, chunk) for chunk in chunks)

    def _watched(self, declared: _Declared, chunk: ChunkWork) -> ChunkWork:
        def watched() -> None:
            with _Watch(self._known) as watch:
                chunk()
            self._judge(declared, watch)

        return watched

    def _staged(self, declared: _Declared, stage: Callable[[], tuple[ChunkWork, ...]]) -> tuple[ChunkWork, ...]:
        with _Watch(self._known) as watch:
            chunks = stage()
        self._judge(declared, watch)
        return self._all_watched(declared, chunks)

    def _judge(self, declared: _Declared, watch: _Watch) -> None:
        for verb, memory, places in watch.touched:
            self.judged += len(places)
            beyond = places[~declared.places(verb, memory, self._masks)[places]]
            if len(beyond):
                self.found.append(Excess(declared.name, verb, memory, int(beyond[0])))
        for verb, tensor in watch.others:
            storage = tensor.untyped_storage()
            writer = self._known.writer(storage.data_ptr())
            if writer is None:
                if verb == "writes":
                    here = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._known.written[storage.data_ptr()] = (here, declared.number, declared.name)
            elif writer[0] != declared.number:
                self.found.append(Shared(declared.name, verb, writer[1], storage.nbytes()))


class _Declared:
    """number: of its submission, one for all replays of a graph."""

    def __init__(self, number: int, name: str, reads: tuple[Footprint, ...], writes: tuple[Footprint, ...]) -> None:
        self.number = number
        self.name = name
        self._footprints = {"reads": reads, "writes": writes}
        self._places: dict[tuple[str, NamedAllocation], Places] = {}

    def beyond(self, memories: Sequence[NamedAllocation]) -> Iterator[Beyond]:
        for verb, footprints in self._footprints.items():
            for footprint in footprints:
                for memory in memories if footprint.spans is not None else ():
                    if memory.is_named(footprint) and (span := memory.beyond(footprint)) is not None:
                        yield Beyond(self.name, verb, memory, span)

    def places(self, verb: str, memory: NamedAllocation, masks: Masks) -> Places:
        key = (verb, memory)
        if key not in self._places:
            self._places[key] = memory.named(self._footprints[verb], masks)
        return self._places[key]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, known: _Known) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: list[tuple[str, NamedAllocation, IndexArray]] = []
        self.others: list[tuple[str, torch.Tensor]] = []
        self._known = known
        self._made: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; else torch would import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = _CALLS.get(func) or _CALLS.setdefault(func, _call_of(func))
        for position, name, verb in call.arguments:
            value = args[position] if position < len(args) else kwargs.get(name) if kwargs else None
            for tensor in (value,) if isinstance(value, torch.Tensor) else _tensors(value):
                self._note(tensor, verb, call.name if position == 0 else "", args)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if call.makes_memory:
            for tensor in (result,) if isinstance(result, torch.Tensor) else _tensors(result):
                self._made.add(tensor.untyped_storage().data_ptr())
        return result

    def _note(self, tensor: torch.Tensor, verb: str, call: str, args: tuple[Any, ...]) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address in self._made or not tensor.numel():
            return
        named = self._known.named.get(address)
        if named is not None:
            memory, place_bytes = named
            self.touched.append((verb, memory, _places(tensor, address, place_bytes, _index(call, args))))
        elif verb == "writes" or self._known.writer(address) is not None:
            self.others.append((verb, tensor))


@dataclass(frozen=True, slots=True)
class _Call:
    """arguments: position, name and verb of tensors whose bytes it uses. makes_memory: a result is no view of them."""

    name: str
    arguments: tuple[tuple[int, str, str], ...]
    makes_memory: bool


_CALLS: dict[Any, _Call] = {}


def _call_of(func: Any) -> _Call:
    name, schema = func.overloadpacket.__name__, func._schema
    arguments = tuple(
        (position, each.name, "writes" if each.alias_info and each.alias_info.is_write else "reads")
        for position, each in enumerate(schema.arguments)
        if "Tensor" in str(each.type)
    )
    return _Call(
        name=name,
        arguments=() if name in _SHAPES_ONLY else arguments,
        makes_memory=name != "_unsafe_view" and any(each.alias_info is None for each in schema.returns),
    )


def _places(tensor: torch.Tensor, address: int, place_bytes: int, index: tuple[Any, ...] | None) -> IndexArray:
    """Places of a view's bytes, or of the elements that an index picks; some may come twice.

    Neighbouring bytes of the innermost dimensions are one run:   [outer ... ][ run ]
    """
    size, kept = tensor.element_size(), len(index or ())
    dimensions = list(zip(tensor.shape, tensor.stride(), strict=True))
    run = size
    while len(dimensions) > kept and (dimensions[-1][0] == 1 or dimensions[-1][1] * size == run):
        run *= dimensions.pop()[0]
    offsets: IndexArray = np.full((), tensor.data_ptr() - address, dtype=np.int64)
    for length, stride in dimensions:
        offsets = offsets[..., None] + np.arange(length) * (stride * size)
    if index is not None:
        offsets = offsets[index]
    first = offsets.reshape(-1) // place_bytes
    last = (offsets.reshape(-1) + run - 1) // place_bytes
    count = int((last - first).max(initial=0)) + 1
    if count == 1:
        return first
    spread: IndexArray = first[:, None] + np.arange(count)
    return spread[spread <= last[:, None]]


def _index(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if name in _ONE_DIMENSION:
        return (*(slice(None),) * int(args[1]), args[2].reshape(-1).numpy())
    if name in _MANY_DIMENSIONS:
        return tuple(slice(None) if each is None else each.numpy() for each in args[1])
    return None


def _tensors(value: object) -> list[torch.Tensor]:
    return [each for each in value if isinstance(each, torch.Tensor)] if isinstance(value, list | tuple) else []
