"""Probe prefixes: SGLang's prefix trees over its own allocators and pools, driven like its scheduler drives them.

Requests with shared prefixes are prefilled in chunks, decode, are retracted, resume, are aborted and finish, over a
pool that is too small for them.

Invariants:
- Hits are compared with a dictionary of whole prefixes, and the bytes of every tensor of the pool with the content of a
  prefix's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from kvcheck.core.probes.frame.content import ProbeJudge
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig, Stop
from kvcheck.core.probes.frame.request_generator import (
    LENGTH,
    PrefixPages,
    RequestGenerator,
    TrackedRequest,
    finish_requests,
    tokens_of,
)
from kvcheck.core.probes.sglang.rig.bare_manager import published
from kvcheck.core.probes.sglang.rig.pools import pool_names, small_pool
from kvcheck.core.probes.sglang.rig.prefix_tree import UNIFIED, make_tree
from kvcheck.core.probes.sglang.rig.scheduler_loop import SCHEDULER_NEEDS, SchedulerLoop, make_request, state_of
from kvcheck.core.probes.sglang.rig.tree_accounts import TreeAccounts

TOKENS = 56
WINDOWS = (44, 36)
WINDOW = 8
LONGEST = 24
"""Tokens of a prompt, and of an output."""
SHORT, FEW = 10, 3
"""Tokens of a prompt in two chunks, and of an output. Two such requests fit any pool of these."""
REQUESTS = 14
STEPS = 400
PAGED = 4
FAMILIES = {"radix": "mha", "full": "mha"}


class PrefixCache:
    def needs(self, subject: str) -> tuple[str, ...]:
        tree, _, of = subject.rpartition("-")
        trees = (UNIFIED, "tree.components") if tree else (f"tree.{of}",)
        family = FAMILIES.get(of, of)
        pools = {*pool_names(family, 1), *(() if family == "mamba" else pool_names(family, PAGED))}
        return (*SCHEDULER_NEEDS, *trees, *sorted(pools))

    def control(self, rig: Rig) -> None:
        with published(rig.names, page_size=_page_size(rig)) as arguments:
            run = PrefixCacheRun(rig, arguments)
            run.add(run.generator.unshared(SHORT, SHORT, 0))
            for _ in range(SHORT):
                run.step()
            judge, rig.judge = rig.judge, ProbeJudge()
            with suppress(Stop):  # errors of the engine here are left to the cases
                run.require_rows_while_one_waits()
            rig.judge = judge

    def measure(self, rig: Rig) -> None:
        with published(rig.names, page_size=_page_size(rig)) as arguments:
            PrefixCacheRun(rig, arguments).run()


class PrefixCacheRun(SchedulerLoop):
    """must_hit_longest: every hit must equal the longest cached prefix. most, outputs: tokens of a prompt and of an
    output, small enough that one request fits."""

    def __init__(self, rig: Rig, arguments: Any) -> None:
        tree_name, _, of = rig.subject.rpartition("-")
        family = FAMILIES.get(of, of)
        page = _page_size(rig)
        windows = WINDOWS[rig.mix.below(len(WINDOWS))]
        made = small_pool(rig, family, page, TOKENS // page, windows // page)
        self.most = min(LONGEST, (windows - 2 * PAGED) * 2 // 3) if family == "swa" else LONGEST
        self.outputs = min(LONGEST, windows - 2 * PAGED - self.most) if family == "swa" else LONGEST - PAGED
        tree = rig.measured(
            lambda: make_tree(
                rig,
                UNIFIED if tree_name else f"tree.{of}",
                family,
                request_pool=made.request_pool,
                allocator=made.allocator,
                page_size=page,
                sliding_window_size=WINDOW if family == "swa" else None,
                tree_core_backend=(None, "python")[rig.schedule // 2 % 2],
            ),
            "making the tree",
        )
        super().__init__(rig, made, tree, arguments)
        self.generator = RequestGenerator(rig, page, self._make_request)
        self.accounts = TreeAccounts(rig, made, tree, rig.names["tree.components"] if tree_name else None)
        self.prefixes = PrefixPages(page)
        self.must_hit_longest = family == "mha"

    def run(self) -> None:
        mix, first = self.rig.mix, self.generator.unshared(SHORT, FEW, 0)
        must_hit_longest, self.must_hit_longest = self.must_hit_longest, True
        for tracked in (first, self.generator.continuing(first, 3, 2)):
            self.add(tracked)
            self.work()
        self.must_hit_longest = must_hit_longest
        for number in range(REQUESTS):
            self.add(self.generator.draw(self.most, self.outputs))
            if number == REQUESTS // 2:
                self.work()
                self.reset()
            for _ in range(mix.below(2)):
                self.judged_step()
            if mix.chance(1, 12) and self.unfinished:
                self.abort(list(self.unfinished.values())[mix.below(len(self.unfinished))])
        self.work()
        if not self.rig.judge.counts.get("resumes"):
            self._resume_one()
        self.reset()

    def _resume_one(self) -> None:
        """Retract one of two small requests: a window pool may never hold two drawn ones."""
        for _ in range(2):
            self.add(self.generator.unshared(SHORT, FEW, 0))
        self.must_retract = True
        for _ in range(2 * SHORT):  # each comes in chunks, and then one step decodes both
            if not self.rig.judge.counts.get("retractions"):
                self.judged_step()
        self.must_retract = None
        self.work()

    def require_rows_while_one_waits(self) -> None:
        """Raises CannotDrive if the owner of a row is unclear with one request in chunks and one retracted."""
        self.add(self.generator.unshared(SHORT, FEW, 0))
        self.must_retract = True
        for _ in range(SHORT):
            self.step()
            is_idle = any(each.preemptions for each in self.waiting)
            self.require_rows("with a request retracted and idle" if is_idle else "after a request came in chunks")
            if is_idle:
                return
        raise CannotDrive("no request was retracted although the scheduler asked for it")

    def work(self) -> None:
        finish_requests(self.rig, self.unfinished, self.judged_step, STEPS)

    def judged_step(self) -> None:
        """Raises Stop after a finding."""
        self.step()
        self._settle("after a step")
        if self.rig.judge.findings:
            raise Stop  # later findings would be consequences of the first

    def reset(self) -> None:
        self.step()  # drops the batch that has finished
        self._settle("with all requests finished")
        if hasattr(self.tree, "sanity_check"):
            self.rig.measured(self.tree.sanity_check, "the engine's own check of an idle tree")
        for flush in (self.tree.reset, self.made.request_pool.clear, self.made.allocator.clear):
            self.rig.measured(flush, "flushing")
        self.prefixes.clear()
        self._settle("with the cache flushed")

    def matched(self, tracked: TrackedRequest, hit: int) -> None:
        request, size, judge = tracked.request, self.made.page_size, self.rig.judge
        self._lose()
        tokens = list(request.origin_input_ids) + list(request.output_ids)
        wanted = self.prefixes.hit(tokens) * size
        if hit > wanted or (self.must_hit_longest and hit != wanted):
            text = f"request {tracked.number} hits {hit} tokens; by the prefixes that were cached it is {wanted}"
            judge.find("KV301", "contract", text, request=tracked.number)
        judge.count("lookups")
        judge.count("pages_wanted", (len(tokens) - 1) // size)

    def computed(
        self, served: Sequence[TrackedRequest], starts: Sequence[int], ends: Sequence[int], is_extend: bool
    ) -> None:
        size, judge = self.made.page_size, self.rig.judge
        for tracked, start, end in zip(served, starts, ends, strict=True):
            tracked.table = self.table(tracked, end)
            if is_extend and tracked.is_waiting:
                judge.count("device_hit_pages", start // size)
                judge.count("resumes", int(tracked.preemptions > 0))
                self._judge_pages(tracked, start)
                tracked.is_waiting = False
            first = -(-start // size)
            for page in dict.fromkeys(each // size for each in tracked.table[first * size :]):
                judge.count("device_evictions", int(self.prefixes.hand_out(page)))
            self._write(tracked, start, end)
        for tracked, start, end in zip(served, starts, ends, strict=True):
            self._read(tracked, start, end, "is computed" if is_extend else "decodes")

    def published(self, tracked: TrackedRequest, end: int) -> None:
        size = self.made.page_size
        self._lose()
        table = [each // size for each in tracked.table[::size]]
        self.prefixes.register(tracked.tokens(end // size * size), table)
        self._lose()

    def _lose(self) -> None:
        for page in self.accounts.free():
            self.rig.judge.count("device_evictions", int(self.prefixes.hand_out(page)))

    def _judge_pages(self, tracked: TrackedRequest, hit: int) -> None:
        size = self.made.page_size
        for place in range(hit // size):
            page = tracked.table[place * size] // size
            if not self.prefixes.holds(tracked.tokens((place + 1) * size), page):
                text = f"request {tracked.number} hits page {page} at place {place}, which stands for another prefix"
                self.rig.judge.find("KV102", "contract", text, page=page, request=tracked.number)

    def _write(self, tracked: TrackedRequest, start: int, end: int) -> None:
        for first, stop, author in tracked.author_runs(start, end):
            for unit, ids in self._units(tracked, first, stop):
                self.made.writer.write(author, unit, ids, first)

    def _read(self, tracked: TrackedRequest, start: int, end: int, when: str) -> None:
        told = f"request {tracked.number} {when}"
        for first, stop, author in tracked.author_runs(0, end):
            for unit, ids in self._units(tracked, first, stop):
                skip = max(0, min(max(0, start - WINDOW) - first, len(ids))) if unit == "window" else 0
                self.made.writer.check(self.rig.judge, author, unit, ids[skip:], when=told, first=first + skip)
        if self.made.family == "mamba":
            self._step_state(tracked, start, end, told)

    def _units(self, tracked: TrackedRequest, first: int, stop: int) -> list[tuple[str, tuple[int, ...]]]:
        ids = tracked.table[first:stop]
        if self.made.family != "swa":
            return [("token", ids)]
        mapping = self.made.allocator.full_to_swa_index_mapping
        return [("token", ids), ("window", tuple(mapping[torch.tensor(ids, dtype=torch.int64)].tolist()))]

    def _step_state(self, tracked: TrackedRequest, start: int, end: int, when: str) -> None:
        slot = self._states().get(tracked.name)
        if slot is None:
            text = f"{when}: it holds no state"
            self.rig.judge.find("KV401", "accounting", text, request=tracked.number, lane="state")
            return
        if start:
            author = tracked.author_at(start - 1)
            self.made.writer.check(self.rig.judge, author, "state", (slot,), when=when, first=start - 1)
        self.made.writer.write(tracked.author_at(end - 1), "state", (slot,), end - 1)

    def _states(self) -> dict[str, int]:
        slots = {tracked.name: state_of(tracked.request) for tracked in self.unfinished.values()}
        return {name: slot for name, slot in slots.items() if slot is not None}

    def _make_request(self, tracked: TrackedRequest) -> Any:
        made = partial(make_request, self.rig, tracked.name, tokens_of(tracked.spans), tracked.outputs)
        return self.rig.measured(made, "making a request")

    def _settle(self, when: str) -> None:
        self.accounts.check({tracked.name: tracked.table for tracked in self.held}, self._states(), when)
        for tracked in self.unfinished.values():
            tracked.is_waiting |= tracked in self.waiting


def _page_size(rig: Rig) -> int:
    return 1 if rig.subject.endswith("mamba") else (1, PAGED)[rig.schedule % 2]


assert LENGTH > 2 * LONGEST
