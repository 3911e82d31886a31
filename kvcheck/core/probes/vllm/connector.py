"""Probe connector: vLLM's SimpleCPUOffloadConnector, created and called by vLLM's own scheduler.

Subjects are its store modes: eager stores computed blocks at once, lazy those that will soon be evicted. The worker
that copies is kvcheck's, over bytes of kvcheck's.

Invariants:
- The worker keeps the guarantees of vLLM's own: loads and stores each end in the order of their events, a store begins
  after the pass that computed its blocks, and a flush ends all copies before the next pass computes. Within these, the
  seed decides when a copy reads and writes.
- Accounts are taken when no copy is in progress: until then the connector holds blocks of no request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.vllm.block_bytes import BLOCK, ROW_BYTES
from kvcheck.core.probes.vllm.scheduler import LONGEST, OUTPUTS, POOL, SchedulerRun, Scheduling

HOST = 16
SLOWEST = 6
REQUESTS = 30
IDLE_STEPS = 80
NEEDS = ("manager.tensor", "connector", "connector.config", "connector.report", "connector.stored")
BLOCK_BYTES = BLOCK * 2 * 4
"""Bytes of a block by the engine's account: keys and values of one head of one float32."""


@dataclass(slots=True)
class Copy:
    """A copy of blocks. event: the engine's number for it. is_done: its bytes have moved."""

    event: int
    sources: list[int]
    targets: list[int]
    is_load: bool = field(kw_only=True)
    is_done: bool = False


class Connected:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (*Scheduling().needs("fcfs"), *NEEDS)

    def control(self, rig: Rig) -> None:
        run = _ConnectedRun(rig, 2 * POOL)
        run.add(run.generator.unshared(LONGEST, OUTPUTS, 0))
        run.work()

    def measure(self, rig: Rig) -> None:
        run = _ConnectedRun(rig, POOL)
        for _ in range(REQUESTS):
            run.add(run.generator.draw(LONGEST, OUTPUTS))
            for _ in range(rig.mix.below(4)):
                run.step()
        run.work()
        if not run.unfinished:
            run.drain()


class _ConnectedRun(SchedulerRun):
    def __init__(self, rig: Rig, blocks: int) -> None:
        super().__init__(rig, blocks, _transfer(rig))
        self.connector = self.scheduler.connector
        self.loads: list[Copy] = []
        self.stores: list[Copy] = []
        self.host = torch.zeros(HOST * BLOCK, ROW_BYTES, dtype=torch.uint8)
        # Steps that a load and a store take on average: one kind may be much slower than the other.
        self.load_steps, self.store_steps = 1 + rig.mix.below(SLOWEST), 1 + rig.mix.below(SLOWEST)

    def judged_step(self) -> None:
        """The connector holds blocks of its own, so accounts are taken at the end."""
        self.step()

    def drain(self) -> None:
        for _ in range(IDLE_STEPS):
            if not (self.loads or self.stores or self.rig.measured(self.connector.has_pending_push_work, "pending")):
                break
            self.step()
        else:
            self.rig.judge.find("KV901", "liveness", f"copies are under way {IDLE_STEPS} steps after the last request")
            return
        self.blocks.account([], "with all requests finished and all copies ended")
        pool = self.connector.scheduler_manager.cpu_block_pool
        free, there = int(pool.get_num_free_blocks()), len(pool.blocks) - 1  # one is the engine's placeholder
        self.rig.judge.count("orderings_checked")
        if free != there:
            text = f"with all copies ended {free} of {there} blocks of the host are free"
            self.rig.judge.find("KV401" if free < there else "KV402", "accounting", text, tier="host")

    def begin_pass(self, plan: Any) -> None:
        told = self._told(plan)
        if told.need_flush:
            for copy in (*self.loads, *self.stores):
                self._move(copy)
        if told.load_event >= 0:
            self._start(Copy(told.load_event, [*told.load_cpu_blocks], [*told.load_gpu_blocks], is_load=True))
            self.rig.judge.count("loads")
            self.rig.judge.count("host_hit_pages", len(told.load_cpu_blocks))

    def end_pass(self, plan: Any) -> Any:
        told = self._told(plan)
        if told.store_event >= 0:
            self._start(Copy(told.store_event, [*told.store_gpu_blocks], [*told.store_cpu_blocks], is_load=False))
            self.rig.judge.count("backups", len(told.store_gpu_blocks))
        names = [
            name
            for event in self._ended(self.loads, self.load_steps)
            for name in told.load_event_to_reqs.get(event, ())
        ]
        stored = dict.fromkeys(self._ended(self.stores, self.store_steps), 1)
        report = self.rig.names["connector.report"]
        return report(
            finished_recving=dict.fromkeys(names) or None,  # in the order of their ends, which a set has not
            kv_connector_worker_meta=self.rig.names["connector.stored"](stored) if stored else None,
        )

    def _told(self, plan: Any) -> Any:
        told = plan.kv_connector_metadata
        if not hasattr(told, "load_event_to_reqs"):
            raise CannotDrive(f"{type(told).__name__} has no load_event_to_reqs; copies cannot be told")
        return told

    def _start(self, copy: Copy) -> None:
        (self.loads if copy.is_load else self.stores).append(copy)
        if self.rig.mix.chance(1, 4):
            self._move(copy)

    def _ended(self, queue: list[Copy], steps: int) -> list[int]:
        ended = []
        while queue and self.rig.mix.chance(1, steps):
            copy = queue.pop(0)
            self._move(copy)
            ended.append(copy.event)
        return ended

    def _move(self, copy: Copy) -> None:
        if copy.is_done:
            return
        copy.is_done = True
        tiers = (self.host, self.blocks.held.rows)
        source, target = tiers if copy.is_load else tiers[::-1]
        target[_rows(copy.targets)] = source[_rows(copy.sources)]


def _rows(blocks: list[int]) -> torch.Tensor:
    return (torch.as_tensor(blocks)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()


def _transfer(rig: Rig) -> Any:
    return rig.names["connector.config"](
        kv_connector="SimpleCPUOffloadConnector",
        kv_role="kv_both",
        engine_id="engine",
        kv_connector_extra_config={"cpu_bytes_to_use": HOST * BLOCK_BYTES, "lazy_offload": rig.subject == "lazy"},
    )
