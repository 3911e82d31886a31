"""Scheduler loop: one rank of SGLang's scheduler without its processes, on the engine's own batches, tree and pools.

A step stashes the request that is prefilled in chunks, merges the prefilled batch, admits requests that fit or else
decodes, retracts if decoding does not fit, and gives each request one token.

Invariants:
- It makes the scheduler's calls in the scheduler's order. The engine decides on room, locks and eviction.
- Batches do not overlap: one is answered before the next is made.
- A row belongs to the request that got it last, until the table has it free: a release may never reset a request's own
  row field.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.request_generator import TrackedRequest, token
from kvcheck.core.probes.sglang.rig.pools import STATES, SmallPool, optional

REQUEST_NEEDS = ("request", "request.sampling")
VOCABULARY = 1 << 20
CHUNK = 8
INPUT = 1 << 12
RATIO = 0.1
"""new_token_ratio: the share of possible output for which room is reserved; small, so that requests are retracted."""
RUNNING = 5
STATES_EACH = 3
"""States that the engine's own sizing counts for a running request."""
SQUEEZE = 6
"""One decode in so many retracts a request despite enough room."""
SCHEDULER_NEEDS = (
    *REQUEST_NEEDS,
    "tree.params",
    "tree.release",
    "batch",
    "batch.abort",
    "batch.adder",
    "batch.added",
    "batch.algorithm",
)


def make_request(rig: Rig, name: str, prompt: Sequence[int], outputs: int) -> Any:
    sampling = rig.names["request.sampling"](max_new_tokens=outputs, temperature=0)
    sampling.normalize(None)
    offered = {
        "rid": name,
        "origin_input_text": "",
        "origin_input_ids": [],
        "sampling_params": sampling,
        "vocab_size": VOCABULARY,
    }
    kind = type(fitted(rig.names["request"], offered).output_ids)  # a list, or an array in newer releases
    return fitted(
        rig.names["request"],
        {**offered, "origin_input_ids": array("q", prompt) if issubclass(kind, array) else list(prompt)},
    )


def make_committed_request(rig: Rig, committed: int) -> Any:
    """Make a request with KV of `committed` tokens, and one last token without KV."""
    request = make_request(rig, "probe", range(1, committed), 8)
    request.output_ids.extend((7, 8))
    if request.seqlen - 1 != committed:
        raise CannotDrive(f"a request of {committed + 1} tokens counts {request.seqlen}")
    return request


def record_of(request: Any) -> Any:
    """In some releases, row and state of a request lie in its `kv` record."""
    record = getattr(request, "kv", None)
    return record if hasattr(record, "req_pool_idx") else request


def row_of(request: Any) -> int | None:
    row = record_of(request).req_pool_idx
    return None if row is None else int(row)


def state_of(request: Any) -> int | None:
    slot = getattr(record_of(request), "mamba_pool_idx", None)
    return None if slot is None else int(slot)


def prefix_of(request: Any) -> int:
    return int(request.prefix_len) if hasattr(request, "prefix_len") else len(request.prefix_indices)


def end_of(request: Any) -> int:
    for name in ("extend_end", "extend_range.end", "fill_len"):
        try:
            return int(operator.attrgetter(name)(request))
        except AttributeError:
            continue
    return len(request.fill_ids)


def extend_to(request: Any, end: int) -> None:
    request.extend_end = request.fill_len = end
    request.fill_ids = request.origin_input_ids[:end]
    if hasattr(request, "set_extend_range"):
        request.set_extend_range(0, end)


class SchedulerLoop:
    """Requests over one tree. A subclass judges them in the hooks `matched`, `computed` and `published`."""

    def __init__(self, rig: Rig, made: SmallPool, tree: Any, arguments: Any) -> None:
        self.rig, self.made, self.tree = rig, made, tree
        self._arguments = arguments
        self.most_running = STATES // STATES_EACH if made.family == "mamba" else RUNNING
        self.unfinished: dict[str, TrackedRequest] = {}
        self.waiting: list[TrackedRequest] = []
        self.chunked: Any = None
        self.last: Any = None
        self.must_retract: bool | None = None
        """Whether the next decode retracts a request despite enough room. None: drawn."""
        self._rows = sorted(made.request_pool.free_slots)
        self._given: dict[int, str] = {}
        """The last request of each row."""
        self.running: Any = fitted(rig.names["batch"], {"reqs": [], "batch_is_full": False})

    @property
    def held(self) -> list[TrackedRequest]:
        free = self.made.request_pool.free_slots
        rows = {tracked.name: row_of(tracked.request) for tracked in self.unfinished.values()}
        return [
            tracked
            for name, tracked in self.unfinished.items()
            if (row := rows[name]) is not None and self._given.get(row) == name and row not in free
        ]

    def require_rows(self, when: str) -> None:
        """Raise CannotDrive if a row is neither free nor held by exactly one request."""
        free = sorted(self.made.request_pool.free_slots)
        held = {tracked.name: row_of(tracked.request) for tracked in self.held}
        if sorted([*free, *(row for row in held.values() if row is not None)]) != self._rows:
            named = {name: row_of(tracked.request) for name, tracked in self.unfinished.items()}
            text = f"{when}, it is not clear who holds a row: of rows {self._rows} are free {free}"
            raise CannotDrive(f"{text}, requests name {named}, and by what they were given they hold {held}")

    def add(self, tracked: TrackedRequest) -> None:
        self.unfinished[tracked.name] = tracked
        self.waiting.append(tracked)

    def step(self) -> None:
        self._stash()
        self._merge()
        batch = self._prefill()
        if batch is None:
            batch = self._decode()
        self.last = batch
        if batch is not None:
            self._run(batch)

    def abort(self, tracked: TrackedRequest) -> None:
        """A waiting request leaves the queue; a running one ends with its next token."""
        self.rig.judge.count("aborts")
        if tracked not in self.waiting:
            tracked.request.to_finish = self.rig.names["batch.abort"]()
            return
        self.waiting.remove(tracked)
        if state_of(tracked.request) is not None:
            self._release(tracked.request, publish=False)
        del self.unfinished[tracked.name]

    # The parts of a step

    def _stash(self) -> None:
        request = self.chunked
        if request is not None and end_of(request) > prefix_of(request):
            self._publish(request, chunked=True)
            self._park(request)

    def _park(self, request: Any) -> None:
        """Free the row of a chunk, in releases whose table does not keep rows by request."""
        free, row = self.made.request_pool.free, row_of(request)
        if known := optional(free, free_index=row, free_mamba_cache=False):
            self.rig.measured(lambda: free(**known), "freeing the row of a chunk")

    def _merge(self) -> None:
        last = self.last
        excluded = [each for each in (self.chunked, getattr(last, "chunked_req", None)) if each is not None]
        if last is not None and last.forward_mode.is_extend():
            known = optional(last.filter_batch, chunked_req_to_exclude=excluded, reqs_to_exclude=excluded)
            before = last.batch_size()
            self.rig.measured(lambda: last.filter_batch(**known), "filter_batch")
            self.running.batch_is_full &= last.batch_size() == before
            if not last.is_empty() and self.running.is_empty():
                self.running = last
            elif not last.is_empty():
                self.rig.measured(lambda: self.running.merge_batch(last), "merge_batch")
        before = self.running.batch_size()
        self.rig.measured(self.running.filter_batch, "filter_batch")
        self.running.batch_is_full &= self.running.batch_size() == before and before > 0

    def _prefill(self) -> Any:
        names, made, rig = self.rig.names, self.made, self.rig
        if (self.running.batch_is_full or not self.waiting) and self.chunked is None:
            return None
        offered = {
            "page_size": made.page_size,
            "tree_cache": self.tree,
            "token_to_kv_pool_allocator": made.allocator,
            "running_batch": self.running,
            "new_token_ratio": RATIO,
            "rem_input_tokens": INPUT,
            "rem_chunk_tokens": CHUNK,
        }
        adder = rig.measured(lambda: fitted(names["batch.adder"], offered), "making a prefill adder")
        if self.chunked is not None:
            rig.measured(self.chunked.init_next_round_input, "init_next_round_input")
            self.chunked = rig.measured(lambda: adder.add_chunked_req(self.chunked), "add_chunked_req")
        states = getattr(made.request_pool, "mamba_allocator", None)
        if states is not None:
            states.alloc_group_begin(len(self.waiting))
        for tracked in list(self.waiting):
            if not self._admit(adder, tracked):
                break
        if states is not None:
            states.alloc_group_end()
        if not adder.can_run_list:
            return None
        return self._batch_of(adder)

    def _admit(self, adder: Any, tracked: TrackedRequest) -> bool:
        rig, request, added = self.rig, tracked.request, self.rig.names["batch.added"]
        if len(adder.can_run_list) >= self.most_running - self.running.batch_size():
            self.running.batch_is_full = True
            return False
        rig.measured(lambda: request.init_next_round_input(self.tree), "init_next_round_input")
        self.matched(tracked, prefix_of(request))
        told = rig.measured(
            lambda: adder.add_one_req(request, has_chunked_req=self.chunked is not None, truncation_align_size=None),
            "add_one_req",
        )
        if told == added.CONTINUE:
            return True
        if told == added.NO_TOKEN:
            self.running.batch_is_full = bool(adder.can_run_list) or not self.running.is_empty()
        if request not in adder.can_run_list:
            self._revert(request)
        return False

    def _revert(self, request: Any) -> None:
        """Free the state that a match took, in releases whose scheduler does so."""
        record, pool = record_of(request), self.made.request_pool
        states = getattr(pool, "mamba_allocator", getattr(pool, "mamba_pool", None))
        if states is None or state_of(request) is None or not self._gives_states_back():
            return
        if hasattr(record, "mamba_cow_src_index"):
            record.mamba_cow_src_index, record.mamba_needs_clear = None, False
        states.free(record.mamba_pool_idx.unsqueeze(-1))
        record.mamba_pool_idx = None

    def _gives_states_back(self) -> bool:
        return self.rig.names.has("tree.publish")

    def _batch_of(self, adder: Any) -> Any:
        names, made = self.rig.names, self.made
        self.waiting = [tracked for tracked in self.waiting if tracked.request not in adder.can_run_list]
        if adder.new_chunked_req is not None:
            self.chunked = adder.new_chunked_req
        if self.chunked is not None:
            _count_chunk(self.chunked, 1)
        model = SimpleNamespace(is_matryoshka=False, is_encoder_decoder=False, vocab_size=VOCABULARY, hidden_size=8)
        offered = {
            "reqs": adder.can_run_list,
            "req_to_token_pool": made.request_pool,
            "token_to_kv_pool_allocator": made.allocator,
            "tree_cache": self.tree,
            "model_config": model,
            "enable_overlap": False,
            "spec_algorithm": names["batch.algorithm"].NONE,
            "chunked_req": self.chunked,
        }
        batch = self.rig.measured(lambda: fitted(names["batch"].init_new, offered), "init_new")
        self.rig.measured(batch.prepare_for_extend, "prepare_for_extend")
        self._given |= {row: str(each.rid) for each in batch.reqs if (row := row_of(each)) is not None}
        return batch

    def _decode(self) -> Any:
        batch, rig = self.running, self.rig
        if batch.is_empty():
            return None
        before = batch.batch_size()
        is_short = not rig.measured(batch.check_decode_mem, "check_decode_mem")
        if is_short or (before > 1 and self._squeezes()):  # as the scheduler's own test mode retracts
            known = optional(batch.retract_decode, server_args=self._arguments)
            gone, _, dead = rig.measured(lambda: batch.retract_decode(**known), "retract_decode")
            for request in gone:
                tracked = self.unfinished[request.rid]
                tracked.preemptions += 1
                self.waiting.append(tracked)
                rig.judge.count("retractions")
            for request in dead:
                del self.unfinished[request.rid]
                rig.judge.count("aborts")
        batch.batch_is_full &= batch.batch_size() == before
        if batch.is_empty():
            return None
        rig.measured(batch.prepare_for_decode, "prepare_for_decode")
        return batch

    def _squeezes(self) -> bool:
        return self.rig.mix.chance(1, SQUEEZE) if self.must_retract is None else self.must_retract

    def _run(self, batch: Any) -> None:
        is_extend = bool(batch.forward_mode.is_extend())
        ends = [int(end) for end in batch.seq_lens_cpu.tolist()]
        starts = [int(at) for at in batch.prefix_lens] if is_extend else [end - 1 for end in ends]
        served = [self.unfinished[request.rid] for request in batch.reqs]
        if is_extend:
            self._move_states(batch)
        self.computed(served, starts, ends, is_extend)
        if not is_extend:
            self.made.allocator.free_group_begin()
        for tracked, end in zip(served, ends, strict=True):
            self._answer(tracked, end, is_extend)
        if not is_extend:
            self.rig.measured(self.made.allocator.free_group_end, "free_group_end", is_aside=True)
        batch.output_ids = torch.tensor([(list(each.request.output_ids) or [0])[-1] for each in served])
        batch.input_ids = batch.output_ids
        for tracked in served:
            if tracked.request.finished():
                del self.unfinished[tracked.name]

    def _answer(self, tracked: TrackedRequest, end: int, is_extend: bool) -> None:
        request = tracked.request
        if is_extend and _chunks(request) > 0:
            _count_chunk(request, -1)
            return
        request.output_ids.append(token(tracked.number, end))
        finish = request.check_finished if hasattr(request, "check_finished") else request.update_finish_state
        self.rig.measured(finish, "finishing", is_aside=True)
        if request.finished():
            self._release(request, publish=True)
            self.published(tracked, end)
        elif is_extend:
            self._publish(request, chunked=False)

    def _move_states(self, batch: Any) -> None:
        if getattr(batch, "mamba_clear_indices", None) is not None:
            self.made.request_pool.mamba_pool.clear_slots(batch.mamba_clear_indices)
        if getattr(batch, "mamba_cow_src_indices", None) is not None:
            source, target = batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices
            self.made.request_pool.mamba_pool.copy_from(source, target)

    def _publish(self, request: Any, *, chunked: bool) -> None:
        tracked, names, tree = self.unfinished[request.rid], self.rig.names, self.tree
        end = end_of(request)
        if names.has("tree.publish"):
            publish = names["tree.publish"]
            call = partial(publish, request, tree, **optional(publish, chunked=chunked))
        else:
            call = partial(tree.cache_unfinished_req, request, chunked=chunked)
        self.rig.measured(call, "caching an unfinished request")
        tracked.table = self.table(tracked, end)
        self.published(tracked, end)

    def _release(self, request: Any, *, publish: bool) -> None:
        release, tracked = self.rig.names["tree.release"], self.unfinished[request.rid]
        if row_of(request) is not None:
            tracked.table = self.table(tracked, len(request.origin_input_ids) + len(request.output_ids) - 1)
        known = optional(release, is_insert=publish, checkpoint=publish)
        self.rig.measured(lambda: release(request, self.tree, **known), "release_kv_cache")

    def table(self, tracked: TrackedRequest, end: int) -> tuple[int, ...]:
        row = row_of(tracked.request)
        return () if row is None else tuple(self.made.request_pool.req_to_token[row, :end].tolist())

    # Hooks for a subclass that judges

    def matched(self, tracked: TrackedRequest, hit: int) -> None:
        """Hook: the tree matched `hit` of its tokens."""

    def computed(
        self, served: Sequence[TrackedRequest], starts: Sequence[int], ends: Sequence[int], is_extend: bool
    ) -> None:
        """Hook: positions starts .. ends - 1 of these requests are computed now."""

    def published(self, tracked: TrackedRequest, end: int) -> None:
        """Hook: its tokens before `end` were given to the tree. Its row may have changed."""


def _chunks(request: Any) -> int:
    name = "is_chunked" if hasattr(request, "is_chunked") else "inflight_middle_chunks"
    return int(getattr(request, name))


def _count_chunk(request: Any, more: int) -> None:
    name = "is_chunked" if hasattr(request, "is_chunked") else "inflight_middle_chunks"
    setattr(request, name, int(getattr(request, name)) + more)
