"""streams: stand-ins for torch.cuda's streams and events, which show a missing wait on a machine without a GPU.

Invariants:
- Work of a side stream uses the values that its arguments hold when it runs. Until then, floating-point results are NaN
  and bytes 0x55.
- Operations that make the process wait on a device (item, tolist, nonzero, a blocking copy) wait for the stream;
  `copy_` in save only if its destination is host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcheck.core.base.rng import Rng
from kvcheck.core.probes.frame.cuda_streams import CudaMachine
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.streams import EAGER, LAZY, RANDOM, HoldReport, Machine, SideEvent, SideStream, stand_ins
from kvcheck.core.probes.frame.stubs import replaced
from kvcheck.testing.failures import NotJudged
from kvcheck.testing.host_memory import MemoryOrigins, Saving

__tracebackhide__ = True

BYTES = (torch.uint8, torch.int8, torch.int16)
"""Integer types of stored content, not of row numbers."""
SLOW_TAGS = ("data_dependent_output", "dynamic_output_shape")


class Streams:
    """Streams of one `streams()` block, an argument of `waits`. Code under test needs torch.cuda's names only.

    is_real: they are a device's; held work queues behind a kernel that waits.
    """

    is_real = False

    def __init__(self, machine: _LateMachine) -> None:
        self._machine, self.memory = machine, MemoryOrigins(machine)

    @property
    def queued(self) -> int:
        """Operations put on side streams since the last `hold` or `release`."""
        return self._machine.queued

    @property
    def pending(self) -> int:
        """Operations of `queued` that have not run. On a device the number is unknown: 0."""
        return self._machine.queued - self._machine.ran

    def hold(self, seed: int, *, is_lazy: bool) -> None:
        """Run side streams only at waits for them; unless is_lazy, also at moments drawn from the seed."""
        self._machine.follow(LAZY if is_lazy else RANDOM, seed)

    def saving(
        self, kv: Sequence[torch.Tensor], names: Mapping[int, str], *, all_wait: bool = False
    ) -> AbstractContextManager[Saving]:
        """Run save in this block. names: of storages, by address. all_wait: each blocking copy waits."""
        return self.memory.saving(kv, names, all_wait=all_wait)

    def hold_no_more(self) -> None:
        """Keep held work held. On a device, work that side streams get from now on is not held."""

    def release(self) -> None:
        self._machine.follow(EAGER, 0)

    def progress(self) -> Mapping[Any, int]:
        return self._machine.given()

    def finish_since(self, before: Mapping[Any, int]) -> None:
        """Wait for the streams that got work since `before`, and for the streams that those wait for."""
        for stream, count in self._machine.given().items():
            if count > before.get(stream, 0):
                stream.reach(stream.put_count)

    def taken(self, read: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the values that the current stream has just read, unaffected by later work."""
        return read

    @property
    def fired(self) -> int:
        """Holds that a device's watchdog ended, up to the last `release`. They imposed no order."""
        return 0

    def report(self) -> HoldReport:
        """How work was held since the last report, up to the last `release`."""
        return HoldReport()


class _RealStreams(Streams):
    is_real = True

    def __init__(self, device: str) -> None:
        self.cuda = CudaMachine(device)
        self._fired = 0
        self._given: dict[Any, int] = {}

    @property
    def queued(self) -> int:
        return self.cuda.queued

    def hold(self, seed: int, *, is_lazy: bool) -> None:
        self.cuda.reset(LAZY if is_lazy else RANDOM, seed)

    @property
    def pending(self) -> int:
        return 0

    def saving(
        self, kv: Sequence[torch.Tensor], names: Mapping[int, str], *, all_wait: bool = False
    ) -> AbstractContextManager[Saving]:
        return nullcontext(Saving())

    def hold_no_more(self) -> None:
        self.cuda.hold_no_more()

    def release(self) -> None:
        self.cuda.settle()
        self._fired += self.cuda.fired
        self.cuda.reset(EAGER, 0)

    def progress(self) -> Mapping[Any, int]:
        return dict(self._given)

    def finish_since(self, before: Mapping[Any, int]) -> None:
        for stream, count in self._given.items():
            if count > before.get(stream, 0):
                torch.cuda.current_stream().wait_stream(stream)

    def taken(self, read: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.cuda.taken(read)

    @property
    def fired(self) -> int:
        return self._fired

    def report(self) -> HoldReport:
        return self.cuda.take_report()

    @contextmanager
    def entered(self, enter: Callable[[Any], Any], stream: Any) -> Iterator[Any]:
        with enter(stream) as made:
            if stream is not None and stream != torch.cuda.default_stream():
                self._given[stream] = self._given.get(stream, 0) + 1
                self.cuda.queue(lambda: None)
            yield made


_ACTIVE: ContextVar[Streams | None] = ContextVar("kvcheck streams", default=None)


def active_streams() -> Streams | None:
    return _ACTIVE.get()


@contextmanager
def _active(made: Streams) -> Iterator[Streams]:
    before = _ACTIVE.get()
    _ACTIVE.set(made)
    try:
        yield made
    finally:
        _ACTIVE.set(before)  # no token: a fixture may end in another context


@contextmanager
def streams(*, device: str | None = None) -> Iterator[Streams]:
    """Replace torch.cuda's Stream, Event, stream(), current_stream() and synchronize() by kvcheck's in this block.

    Make the pool and its streams inside the block: earlier streams are not held back. device: "cpu" for stand-ins,
    "cuda" or "cuda:N" for a real device's streams; by default cuda if torch has it.

    With stand-ins, tensors lie on the CPU, and side-stream work of the block's thread runs late, so a missing wait is
    always found. On a device, `torch.cuda.stream(...)` is entered behind a kernel that holds the following work until a
    read has run without it or has to wait for it. This needs triton; without it the kernel spins for about 20 ms,
    timing decides which work overlaps, and `not_tried` has a note. Waits of the process by events, streams and
    torch.cuda.synchronize() release held work; a read that copies to the host does not, so a watchdog ends the hold,
    which then imposed no order. This has not run on a GPU yet.

    Not replaced: streams of C++ extensions, CUDA graphs, `with stream:` on a device, other threads.
    """
    kind = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind != "cpu":
        yield from _on_device(kind)
        return
    machine = _LateMachine()
    event = type("Event", (_LateEvent,), {"machine": machine})
    stream = type("Stream", (_LateStream,), {"machine": machine, "event": event})
    made = Streams(machine)
    cuda, methods = replaced(torch.cuda, stand_ins(machine, stream, event)), replaced(torch.Tensor, _methods(machine))
    with cuda, methods, _Late(machine), made.memory, _active(made):
        yield made


def _on_device(kind: str) -> Iterator[Streams]:
    try:
        made = _RealStreams(kind)
    except CannotDrive as why:
        raise NotJudged(f"no streams of {kind}: {why}; with device='cpu' there are stand-ins") from why
    own = {
        "stream": partial(made.entered, torch.cuda.stream),
        "synchronize": partial(_let_all_go, made.cuda, torch.cuda.synchronize),
    }
    with ExitStack() as entered:
        entered.enter_context(replaced(torch.cuda, own))
        for waited in (torch.cuda.Event, torch.cuda.Stream):
            entered.enter_context(replaced(waited, _giving_way(made.cuda, waited)))
        entered.enter_context(_active(made))
        try:
            yield made
        finally:
            made.release()


def _let_all_go(machine: CudaMachine, synchronize: Callable[..., Any], *device: Any) -> None:
    machine.let_go()
    synchronize(*device)


def _giving_way(machine: CudaMachine, kind: Any) -> dict[str, Any]:
    has_run, wait = kind.query, kind.synchronize

    def query(waited: Any) -> bool:
        is_reached = bool(has_run(waited))
        machine.polled(is_reached)
        return is_reached

    def synchronize(waited: Any) -> None:
        machine.let_go_until(partial(has_run, waited))
        wait(waited)

    return {"query": query, "synchronize": synchronize}


class _LateMachine(Machine):
    """A Machine that belongs to one thread and keeps its streams when its order changes."""

    ran = 0

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._here: SideStream | None = None
        super().__init__()

    @property
    def current(self) -> SideStream:
        is_ours = self._here is not None and threading.get_ident() == self._thread
        return self._here if is_ours and self._here is not None else self.main

    @current.setter
    def current(self, stream: SideStream) -> None:
        if threading.get_ident() == self._thread:
            self._here = stream

    def follow(self, order: str, seed: int) -> None:
        self.settle()
        self._order, self._mix, self.queued, self.ran = order, Rng(seed), 0, 0

    def given(self) -> dict[SideStream, int]:
        return {stream: stream.put_count for stream in self._side}

    def late(self, work: Callable[[], object]) -> None:
        """The work runs as main-stream work, so that it is not deferred again."""

        def run() -> None:
            self.ran += 1
            with self.on(self.main):
                work()

        self.queue(run)


class _LateStream(SideStream):
    event: type[SideEvent]

    def record_event(self, event: SideEvent | None = None) -> SideEvent:
        made = event or self.event()
        made.record(self)
        return made

    def query(self) -> bool:
        """A query that returns False advances the stream, so polling ends."""
        is_done = super().query()
        if not is_done:
            self.advance()
        return is_done


class _LateEvent(SideEvent):
    def query(self) -> bool:
        is_done = super().query()
        if not is_done and self._record is not None:
            self._record[0].advance()
        return is_done


class _Late(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, machine: _LateMachine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: with True, torch imports its compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        stream = self._machine.current
        if stream.is_main or _is_view(func):
            return func(*args, **named)
        if any(tag.name in SLOW_TAGS for tag in func.tags) and not _takes_rows(func, args):
            stream.synchronize()
            return func(*args, **named)
        if func._schema.is_mutable:
            self._machine.late(lambda: func(*args, **named))
            return _written(func, args, named)
        given = [each for each in tree_leaves((args, named)) if isinstance(each, torch.Tensor)]
        made = func(*args, **named)
        if given:
            _spoil(made, given)
            self._machine.late(lambda: _refill(made, func(*args, **named)))
        return made


def _takes_rows(func: Any, args: tuple[Any, ...]) -> bool:
    """Row numbers need no value on the host, unlike a mask."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in args[1])


def _is_view(func: Any) -> bool:
    returned = [each.alias_info for each in func._schema.returns]
    return not func._schema.is_mutable and any(each is not None for each in returned)


def _written(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    rows = zip(func._schema.arguments, range(len(func._schema.arguments)), strict=True)
    value = {each.name: args[at] if at < len(args) else named.get(each.name) for each, at in rows}
    found = [
        value[each.name] for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    count = len(func._schema.returns)
    return None if not count else found[0] if count == 1 else tuple(found[:count])


def _spoil(made: Any, given: Sequence[torch.Tensor]) -> None:
    """Overwrite values that are not computed yet, except wide integers: they may be row numbers."""
    own = {each.untyped_storage().data_ptr() for each in given}
    for each in tree_leaves(made):
        if not isinstance(each, torch.Tensor) or each.untyped_storage().data_ptr() in own:
            continue
        if each.is_floating_point() or each.is_complex():
            each.fill_(float("nan"))
        elif each.dtype in BYTES:
            each.fill_(0x55)


def _refill(made: Any, now: Any) -> None:
    for before, after in zip(tree_leaves(made), tree_leaves(now), strict=True):
        if isinstance(before, torch.Tensor) and before.data_ptr() != after.data_ptr():
            before.copy_(after)


def _methods(machine: _LateMachine) -> dict[str, Any]:
    """Tensor methods that make the process wait on a device. `numpy` takes host memory only, without a wait."""

    def waiting(method: Callable[..., Any], does_wait: Callable[..., bool]) -> Callable[..., Any]:
        def wait_and_call(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            if machine.current.is_main or not does_wait(*args, **named):
                return method(tensor, *args, **named)
            machine.current.synchronize()
            with machine.on(machine.main):
                return method(tensor, *args, **named)

        return wait_and_call

    waits: dict[str, Callable[..., bool]] = {"tolist": lambda: True, "cpu": lambda **_: True, "to": _is_blocking}
    waiters = {name: waiting(getattr(torch.Tensor, name), does_wait) for name, does_wait in waits.items()}
    return {**waiters, "record_stream": lambda *_: None}


def _is_blocking(*args: Any, device: Any = None, non_blocking: bool = False, **_: Any) -> bool:
    places = [each for each in (*args, device) if isinstance(each, (str, torch.device))]
    return any(torch.device(each).type == "cpu" for each in places) and not (
        non_blocking or any(each is True for each in args)
    )
