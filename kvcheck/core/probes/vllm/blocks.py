"""Probe blocks: vLLM's KVCacheManager and block pool, driven as its scheduler drives them, first come first served.

Requests with shared prefixes are admitted, prefilled in pieces, grow token by token, are preempted when blocks run out,
resume, are aborted and finish, over a pool that is too small for them.

Invariants:
- A request that was given blocks in a step is not preempted in it: the manager's cache counts on that.
- Hits are compared with a dictionary of prefixes before they are used, contents after the step has computed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvcheck.core.probes.frame.calls import fitted
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.prefixes import Prefixes
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.request_generator import LENGTH, Live, token
from kvcheck.core.probes.vllm.block_bytes import BLOCK, DEVICE_NEEDS, Floor, cache_config, crowd

POOL = 18
LONGEST = 28
OUTPUTS = 14
REQUESTS = 24
RUNNING = 5
PIECE = 12
STEPS = 600


class Blocks:
    """The manager under a crowd that does not fit."""

    def needs(self, subject: str) -> tuple[str, ...]:
        """Manager, requests and hashes."""
        return (*DEVICE_NEEDS, "request.status")

    def control(self, rig: Rig) -> None:
        """One request in a pool that is large enough is computed and read; nothing is freed yet."""
        day = _Day(rig, LENGTH // BLOCK + 2)
        day.waiting.append(day.crowd.alone(LONGEST, OUTPUTS, 0))
        for _ in range(OUTPUTS):
            day.step()

    def measure(self, rig: Rig) -> None:
        """Requests that share prefixes and outgrow the pool, then an empty pool and an empty cache."""
        day = _Day(rig, POOL)
        for number in range(REQUESTS):
            day.waiting.append(day.crowd.draw(LONGEST, OUTPUTS))
            if number == REQUESTS // 2:
                day.work()
                day.reset()
            for _ in range(rig.mix.below(4)):
                day.judged_step()
            if rig.mix.chance(1, 12):
                day.abort()
        day.work()
        day.reset()


class _Day:
    """A manager, its requests and what is known of them."""

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
        self.floor = Floor(rig, self.manager, blocks)
        self.crowd = crowd(rig)
        self.prefixes = Prefixes(BLOCK)
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []

    def work(self) -> None:
        """Steps until everybody is served."""
        for _ in range(STEPS):
            if not (self.waiting or self.running):
                return
            self.judged_step()
        self.rig.judge.find("KV901", "liveness", f"{len(self.waiting)} requests wait after {STEPS} steps")

    def judged_step(self) -> None:
        """A step, and the accounts after it."""
        self.step()
        self.floor.account(self.running, "after a step")

    def step(self) -> None:
        """Allocate for all, compute, and see what is there."""
        pieces: dict[int, tuple[int, int]] = {}
        is_full = False
        for live in list(self.running):
            while live in self.running and not self._grow(live, pieces):
                is_full = True
                self._preempt(self.running[-1])
        while self.waiting and not is_full and len(self.running) < RUNNING and self._admit(self.waiting[0], pieces):
            self.running.append(self.waiting.popleft())
        self._compute(pieces)

    def reset(self) -> None:
        """Nobody is left, so the cache can be emptied."""
        self.floor.account([], "with all requests finished")
        if not self.rig.measured(self.manager.reset_prefix_cache, "reset_prefix_cache"):
            self.rig.judge.find("KV401", "accounting", "the prefix cache cannot be reset with all requests finished")
        self.prefixes.clear()

    def abort(self) -> None:
        """One of the running requests goes."""
        if self.running:
            self._free(self.running.pop(self.rig.mix.below(len(self.running))))
            self.rig.judge.count("aborts")

    def _admit(self, live: Live, pieces: dict[int, tuple[int, int]]) -> bool:
        """Look its prefix up and allocate; whether it fits."""
        rig, engine = self.rig, live.engine
        found = rig.measured(lambda: self.manager.get_computed_blocks(engine), "get_computed_blocks")
        blocks, hit = found[0], int(found[1])
        self._judge_hit(live, blocks, hit)
        more = min(PIECE, engine.num_tokens - hit)
        if not self._allocate(live, hit, more, new_computed_blocks=blocks, num_new_computed_tokens=hit):
            return False
        engine.status = rig.names["request.status"].RUNNING
        rig.judge.count("lookups")
        rig.judge.count("pages_wanted", (engine.num_tokens - 1) // BLOCK)
        rig.judge.count("device_hit_pages", hit // BLOCK)
        rig.judge.count("resumes", int(live.preemptions > 0))
        pieces[live.number] = (hit, hit + more)
        return True

    def _grow(self, live: Live, pieces: dict[int, tuple[int, int]]) -> bool:
        """Allocate for its next piece; whether there was room."""
        done = int(live.engine.num_computed_tokens)
        more = min(PIECE, live.engine.num_tokens - done)
        if not self._allocate(live, done, more):
            return False
        pieces[live.number] = (done, done + more)
        return True

    def _allocate(self, live: Live, done: int, more: int, **hits: Any) -> bool:
        """Blocks for `more` tokens. What is handed out stands for its old prefix no longer."""
        rig, engine = self.rig, live.engine
        before = (
            set(live.table) | {block.block_id for block in hits["new_computed_blocks"].blocks[0]}
            if hits
            else {*live.table}
        )
        got = rig.measured(lambda: self.manager.allocate_slots(engine, more, **hits), "allocate_slots")
        if got is None:
            return False
        live.table = self.floor.table(live)
        for block in live.table:
            if block not in before:
                rig.judge.count("device_evictions", int(self.prefixes.hand_out(block)))
                owner = next((each for each in self.running if each is not live and block in each.table), None)
                if owner is not None:
                    text = f"block {block} was handed to request {live.number} while request {owner.number} holds it"
                    rig.judge.find(
                        "KV403", "lifetime", text, page=block, request=live.number, seen_request=owner.number
                    )
        self.prefixes.register(engine.all_token_ids[: done + more], live.table)
        return True

    def _judge_hit(self, live: Live, blocks: Any, hit: int) -> None:
        tokens, find = list(live.engine.all_token_ids), self.rig.judge.find
        wanted = self.prefixes.hit(tokens) * BLOCK
        if hit != wanted:
            text = f"request {live.number} hits {hit} tokens; by the prefixes that were cached it is {wanted}"
            find("KV301", "contract", text, request=live.number)
        ids = [block.block_id for block in blocks.blocks[0]]
        if len(ids) * BLOCK != hit:
            raise CannotDrive(f"a hit of {hit} tokens came with {len(ids)} blocks of {BLOCK}")
        for place, block in enumerate(ids):
            if not self.prefixes.holds(tokens[: (place + 1) * BLOCK], block):
                text = f"request {live.number} hits block {block} at place {place}, which stands for another prefix"
                find("KV102", "contract", text, page=block, request=live.number)

    def _preempt(self, live: Live) -> None:
        self.running.remove(live)
        self._free(live)
        live.engine.num_computed_tokens = 0
        live.engine.status = self.rig.names["request.status"].PREEMPTED
        live.engine.num_preemptions = 1 + getattr(live.engine, "num_preemptions", 0)
        live.preemptions += 1
        self.waiting.appendleft(live)
        self.rig.judge.count("retractions")

    def _free(self, live: Live) -> None:
        self.rig.measured(lambda: self.manager.free(live.engine), "free")
        live.table = ()

    def _compute(self, pieces: dict[int, tuple[int, int]]) -> None:
        served = [live for live in self.running if live.number in pieces]
        for live in served:
            self.floor.write(live, *pieces[live.number], self.running)
        for live in served:
            end = pieces[live.number][1]
            self.floor.read(live, end, "while it is computed")
            live.engine.num_computed_tokens = end
            if end == live.engine.num_tokens:
                made = token(live.number, int(live.engine.num_tokens))
                self.rig.measured(lambda live=live, made=made: live.engine.append_output_token_ids(made), "append")  # type: ignore[misc]
        for live in served:
            if live.engine.num_output_tokens >= live.outputs:
                self.running.remove(live)
                self._free(live)
