"""Probe agreement: requests that are reported done before their bytes have landed, at a different time on each rank.

Metadata takes the default route, or the intra-node NVLink route, which an environment variable of the engine selects.
Either the metadata or every byte lands late. In half of the schedules other requests have used every slot and page
before, and their content is still there.

Invariants:
- Late writes of a rank land in the order in which they were sent. So do messages.
- The ranks' queues must be equal after each poll, and each committed request whole.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvcheck.core.probes.frame.content import rows_of
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.stubs import replaced
from kvcheck.core.probes.sglang.metadata import make
from kvcheck.core.probes.sglang.rig.bare_manager import bare
from kvcheck.core.probes.sglang.rig.pd_pair import (
    NEEDS,
    DecodeTarget,
    PDPair,
    RegisteredMemory,
    SentRequest,
    StandInLink,
    session,
)
from kvcheck.core.probes.sglang.rig.pools import pool_names, small_pool
from kvcheck.core.probes.sglang.rig.scheduler_loop import REQUEST_NEEDS, make_committed_request

VARIABLE, ROUTE = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK"
RANKS, REQUESTS, PAGES = 2, 3, 2
ROOM = "bootstrap_room"
METADATA, EVERYTHING = "metadata", "everything"
DEFAULT = "default-"
"""Prefix of a subject without a route. On the NVLink route some releases send metadata by socket, in order."""
PAGES_LATE = (
    "the copy engine says that pages are there before they are, which it promises not to do; metadata alone are known "
    "to be late, on the intra-node NVLink route"
)
"""The condition of `everything` for findings of missing pages."""


class Agreement:
    """pop_transferred on two ranks, behind the engine's own worker and receive loop."""

    def needs(self, subject: str) -> tuple[str, ...]:
        own = ("transfer.queue", "transfer.queued", "metadata.buffers", "metadata.slots")
        asked = () if subject.startswith(DEFAULT) else ("server.variables", "transfer.custom-pool")
        return (*NEEDS, *own, *asked, *REQUEST_NEEDS, *pool_names("mla"))

    def control(self, rig: Rig) -> None:
        """Nothing is late: one poll commits every request on both ranks."""
        with route(rig):
            scene = AgreementScene(rig, lambda _: False)
            scene.send()
            for rank in range(RANKS):
                scene.deliver(rank)
            scene.poll("nothing late")
            scene.finish()

    def measure(self, rig: Rig) -> None:
        with route(rig):
            scene = AgreementScene(rig, (lambda _: True) if rig.subject == EVERYTHING else None)
            scene.send()
            if rig.schedule % 4 >= 2:
                for rank in range(RANKS):
                    scene.peers.link.land(session(rank))
                    scene.deliver(rank)
                scene.poll("the first users of the slots")
                if not scene.agreed:
                    return
                scene.reuse()
            if rig.schedule % 2 == 0:  # the plainest: all messages are there, the bytes on one rank alone
                for rank in range(RANKS):
                    scene.deliver(rank)
                scene.peers.link.land(session(rig.mix.below(RANKS)))
                scene.poll("the bytes landed on one rank alone")
            while scene.waits() and scene.agreed:
                rank = rig.mix.below(RANKS)
                if rig.mix.chance(1, 2):
                    scene.peers.link.land(session(rank), 1 + rig.mix.below(8))
                else:
                    scene.deliver(rank, 1 + rig.mix.below(6))
                scene.poll("late bytes and messages")
            scene.finish()


class AgreementScene:
    def __init__(self, rig: Rig, late: Callable[[int], bool] | None) -> None:
        self._rig, self.agreed, self.polls = rig, True, 0
        self._pools = [small_pool(rig, "mla") for _ in range(1 + RANKS)]
        with placed(rig) as devices:
            made = [make(rig, REQUESTS) for _ in range(1 + RANKS)]
        self._buffers = [buffers for buffers, _, _ in made]
        self._stamps = [writer for _, writer, _ in made]
        self._slots = [slots for _, _, slots in made]
        memories = [
            RegisteredMemory(pages=pool.pool.get_contiguous_buf_infos(), metadata=buffers.get_buf_infos())
            for pool, buffers in zip(self._pools, self._buffers, strict=True)
        ]
        link = StandInLink(late or self._is_metadata)
        self.peers = PDPair(rig, link, memories[0], memories[1:], kinds=(), flat=True)
        self._metadata = [
            range(start, start + size)
            for memory in memories[1:]
            for start, size in zip(memory.metadata[0], memory.metadata[1], strict=True)
        ]
        self._group = FakeProcessGroup(RANKS)
        self._sent: list[SentRequest] = []
        self._requests: list[Any] = []
        self._snapshots: list[dict[int, list[torch.Tensor]]] = [{} for _ in range(RANKS)]
        self._queues = [self._queue(rank) for rank in range(RANKS)]
        rig.judge.note(f"metadata asked for on {', '.join(sorted(devices)) or 'no device'}")

    def send(self) -> None:
        sent = []
        for at in range(REQUESTS):
            number = len(self._sent) + 1
            room = self._room(number)
            pages = list(range(1 + at * PAGES, 1 + (at + 1) * PAGES))
            slot = self._slot(0)
            self._pools[0].writer.write(number, "token", self._tokens(0, pages))
            self._stamps[0].write(number, "slot", (slot,))
            targets = []
            for rank in range(RANKS):
                there = [page + 3 for page in pages] if rank else pages
                targets.append(DecodeTarget(there, self._slot(1 + rank), []))
                self._queues[rank].queue.append(self._queued(rank, number, room, targets[-1].slot))
            sent.append(SentRequest(room=room, pages=pages, slot=slot, states=[], targets=tuple(targets)))
            self._sent.append(sent[-1])
        died = self.peers.send(sent)
        if died is not None:
            raise CannotDrive(f"the transfer worker died: {died.text} ({died.where})")
        link = self.peers.link
        by_wire = sum(parts[0] == b"AUX_DATA" for wire in link.wires.values() for parts in wire)
        way = f"{by_wire} metadata messages by socket, {link.moved_bytes} bytes by the copy engine"
        self._rig.judge.note(way)
        self._rig.judge.count("requests", REQUESTS)
        self._rig.judge.count("transfers", REQUESTS * RANKS)

    def reuse(self) -> None:
        for sent in self._sent:
            self._slots[0].free(sent.slot)
        self.send()
        self._rig.judge.count("foreign_reuses", REQUESTS)

    def deliver(self, rank: int, most: int | None = None) -> None:
        died = self.peers.deliver(rank, most)
        if died is not None:
            raise CannotDrive(f"the receive loop died: {died.text} ({died.where})")

    def waits(self) -> bool:
        link = self.peers.link
        return any(link.wires.values()) or any(link.flying.values())

    def poll(self, when: str) -> None:
        before = [[entry.req.rid for entry in queue.queue] for queue in self._queues]
        if not any(before):
            return
        for snapshots in self._snapshots:
            snapshots.clear()
        module = sys.modules[type(self._queues[0]).__module__]
        if "release_kv_cache" not in vars(module):
            raise CannotDrive(f"{module.__name__} has no release_kv_cache")
        released = replaced(module, {"release_kv_cache": lambda *_, **__: None})
        with self._rig.stubs.refused("pop_transferred"), released:
            calls = [partial(self._rig.watched, queue.pop_transferred) for queue in self._queues]
            results = self._group.together(calls, self._rig.package)
        self.polls += 1
        for rank, result in enumerate(results):
            if isinstance(result, Fault):
                self._fault(rank, result, when)
                return
            for request in result:
                self._check(rank, int(request.rid), when)
            kept = {entry.req.rid for entry in self._queues[rank].queue}
            gone = sorted({*before[rank]} - kept - {request.rid for request in result})
            if gone:
                aborted = f"rank {rank} aborted requests {', '.join(gone)}, of which nothing has failed"
                text = f"{when}: {aborted}: {self._reasons()}"
                self._rig.judge.find("KV203", "protocol", text, lane="aborted")
        after = [[entry.req.rid for entry in queue.queue] for queue in self._queues]
        self._rig.judge.count("orderings_checked")
        if after[0] != after[1]:
            self.agreed = False
            first, second = (", ".join(rids) or "none" for rids in after)
            text = f"{when}: after a poll rank 0 still waits for requests {first}; rank 1 for {second}"
            self._rig.judge.find("KV601", "protocol", text, lane="queue")

    def finish(self) -> None:
        if self.agreed:
            for rank in range(RANKS):
                self.peers.link.land(session(rank))
                self.deliver(rank)
            self.poll("everything there")
        waiting = [[entry.req.rid for entry in queue.queue] for queue in self._queues]
        if self.agreed and any(waiting):
            text = f"every byte and message is there, and the ranks still wait for {waiting}"
            self._rig.judge.find("KV901", "liveness", text)
        self._rig.judge.note(f"{self.polls} polls, {self._group.collectives} collective calls")

    def _reasons(self) -> str:
        reasons = [getattr(request.finished_reason, "message", None) for request in self._requests]
        return "; ".join(dict.fromkeys(each for each in reasons if each)) or "no reason given"

    def _fault(self, rank: int, fault: Fault, when: str) -> None:
        self.agreed = False
        if is_mismatch(fault):
            text = f"{when}: rank {rank} polls with a queue of another length than its peer: {fault.text}"
            self._rig.judge.find("KV601", "protocol", text, lane="collective")
        elif fault.is_engine:
            self._rig.called = fault.call
            text = f"{when}: pop_transferred of rank {rank} raised {fault.text} ({fault.where})"
            self._rig.judge.find("KV902", "liveness", text, lane=f"rank {rank}")
        else:
            raise CannotDrive(f"pop_transferred: {fault.text} ({fault.where})")

    def _check(self, rank: int, request: int, when: str) -> None:
        judge, target = self._rig.judge, self._sent[request - 1].targets[rank]
        what = f"{when}: rank {rank} committed request {request}"
        rows = self._snapshots[rank].get(target.slot)
        if rows is None:
            raise CannotDrive("pop_transferred committed a request and read no metadata by get_buf")
        for held, seen in zip(self._stamps[1 + rank].found.buffers, rows, strict=True):
            judge.compare(
                held, seen[None], request=request, positions=(0,), ids=(target.slot,), when=what, code="KV203"
            )
        pool = self._pools[1 + rank]
        ids = self._tokens(1 + rank, list(target.pages))
        late = PAGES_LATE if self._rig.subject == EVERYTHING else None
        for held in pool.writer.found.buffers:
            if held.unit == "token":
                seen, at = held.rows[torch.as_tensor(ids)], range(len(ids))
                judge.compare(
                    held, seen, request=request, positions=at, ids=ids, when=what, code="KV203", condition=late
                )

    def _queue(self, rank: int) -> Any:
        buffers = self._buffers[1 + rank]
        read = buffers.get_buf
        writer, snapshots = self._stamps[1 + rank], self._snapshots[rank]

        def get_buf(slot: int) -> Any:
            snapshots[slot] = [held.rows[slot].clone() for held in writer.found.buffers]
            return read(slot)

        buffers.get_buf = get_buf
        own = {
            "queue": [],
            "gloo_group": None,
            "tp_rank": rank,
            "scheduler": _scheduler(),
            "metadata_buffers": buffers,
            "req_to_metadata_buffer_idx_allocator": self._slots[1 + rank],
            "spec_algorithm": SimpleNamespace(is_none=lambda: True),
            "tree_cache": None,
            "enable_staging": False,
            "staging_handler": None,
            "enable_host_receive": False,
            "enable_deferred_kv_release": False,
            "_release_request": lambda *_: None,
            "_clean_hicache_prefetch_resources": lambda *_: None,
        }
        return bare(self._rig.names["transfer.queue"], own)

    def _queued(self, rank: int, number: int, room: int, slot: int) -> Any:
        request = make_committed_request(self._rig, PAGES * self._pools[0].page_size)
        self._requests.append(request)
        request.rid, request.bootstrap_room, request.bootstrap_host = str(number), room, "prefill"
        manager = self.peers.ranks[rank]
        receiver = SimpleNamespace(
            poll=lambda: manager.request_status[room],
            clear=lambda: None,
            kv_mgr=manager,
            require_staging=False,
            abort_notified=False,
        )
        offered = {"req": request, "kv_receiver": receiver, "metadata_buffer_index": slot}
        return fitted(self._rig.names["transfer.queued"], offered)

    def _slot(self, side: int) -> int:
        slot = self._slots[side].alloc()
        if slot is None:
            raise CannotDrive("no metadata slot is free, though every request that had one was committed")
        return int(slot)

    def _room(self, request: int) -> int:
        held = next((each for each in self._stamps[0].found.buffers if each.name == ROOM), None)
        if held is None:
            raise CannotDrive(f"metadata buffers have no {ROOM}")
        row = rows_of(held, request, (0,))[0]
        return int.from_bytes(bytes(row[:8].tolist()), "little")

    def _tokens(self, side: int, pages: list[int]) -> list[int]:
        size = self._pools[side].page_size
        return [page * size + at for page in pages for at in range(size)]

    def _is_metadata(self, address: int) -> bool:
        return any(address in each for each in self._metadata)


def _scheduler() -> SimpleNamespace:
    quiet = SimpleNamespace(enable_metrics=False)
    return SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_transfer_backend="mooncake"),
        enable_metrics=False,
        metrics_reporter=quiet,
        stream_output=lambda *_: None,
        output_streamer=SimpleNamespace(stream_output=lambda *_: None),
        enable_hisparse=False,
        enable_decode_hicache=False,
        kv_checksum_computer=None,
        batch_result_processor=SimpleNamespace(_maybe_update_reasoning_tokens=lambda *_: None),
        disagg_decode_prealloc_queue=None,
    )


@contextmanager
def route(rig: Rig) -> Iterator[None]:
    if rig.subject.startswith(DEFAULT):
        if rig.names.has("transfer.custom-pool") and rig.names["transfer.custom-pool"]()[0]:
            raise CannotDrive(f"expected the default route, and the environment asks for another; unset {VARIABLE}")
        rig.judge.note("the default route: no pool of its own")
        yield
        return
    override = getattr(rig.names["server.variables"], VARIABLE).override(ROUTE)
    override.__enter__()
    try:
        taken, name = rig.names["transfer.custom-pool"]()
        rig.judge.note(f"{VARIABLE}={ROUTE}: a pool of its own: {taken}, under the name {name}")
        yield
    finally:
        override.__exit__(None, None, None)  # without the exception: with one it would not restore the variable


class _OnCpu(TorchFunctionMode):
    """Place tensors for an accelerator in main memory, and record the requested device."""

    def __init__(self, devices: set[str]) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if (device := named.get("device")) is not None:
            self._devices.add(torch.device(device).type)
            named["device"] = "cpu"
        return func(*args, **named)


@contextmanager
def placed(rig: Rig) -> Iterator[set[str]]:
    devices: set[str] = set()
    with _OnCpu(devices):
        yield devices


class CollectiveMismatch(Exception):
    pass


class FakeProcessGroup:
    def __init__(self, size: int) -> None:
        self._size = size
        self._moved = threading.Condition()
        self._brought: dict[int, torch.Tensor] = {}
        self._left: set[int] = set()
        self._rounds = 0
        self._result: torch.Tensor | None = None
        self._rank = threading.local()
        self.collectives = 0

    def together(self, calls: Sequence[Callable[[], Any]], package: str) -> list[Any]:
        """Run one call on each rank. Returns each result, or the Fault that ended the call."""
        self._brought, self._left = {}, set()
        results: list[Any] = [None] * self._size
        missed: list[CannotDrive] = []

        def run(rank: int) -> None:
            self._rank.number = rank
            try:
                results[rank] = attempt(calls[rank], package)
            except CannotDrive as why:
                missed.append(why)
            finally:
                self._leave(rank)

        own = {"all_reduce": self._all_reduce, "get_world_size": lambda *_: self._size}
        with replaced(torch.distributed, own):
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if missed:
            raise missed[0]
        return results

    def _all_reduce(self, tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, **_: object) -> None:
        rank = self._rank.number
        reduce = {torch.distributed.ReduceOp.MIN: torch.amin, torch.distributed.ReduceOp.MAX: torch.amax}.get(op)
        if reduce is None:
            raise CannotDrive(f"an all-reduce of {op}, which the ranks here do not know")
        with self._moved:
            round_ = self._rounds
            self._brought[rank] = tensor.clone()
            if len(self._brought) + len(self._left) == self._size:
                self._close(reduce)
            while self._rounds == round_:
                self._moved.wait()
            if self._result is None:
                raise CollectiveMismatch("the ranks bring different numbers of requests, or one does not take part")
            tensor.copy_(self._result)

    def _leave(self, rank: int) -> None:
        with self._moved:
            self._left.add(rank)
            if self._brought and len(self._brought) + len(self._left) == self._size:
                self._close(torch.amin)

    def _close(self, reduce: Callable[..., torch.Tensor]) -> None:
        """The caller holds the lock."""
        tensors = [self._brought[rank] for rank in sorted(self._brought)]
        same = len(tensors) == self._size and len({tuple(each.shape) for each in tensors}) == 1
        self._result = reduce(torch.stack(tensors), dim=0) if same else None
        self._brought = {}
        self._rounds += 1
        self.collectives += 1
        self._moved.notify_all()


def is_mismatch(result: object) -> bool:
    return isinstance(result, Fault) and result.text.startswith(CollectiveMismatch.__name__)
