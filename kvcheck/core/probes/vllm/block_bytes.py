"""BlockBytes: the bytes of the blocks that vLLM numbers, and the accounts of those blocks.

Bytes are judged by the content rule, and counts by the block tables of live requests, not by the engine's own counters.
Block 0 is the engine's placeholder and is in no account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from kvcheck.core.base.content import Site
from kvcheck.core.probes.frame.buffer_views import BufferView
from kvcheck.core.probes.frame.content import content
from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.request_generator import RequestGenerator, TrackedRequest, tokens_of
from kvcheck.core.probes.vllm import HASHES

BLOCK = 4
ROW_BYTES = 16
DEVICE_NEEDS = ("manager", "manager.config", "manager.group", "attention.full", "request", "request.sampling", *HASHES)


def request_generator(rig: Rig) -> RequestGenerator:
    return RequestGenerator(rig, BLOCK, lambda tracked: _request(rig, tracked))


def _request(rig: Rig, tracked: TrackedRequest) -> Any:
    names = rig.names
    hasher = names["hash.blocks"](BLOCK, names["hash.function"])
    sampling = names["request.sampling"](max_tokens=tracked.outputs, ignore_eos=True)
    offered = {
        "request_id": tracked.name,
        "prompt_token_ids": tokens_of(tracked.spans),
        "sampling_params": sampling,
        "pooling_params": None,
        "multi_modal_inputs": None,
        "multi_modal_hashes": None,
        "multi_modal_placeholders": None,
        "eos_token_id": None,
        "arrival_time": float(tracked.number),
        "priority": tracked.priority,
        "block_hasher": hasher,
    }
    return rig.measured(lambda: fitted(names["request"], offered), "making a request")


def cache_config(rig: Rig, blocks: int, *, has_tensor: bool = False) -> Any:
    """One group of full attention over that many blocks. has_tensor: with the tensor that connectors require."""
    offered = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
        "use_mla": False,
        "sliding_window": None,
    }
    spec = fitted(rig.names["attention.full"], offered)
    group = fitted(rig.names["manager.group"], {"layer_names": ["layer"], "kv_cache_spec": spec})
    tensors = [_tensor(rig, blocks, int(spec.page_size_bytes))] if has_tensor else []
    offered = {"num_blocks": blocks, "kv_cache_tensors": tensors, "tensors": {}, "kv_cache_groups": [group]}
    return fitted(rig.names["manager.config"], offered)


def _tensor(rig: Rig, blocks: int, block_bytes: int) -> Any:
    offered = {
        "size": blocks * block_bytes,
        "layers": ["layer"],
        "shared_by": ["layer"],
        "layer_stride": blocks * block_bytes,
        "block_stride": block_bytes,
    }
    return fitted(rig.names["manager.tensor"], offered)


class BlockBytes:
    def __init__(self, rig: Rig, manager: Any, blocks: int) -> None:
        self._rig = rig
        self._manager = manager
        self._pool = manager.block_pool
        rows = torch.zeros(blocks * BLOCK, ROW_BYTES, dtype=torch.uint8)
        self.held = BufferView(name="kv", layer=0, unit="token", rows=rows)
        self._site = Site(self.held.unit, self.held.name, "", self.held.layer)
        if len(self._pool.blocks) != blocks:
            raise CannotDrive(f"the pool has {len(self._pool.blocks)} blocks; {blocks} were asked for")

    def table(self, tracked: TrackedRequest) -> tuple[int, ...]:
        (group,) = self._rig.measured(lambda: self._manager.get_block_ids(tracked.name), "get_block_ids", is_aside=True)
        return tuple(group)

    def write(self, tracked: TrackedRequest, first: int, end: int, others: Sequence[TrackedRequest]) -> None:
        """others: live requests, whose content must not change."""
        ids = self._ids(tracked, first, end)
        for block in dict.fromkeys(each // BLOCK for each in ids):
            for other in others:
                if other is not tracked and block in other.table and not self._is_same(tracked, other, block):
                    text = f"request {tracked.number} was given block {block}, which request {other.number} still holds"
                    self._rig.judge.find(
                        "KV403", "lifetime", text, page=block, request=tracked.number, seen_request=other.number
                    )
        for start, stop, author in tracked.author_runs(first, end):
            at = torch.as_tensor(ids[start - first : stop - first])
            self.held.rows[at] = content(self._site, author, range(start, stop), ROW_BYTES)

    def read(self, tracked: TrackedRequest, end: int, when: str) -> None:
        ids = self._ids(tracked, 0, end)
        for start, stop, author in tracked.author_runs(0, end):
            part = ids[start:stop]
            self._rig.judge.compare(
                self.held,
                self.held.rows[torch.as_tensor(part)],
                request=author,
                positions=range(start, stop),
                ids=part,
                when=f"request {tracked.number} {when}",
            )

    def account(self, running: Sequence[TrackedRequest], when: str) -> None:
        """Every block is either free or held, and its reference count is the number of tables with it."""
        find = self._rig.judge.find
        pool, held = self._pool, Counter(block for tracked in running for block in tracked.table if block)
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        self._rig.judge.count("orderings_checked")
        if len(set(free)) != len(free) or set(free) & set(held):
            twice = sorted({block for block in free if free.count(block) > 1 or block in held})
            find("KV402", "accounting", f"{when}: blocks {twice} are free and held, or free twice", page=twice[0])
        lost = sorted(set(range(1, len(pool.blocks))) - set(free) - set(held))
        if lost:
            find("KV401", "accounting", f"{when}: blocks {lost} are neither free nor of a live request", page=lost[0])
        if (told := pool.get_num_free_blocks()) != len(free):
            find("KV401", "accounting", f"{when}: {told} blocks are said to be free, {len(free)} are in the free list")
        for block in pool.blocks[1:]:
            if block.ref_cnt != held[block.block_id]:
                code = "KV401" if block.ref_cnt > held[block.block_id] else "KV402"
                text = f"block {block.block_id} counts {block.ref_cnt} owners, {held[block.block_id]} requests hold it"
                find(code, "accounting", f"{when}: {text}", page=block.block_id)

    def _ids(self, tracked: TrackedRequest, first: int, end: int) -> list[int]:
        if end > len(tracked.table) * BLOCK:
            raise CannotDrive(f"request {tracked.number} has {len(tracked.table)} blocks for {end} tokens")
        return [tracked.table[at // BLOCK] * BLOCK + at % BLOCK for at in range(first, end)]

    def _is_same(self, tracked: TrackedRequest, other: TrackedRequest, block: int) -> bool:
        place = tracked.table.index(block)
        span = range(place * BLOCK, (place + 1) * BLOCK)
        same = all(tracked.author_at(at) == other.author_at(at) for at in span)
        return same and place < len(other.table) and other.table[place] == block
