"""PD pair: a prefill and its decode ranks, from the engine's own transfer managers, in one process.

The transfer worker of the prefill and the receive loop of a decode rank are the engine's own, in managers without their
start-up. The transfer engine and the sockets are kvcheck's, so that a schedule decides when bytes and messages arrive.

Invariants:
- Bytes are copied only between registered memory. Anything else is refused, as by hardware.
- Late bytes land in the order in which they were sent. The message behind them does not wait for them.
- An exception of the engine's threads is judged by its cause, not by the exception that wraps it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.stubs import replaced
from kvcheck.core.probes.sglang.rig.bare_manager import bare, plain_manager

NEEDS = ("transfer.manager", "transfer.info", "transfer.chunk", "transfer.peer", "transfer.poll")
PREFILL = "prefill"


class QueueDrained(BaseException):
    """A queue is empty. Ends the engine's endless loop, whose `except Exception` does not catch it."""


@dataclass(slots=True)
class StandInLink:
    """The transfer engine and the sockets. late: whether a write to this address lands after it was reported done.

    fails: whether a copy to this address fails, as over a broken link.
    """

    late: Callable[[int], bool] = lambda _: False
    fails: Callable[[int], bool] = lambda _: False
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    flying: dict[str, deque[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(deque))
    wires: dict[int, deque[list[bytes]]] = field(default_factory=lambda: defaultdict(deque))
    moved_bytes: int = 0
    refused: int = 0
    failed: int = 0

    def register(self, session: str, pointers: Sequence[int], lengths: Sequence[int]) -> None:
        self.ranges[session] += list(zip(pointers, lengths, strict=True))

    def batch_transfer_sync(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Return 0 for done, -1 for refused or failed."""
        for source, target, length in zip(sources, targets, lengths, strict=True):
            if not (self._holds(PREFILL, source, length) and self._holds(session, target, length)):
                self.refused += 1
                return -1
            if self.fails(target):
                self.failed += 1
                return -1
            self.moved_bytes += length
            if self.late(target):
                self.flying[session].append((target, ctypes.string_at(source, length)))
            else:
                ctypes.memmove(target, source, length)
        return 0

    def land(self, session: str, most: int | None = None) -> None:
        flying = self.flying[session]
        for _ in range(len(flying) if most is None else min(most, len(flying))):
            target, data = flying.popleft()
            ctypes.memmove(target, data, len(data))

    def wire(self, endpoint: str) -> SimpleNamespace:
        return SimpleNamespace(send_multipart=lambda parts, *_, **__: self.send(endpoint, parts))

    def send(self, endpoint: str, parts: Sequence[bytes]) -> None:
        self.wires[int(endpoint.rpartition(":")[2])].append([bytes(part) for part in parts])

    def _holds(self, session: str, address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + size for start, size in self.ranges[session])


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredMemory:
    """Registered memory of a side: (pointers, lengths, bytes of an item) of pages, metadata and states."""

    pages: tuple[list[int], list[int], list[int]]
    metadata: tuple[list[int], list[int], list[int]] = ([], [], [])
    states: tuple[list[int], list[int], list[int]] = ([], [], [])

    def register(self, link: StandInLink, session: str) -> None:
        for pointers, lengths, _ in (self.pages, self.metadata, self.states):
            link.register(session, pointers, lengths)


@dataclass(frozen=True, slots=True)
class DecodeTarget:
    pages: Sequence[int]
    slot: int
    states: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request of a transfer, in pages, slots and rows of the prefill side. targets: by rank."""

    room: int
    pages: Sequence[int]
    slot: int
    states: list[int]
    targets: tuple[DecodeTarget, ...]


class PDPair:
    """kinds: names of this kind of state in known releases; empty: no states. flat: a layer has one buffer, not keys
    and values."""

    def __init__(
        self,
        rig: Rig,
        link: StandInLink,
        prefill: RegisteredMemory,
        decodes: Sequence[RegisteredMemory],
        *,
        kinds: tuple[str, ...],
        flat: bool,
    ) -> None:
        self._rig, self.link, self._flat, self._decodes = rig, link, flat, decodes
        self._kind: Any = kinds[0] if kinds else ""
        if kinds and rig.names.has("transfer.kinds"):
            self._kind = next((each for each in rig.names["transfer.kinds"] if each.value in kinds), None)
            if self._kind is None:
                raise CannotDrive(f"this release has no state kind of {', '.join(kinds)}")
        self.sender = self._manager(prefill, PREFILL)
        self.ranks = [self._manager(memory, session(rank)) for rank, memory in enumerate(decodes)]
        self._allowed = [0] * len(decodes)
        self._loops: list[Callable[[], None]] = [self._receive_loop(rank) for rank in range(len(decodes))]
        self.chunks: dict[int, Any] = {}

    def nested(self, values: list[int]) -> list[Any]:
        """Wrap values of the one kind of state as a list of kinds, in releases that have several."""
        several = self._rig.names.has("transfer.kinds")
        return ([values] if self._kind else []) if several else values

    def send(self, requests: Sequence[SentRequest]) -> Fault | None:
        """Return the exception that ended the engine's worker, if any."""
        waiting = deque(self._chunk(request) for request in requests)
        work = partial(self.sender.transfer_worker, _Queue(waiting), _AtOnce())
        died = self._run(partial(self._rig.watched, work), "transfer_worker")
        if died is not None:
            self._rig.called = died.call
        return died

    def deliver(self, rank: int, most: int | None = None) -> Fault | None:
        """Return the exception that ended the rank's receive loop, if any. most: messages; None: all."""
        self._allowed[rank] = len(self.link.wires[rank + 1]) if most is None else most
        return self._run(self._loops[rank], "decode_thread")

    def status(self, manager: Any, room: int) -> str:
        value = manager.request_status.get(room)
        known = self._rig.names["transfer.poll"]
        return next((name for name in STATUSES if getattr(known, name, None) == value), f"{value}")

    def reason(self, manager: Any, room: int) -> str:
        return str(manager.failure_records.get(room, ""))

    # How a side is made

    def _manager(self, memory: RegisteredMemory, name: str) -> Any:
        names, link = self._rig.names, self.link
        memory.register(link, name)
        self._waiting = names["transfer.poll"].WaitingForInput
        own = {**plain_manager(), "engine": link, "is_mla_backend": self._flat}
        own["kv_args"] = self._arguments(memory)
        if names.has("transfer.mode"):
            mode = names["transfer.mode"]
            own["disaggregation_mode"] = mode.PREFILL if name == PREFILL else mode.DECODE
        own["_connect"] = lambda endpoint, *_, **__: link.wire(endpoint)
        own["_send_multipart_locked"] = lambda endpoint, parts, *_, **__: link.send(endpoint, parts)
        if names.has("transfer.custom-pool"):
            own["enable_custom_mem_pool"], own["custom_mem_pool_type"] = names["transfer.custom-pool"]()
        return bare(names["transfer.manager"], own)

    def _arguments(self, memory: RegisteredMemory) -> SimpleNamespace:
        several = self._rig.names.has("transfer.kinds")
        kinds = [self._kind] if several and self._kind else []
        pointers, lengths, items = memory.states
        return SimpleNamespace(
            engine_rank=0,
            kv_data_ptrs=memory.pages[0],
            kv_data_lens=memory.pages[1],
            kv_item_lens=memory.pages[2],
            aux_data_ptrs=memory.metadata[0],
            aux_data_lens=memory.metadata[1],
            aux_item_lens=memory.metadata[2],
            state_type=self._kind or "none",
            state_types=kinds,
            state_data_ptrs=self.nested(pointers),
            state_data_lens=self.nested(lengths),
            state_item_lens=self.nested(items),
            state_dim_per_tensor=[],
            state_layer_ids=[],
            kv_layer_ids=[],
            prefill_start_layer=0,
            pp_rank=0,
            page_size=1,
            gpu_id=0,
        )

    def _chunk(self, request: SentRequest) -> Any:
        names = self._rig.names
        infos = {}
        for rank, (target, memory) in enumerate(zip(request.targets, self._decodes, strict=True)):
            name = session(rank)
            infos[name] = fitted(
                names["transfer.info"],
                {
                    "room": request.room,
                    "endpoint": "127.0.0.1",
                    "dst_port": rank + 1,
                    "mooncake_session_id": name,
                    "dst_kv_indices": np.asarray(target.pages, dtype=np.int32),
                    "dst_aux_index": target.slot,
                    "dst_state_indices": self.nested(target.states),
                    "required_dst_info_num": len(request.targets),
                    "is_dummy": False,
                },
            )
            self.sender.decode_kv_args_table[name] = fitted(names["transfer.peer"], self._peer(name, rank, memory))
            self.ranks[rank].request_status[request.room] = self._waiting
            self.ranks[rank].required_prefill_response_num_table[request.room] = 1
            self.ranks[rank].prefill_response_tracker[request.room] = set()
        self.sender.transfer_infos[request.room] = infos
        self.sender.request_status[request.room] = self._waiting
        self.chunks[request.room] = fitted(
            names["transfer.chunk"],
            {
                "room": request.room,
                "prefill_kv_indices": np.asarray(request.pages, dtype=np.int32),
                "index_slice": slice(0, len(request.pages)),
                "is_last": True,
                "is_last_chunk": True,
                "prefill_aux_index": request.slot,
                "state_indices": self.nested(request.states) or None,
            },
        )
        return self.chunks[request.room]

    def _peer(self, name: str, rank: int, memory: RegisteredMemory) -> dict[str, Any]:
        return {
            "room": "None",
            "endpoint": "127.0.0.1",
            "dst_port": rank + 1,
            "mooncake_session_id": name,
            "dst_kv_ptrs": memory.pages[0],
            "dst_aux_ptrs": memory.metadata[0],
            "dst_state_data_ptrs": self.nested(memory.states[0]),
            "dst_tp_rank": rank,
            "dst_attn_tp_size": 1,
            "dst_kv_item_len": memory.pages[2][0],
            "dst_kv_item_lens": memory.pages[2],
            "dst_state_item_lens": self.nested(memory.states[2]),
            "dst_state_dim_per_tensor": [],
            "dst_kv_layer_ids": [],
            "dst_state_layer_ids": [],
        }

    def _receive_loop(self, rank: int) -> Callable[[], None]:
        manager, inbox = self.ranks[rank], self.link.wires[rank + 1]

        def receive(*_: object) -> list[bytes]:
            if not inbox or not self._allowed[rank]:
                raise QueueDrained
            self._allowed[rank] -= 1
            return inbox.popleft()

        manager.server_socket = SimpleNamespace(recv_multipart=receive)
        bodies: list[Callable[[], None]] = []
        with _caught_threads(sys.modules[type(manager).__module__], bodies):
            started = attempt(manager.start_decode_thread)
        if isinstance(started, Fault) or not bodies:
            raise CannotDrive(f"start_decode_thread starts no receive loop: {started}")
        return bodies[0]

    def _run(self, loop: Callable[[], object], what: str) -> Fault | None:
        def unwrapped() -> None:
            try:
                loop()
            except QueueDrained:
                return
            except RuntimeError as error:  # the worker wraps any exception in it
                raise (error.__cause__ or error.__context__ or error) from None

        with self._rig.stubs.refused(what):
            died = attempt(unwrapped, self._rig.package)
        if isinstance(died, Fault) and not died.is_engine:
            raise CannotDrive(f"{what}: {died.text} ({died.where})")
        return died if isinstance(died, Fault) else None


STATUSES = ("Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success")


def session(rank: int) -> str:
    return f"decode-{rank}"


class _Queue:
    def __init__(self, waiting: deque[Any]) -> None:
        self._waiting = waiting

    def get(self) -> Any:
        if not self._waiting:
            raise QueueDrained
        return self._waiting.popleft()


class _AtOnce:
    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future


@contextmanager
def _caught_threads(module: Any, bodies: list[Callable[[], None]]) -> Iterator[None]:
    def make(target: Callable[[], None], **_: object) -> SimpleNamespace:
        bodies.append(target)
        return SimpleNamespace(start=lambda: None, join=lambda *_: None)

    caught = SimpleNamespace(Thread=make, Lock=threading.Lock, Event=threading.Event)
    with replaced(module, {"threading": caught}):
        yield
