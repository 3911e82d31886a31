"""Probe blocks: vLLM's KVCacheManager and block pool, driven by the calls of its scheduler, first come first served.

Requests with shared prefixes are admitted, prefilled in pieces, grow token by token, are preempted when blocks run out,
resume, are aborted and finish, over a pool that is too small for them.

Invariants:
- A request that got blocks in a step is not preempted in that step. The manager's cache relies on it.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.request_generator import LENGTH, PrefixPages, TrackedRequest, token
from kvcheck.core.probes.vllm.block_bytes import BLOCK, DEVICE_NEEDS, BlockBytes, cache_config, request_generator

POOL = 18
LONGEST = 28
OUTPUTS = 14
REQUESTS = 24
RUNNING = 5
PIECE = 12
STEPS = 600


class Blocks:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (*DEVICE_NEEDS, "request.status")

    def control(self, rig: Rig) -> None:
        run = _ManagerRun(rig, LENGTH // BLOCK + 2)
        run.waiting.append(run.generator.unshared(LONGEST, OUTPUTS, 0))
        for _ in range(OUTPUTS):
            run.step()

    def measure(self, rig: Rig) -> None:
        run = _ManagerRun(rig, POOL)
        for number in range(REQUESTS):
            run.waiting.append(run.generator.draw(LONGEST, OUTPUTS))
            if number == REQUESTS // 2:
                run.work()
                run.reset()
            for _ in range(rig.mix.below(4)):
                run.judged_step()
            if rig.mix.chance(1, 12):
                run.abort()
        run.work()
        run.reset()


class _ManagerRun:
    def __init__(self, rig: Rig, blocks: int) -> None:
        self.rig = rig
        offered = {
            "kv_cache_config": cache_config(rig, blocks),
            "max_model_len": LENGTH,
            "scheduler_block_size": BLOCK,
            "hash_block_size": BLOCK,
            "enable_caching": True,
        }
        self.manager: Any = rig.measured(lambda: fitted(rig.names["manager"], offered), "making the manager")
        self.blocks = BlockBytes(rig, self.manager, blocks)
        self.generator = request_generator(rig)
        self.prefixes = PrefixPages(BLOCK)
        self.waiting: deque[TrackedRequest] = deque()
        self.running: list[TrackedRequest] = []

    def work(self) -> None:
        for _ in range(STEPS):
            if not (self.waiting or self.running):
                return
            self.judged_step()
        self.rig.judge.find("KV901", "liveness", f"{len(self.waiting)} requests wait after {STEPS} steps")

    def judged_step(self) -> None:
        self.step()
        self.blocks.account(self.running, "after a step")

    def step(self) -> None:
        pieces: dict[int, tuple[int, int]] = {}
        is_full = False
        for tracked in list(self.running):
            while tracked in self.running and not self._grow(tracked, pieces):
                is_full = True
                self._preempt(self.running[-1])
        while self.waiting and not is_full and len(self.running) < RUNNING and self._admit(self.waiting[0], pieces):
            self.running.append(self.waiting.popleft())
        self._compute(pieces)

    def reset(self) -> None:
        self.blocks.account([], "with all requests finished")
        if not self.rig.measured(self.manager.reset_prefix_cache, "reset_prefix_cache"):
            self.rig.judge.find("KV401", "accounting", "the prefix cache cannot be reset with all requests finished")
        self.prefixes.clear()

    def abort(self) -> None:
        if self.running:
            self._free(self.running.pop(self.rig.mix.below(len(self.running))))
            self.rig.judge.count("aborts")

    def _admit(self, tracked: TrackedRequest, pieces: dict[int, tuple[int, int]]) -> bool:
        rig, request = self.rig, tracked.request
        found = rig.measured(lambda: self.manager.get_computed_blocks(request), "get_computed_blocks")
        blocks, hit = found[0], int(found[1])
        self._judge_hit(tracked, blocks, hit)
        more = min(PIECE, request.num_tokens - hit)
        if not self._allocate(tracked, hit, more, new_computed_blocks=blocks, num_new_computed_tokens=hit):
            return False
        request.status = rig.names["request.status"].RUNNING
        rig.judge.count("lookups")
        rig.judge.count("pages_wanted", (request.num_tokens - 1) // BLOCK)
        rig.judge.count("device_hit_pages", hit // BLOCK)
        rig.judge.count("resumes", int(tracked.preemptions > 0))
        pieces[tracked.number] = (hit, hit + more)
        return True

    def _grow(self, tracked: TrackedRequest, pieces: dict[int, tuple[int, int]]) -> bool:
        done = int(tracked.request.num_computed_tokens)
        more = min(PIECE, tracked.request.num_tokens - done)
        if not self._allocate(tracked, done, more):
            return False
        pieces[tracked.number] = (done, done + more)
        return True

    def _allocate(self, tracked: TrackedRequest, done: int, more: int, **hits: Any) -> bool:
        """A block that is handed out loses its old prefix."""
        rig, request = self.rig, tracked.request
        before = (
            set(tracked.table) | {block.block_id for block in hits["new_computed_blocks"].blocks[0]}
            if hits
            else {*tracked.table}
        )
        got = rig.measured(lambda: self.manager.allocate_slots(request, more, **hits), "allocate_slots")
        if got is None:
            return False
        tracked.table = self.blocks.table(tracked)
        for block in tracked.table:
            if block not in before:
                rig.judge.count("device_evictions", int(self.prefixes.hand_out(block)))
                owner = next((each for each in self.running if each is not tracked and block in each.table), None)
                if owner is not None:
                    text = f"block {block} was handed to request {tracked.number} while request {owner.number} holds it"
                    rig.judge.find(
                        "KV403", "lifetime", text, page=block, request=tracked.number, seen_request=owner.number
                    )
        self.prefixes.register(request.all_token_ids[: done + more], tracked.table)
        return True

    def _judge_hit(self, tracked: TrackedRequest, blocks: Any, hit: int) -> None:
        tokens, find = list(tracked.request.all_token_ids), self.rig.judge.find
        wanted = self.prefixes.hit(tokens) * BLOCK
        if hit != wanted:
            text = f"request {tracked.number} hits {hit} tokens; by the prefixes that were cached it is {wanted}"
            find("KV301", "contract", text, request=tracked.number)
        ids = [block.block_id for block in blocks.blocks[0]]
        if len(ids) * BLOCK != hit:
            raise CannotDrive(f"a hit of {hit} tokens came with {len(ids)} blocks of {BLOCK}")
        for place, block in enumerate(ids):
            if not self.prefixes.holds(tokens[: (place + 1) * BLOCK], block):
                text = f"request {tracked.number} hits block {block} at place {place}, which stands for another prefix"
                find("KV102", "contract", text, page=block, request=tracked.number)

    def _preempt(self, tracked: TrackedRequest) -> None:
        self.running.remove(tracked)
        self._free(tracked)
        tracked.request.num_computed_tokens = 0
        tracked.request.status = self.rig.names["request.status"].PREEMPTED
        tracked.request.num_preemptions = 1 + getattr(tracked.request, "num_preemptions", 0)
        tracked.preemptions += 1
        self.waiting.appendleft(tracked)
        self.rig.judge.count("retractions")

    def _free(self, tracked: TrackedRequest) -> None:
        self.rig.measured(lambda: self.manager.free(tracked.request), "free")
        tracked.table = ()

    def _compute(self, pieces: dict[int, tuple[int, int]]) -> None:
        served = [tracked for tracked in self.running if tracked.number in pieces]
        for tracked in served:
            self.blocks.write(tracked, *pieces[tracked.number], self.running)
        for tracked in served:
            end = pieces[tracked.number][1]
            self.blocks.read(tracked, end, "while it is computed")
            tracked.request.num_computed_tokens = end
            if end == tracked.request.num_tokens:
                made = token(tracked.number, int(tracked.request.num_tokens))
                self.rig.measured(partial(tracked.request.append_output_token_ids, made), "append")
        for tracked in served:
            if tracked.request.num_output_tokens >= tracked.outputs:
                self.running.remove(tracked)
                self._free(tracked)
