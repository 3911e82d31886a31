"""One engine: prefix match, chunked prefill, decode, retract, resume, finish.

Invariants:
- Pages of a retracted request are freed only after its save has completed.
- Once a retracted request has rested, nothing new is admitted before it is resumed.
- At least one running request survives a retraction, so the batch always advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kvcheck.core.base.errors import Hang, LengthMismatch
from kvcheck.core.base.paging import floor_to_page, pages_for
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.offload import OffloadedKV
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.scheduler.parts import SchedulerDeps
from kvcheck.core.cache.scheduler.request import Request, RunningRequest, SchedulerConfig, StepReport


# waiting -> prefilling -> ready -> running -> finished
#                                    ^    |
#                           resume   |    v  save, free
#                                   retracted
class Scheduler:
    def __init__(self, parts: SchedulerDeps, config: SchedulerConfig) -> None:
        self.parts = parts
        self.config = config
        self._pool = parts.pool
        self._waiting: deque[Request] = deque()
        self._prefilling: list[RunningRequest] = []
        self._ready: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._retracted: deque[RunningRequest] = deque()
        self._restoring: list[tuple[Signal, OffloadedKV]] = []
        self._report = StepReport()
        self._round = 0

    def submit(self, request: Request) -> None:
        """Queue a request, behind all others or, if it is urgent, behind the urgent ones. Raise LengthMismatch if it
        can never fit."""
        longest = len(request.prompt) + request.output_tokens
        if longest > self._pool.sizes.max_tokens or pages_for(longest, self._pool.page_size) > self._pool.sizes.pages:
            raise LengthMismatch(
                f"request {request.request_id} needs {longest} tokens; the pool holds {self._pool.sizes.pages} pages "
                f"of {self._pool.page_size} and requests of at most {self._pool.sizes.max_tokens} tokens"
            )
        ahead = sum(each.is_urgent for each in self._waiting) if request.is_urgent else len(self._waiting)
        self._waiting.insert(ahead, request)

    @property
    def is_idle(self) -> bool:
        busy = (self._waiting, self._prefilling, self._ready, self._running, self._retracted)
        return not any(busy) and not self._restoring

    def step(self) -> StepReport:
        self._round += 1
        if self.parts.cache is not None:
            self.parts.cache.poll()
        self._drop_restored()
        self._ready.extend(self._arrived())
        self._resume()
        self._admit()
        computed = self._prefill()
        self._join_ready()
        computed = self._decode() or computed
        if not computed:
            self._wait_for_something()
        report, self._report = self._report, StepReport()  # acts between two rounds are reported with the next
        return report

    def abort(self, request_id: int) -> bool:
        """End a request in any state; False if it is not here."""
        waiting = [each for each in self._waiting if each.request_id == request_id]
        under_way = (self._prefilling, self._ready, self._running, self._retracted)
        actives = [active for queue in under_way for active in queue if active.request_id == request_id]
        if waiting and self.parts.cache is not None:
            self.parts.cache.forget(request_id)
        for request in waiting:
            self._waiting.remove(request)
        for active in actives:
            self._abort(active)
        return bool(waiting or actives)

    def preempt(self, request_id: int) -> bool:
        active = next((each for each in self._running if each.request_id == request_id), None)
        if active is None:
            return False
        self._retract(active)
        return True

    def states(self) -> dict[int, str]:
        """State of each request, by the names of base/situations.py, in queue order."""
        states = {each.request_id: self._waiting_state(each) for each in self._waiting}
        states |= {each.request_id: self._prefilling_state(each) for each in self._prefilling}
        states |= {each.request_id: "ready" for each in self._ready}
        kept = {offloaded.request for _, offloaded in self._restoring}
        states |= {each.request_id: "restoring" if each.request_id in kept else "running" for each in self._running}
        return states | {each.request_id: "retracted" for each in self._retracted}

    def _waiting_state(self, request: Request) -> str:
        cache = self.parts.cache
        return "fetching" if cache is not None and cache.is_fetching(request.request_id) else "waiting"

    def _prefilling_state(self, active: RunningRequest) -> str:
        is_loading = active.lease is not None and any(not each.acknowledged for each in active.lease.loads)
        return "loading" if is_loading and not active.output else "prefilling"

    def _abort(self, active: RunningRequest) -> None:
        self._unqueue(active)
        if active.lease is not None and self.parts.cache is not None:
            self.parts.cache.release(active.lease)
        if active.offloaded is not None:
            self.parts.offload.discard(active.offloaded)
        else:
            self._pool.close(active.holding)

    def _unqueue(self, active: RunningRequest) -> None:
        """Remove the request from its queue. (mutant: abort-leaves-ready)"""
        for queue in (self._prefilling, self._ready, self._running, self._retracted):
            if active in queue:
                queue.remove(active)

    def close(self) -> None:
        self.parts.backend.drain()
        self._drop_restored()
        if self.parts.cache is not None:
            self.parts.cache.close()
        self._pool.free()

    # Admission and prefill

    def _admit(self) -> None:
        cache = self.parts.cache
        for request in list(self._waiting):
            if self._resume_is_due() or len(self._prefilling) >= self.config.max_prefilling:
                break
            if cache is not None and cache.must_defer(request.prompt[:-1]):
                continue  # its load could not start; those that need none go on
            if self._awaits_store(request):
                if self._fetching() >= self.config.max_prefilling:
                    break
                continue  # it keeps its place; requests that need no store go on
            in_flight = len(self._prefilling) + len(self._ready) + len(self._running)
            if in_flight >= self._pool.sizes.requests or not self._fits(len(request.prompt)):
                break
            holding = self._pool.open(request.request_id)
            if holding is None:
                break
            active = RunningRequest(request=request, holding=holding, lease=None)
            if cache is not None:
                # The last prompt token is always computed: its pass samples the first output.
                active.lease = cache.admit(request.prompt[:-1], holding, priority=request.priority)
                # A load runs beside this round's passes; the request's first pass comes with the next.
                active.starts_at = self._round + bool(active.lease.loads)
                self._report.loading += [active.request_id] if active.lease.loads else []
            self._waiting.remove(request)
            self._prefilling.append(active)
            self._report.admitted.append(request.request_id)
        if cache is not None:
            cache.start_loads()

    def _awaits_store(self, request: Request) -> bool:
        cache = self.parts.cache
        return cache is not None and not (request.is_urgent or cache.fetch(request.prompt[:-1], request.request_id))

    def _fetching(self) -> int:
        cache = self.parts.cache
        return 0 if cache is None else sum(cache.is_fetching(each.request_id) for each in self._waiting)

    def _fits(self, prompt: int) -> bool:
        return self._room() - self._reserved() >= pages_for(prompt + 1, self._pool.page_size)

    def _room(self) -> int:
        """Pages that are free or evictable, in the scarcest paged space."""
        cache = self.parts.cache
        return min(
            self._pool.allocators[space].available + (cache.evictable(space) if cache is not None else 0)
            for space in self._pool.paged
        )

    def _reserved(self) -> int:
        size = self._pool.page_size
        return sum(pages_for(a.prompt_length + 1, size) - len(a.holding.pages) for a in self._prefilling)

    def _prefill(self) -> bool:
        chunks: list[Chunk] = []
        actives: list[RunningRequest] = []
        for active in list(self._prefilling):
            if not self._may_start(active):
                continue
            start = active.holding.committed
            stop = min(active.prompt_length, start + self.config.chunk_tokens)
            if self._make_room(active, stop, query=start):
                chunks.append(Chunk(active.request_id, active.holding, start, stop))
                actives.append(active)
        # The tree takes pages that are being computed: their readers come behind this pass on its lane.
        for active, token in zip(actives, self._forward(chunks, actives, keep=True), strict=True):
            if active.holding.committed < active.prompt_length:
                continue
            self._prefilling.remove(active)
            active.output.append(token)
            self._ready.append(active)
        return bool(chunks)

    def _may_start(self, active: RunningRequest) -> bool:
        if active.lease is None or self.parts.cache is None:
            return True
        is_due = active.starts_at <= self._round or not self._running
        return is_due and self.parts.cache.is_loaded(active.lease)

    def _cache_prompt(self, active: RunningRequest) -> None:
        """Insert the prompt's whole pages: when all are computed, or at each available state."""
        cache, committed = self.parts.cache, active.holding.committed
        if cache is None or active.lease is None:
            return
        whole = floor_to_page(committed, self._pool.page_size)
        if committed == active.prompt_length if not self._pool.has_state else committed == whole:
            cache.keep(active.lease, active.request.prompt[:whole])

    # Decode

    def _arrived(self) -> list[RunningRequest]:
        return []

    def _join_ready(self) -> None:
        while self._ready and len(self._running) < self.config.max_running:
            active = self._ready.popleft()
            self._join(active)

    def _join(self, active: RunningRequest) -> None:
        if active.metadata is not None:
            self.parts.decoder.join(active.request_id, active.metadata)
        self._report.joined.append(active.request_id)
        if len(active.output) >= active.request.output_tokens:
            self._finish(active)
        else:
            self._running.append(active)

    def _decode(self) -> bool:
        for active in list(self._running):
            if active in self._running:
                start = active.holding.committed
                self._make_room(active, start + 1, query=start)
        batch = [a for a in self._running if len(a.holding.pages) * self._pool.page_size > a.holding.committed]
        chunks = [Chunk(a.request_id, a.holding, a.holding.committed, a.holding.committed + 1) for a in batch]
        for active, token in zip(batch, self._forward(chunks, batch), strict=True):
            active.output.append(token)
            if len(active.output) >= active.request.output_tokens:
                self._running.remove(active)
                self._finish(active)
        return bool(chunks)

    def _forward(
        self, chunks: Sequence[Chunk], actives: Sequence[RunningRequest], *, keep: bool = False
    ) -> tuple[int, ...]:
        """Run one pass and commit its positions. keep: cache prompts while it runs."""
        if not chunks:
            return ()
        if self.parts.cache is not None:
            self.parts.cache.prepare(active.lease for active in actives if active.lease is not None)
        done = self.parts.decoder.forward(chunks)
        for chunk in chunks:
            self._pool.commit(chunk.holding, chunk.stop)
        for active in actives if keep else ():
            self._cache_prompt(active)
        self.parts.backend.wait(done)
        for chunk in chunks:
            self._pool.evict_window(chunk.holding, chunk.stop)
        return self.parts.decoder.collect()

    def _finish(self, active: RunningRequest) -> None:
        given = None
        if self.parts.cache is not None and active.lease is not None:
            tokens = active.committed_tokens()
            whole = floor_to_page(len(tokens), self._pool.page_size)
            given = self.parts.cache.finish(active.lease, tokens[:whole])
        self._pool.close(active.holding, given=given)
        self._report.finished.append((active.request_id, tuple(active.output)))

    # Room: evict, retract, resume

    def _make_room(self, active: RunningRequest, tokens: int, *, query: int) -> bool:
        """Grow a request: evict cached prefixes first, then retract others."""
        while not self._pool.grow(active.holding, tokens, query=query):
            short = self._pool.pages_short(active.holding, tokens, query=query)
            if self._evict(short):
                continue
            if self.parts.cache is not None and self.parts.cache.wait_oldest():
                continue  # its pages may be evictable now
            victim = self._victim(spared=active)
            if victim is None:
                if not self._will_free:
                    raise Hang(
                        f"request {active.request_id} is short of {_in_words(short)}, and nothing is left to evict or "
                        "retract"
                    )
                return False
            self._retract(victim)
            while self._pool.pages_free < self._headroom() and (victim := self._victim(spared=active)) is not None:
                self._retract(victim)
        return True

    @property
    def _will_free(self) -> bool:
        return bool(self._prefilling or self._ready or self._restoring)

    def _evict(self, short: Mapping[str, int]) -> int:
        cache = self.parts.cache
        return 0 if cache is None else sum(cache.evict(space, count) for space, count in short.items())

    def _headroom(self) -> int:
        size, steps = self._pool.page_size, self.config.retract_steps
        return sum(max(0, pages_for(a.holding.committed + steps, size) - len(a.holding.pages)) for a in self._running)

    def _victim(self, *, spared: RunningRequest) -> RunningRequest | None:
        candidates = [a for a in self._running if a is not spared]
        if not candidates:
            return None
        return min(candidates, key=lambda a: (len(a.output), -a.prompt_length, -a.request_id))

    def _retract(self, active: RunningRequest) -> None:
        self._running.remove(active)
        active.offloaded = self.parts.offload.save(active.holding)
        self.parts.backend.wait(active.offloaded.saved)
        if self.parts.cache is not None and active.lease is not None:
            self.parts.cache.drop(active.lease)
        self._pool.close(active.holding)
        active.rested_at = self._round + self.config.resume_delay
        self._retracted.append(active)
        self._report.retracted.append(active.request_id)

    def _resume(self) -> None:
        while self._resume_is_due() and len(self._running) < self.config.max_running:
            active = self._retracted[0]
            offloaded = active.offloaded
            assert offloaded is not None
            tokens = self._resumed_length(offloaded)
            if not self._resume_fits(tokens):
                return
            holding = self._pool.open(active.request_id)
            if holding is None:
                return
            if not self._pool.grow(holding, tokens + 1, query=offloaded.tokens):
                self._pool.close(holding)
                return
            self._retracted.popleft()
            active.holding = holding
            if active.lease is not None:
                active.lease.holding = holding
            restored = self.parts.offload.restore(offloaded, holding)
            self._pool.commit(holding, tokens)
            self.parts.backend.wait(restored, lane=self._pool.forward)
            self._restoring.append((restored, offloaded))
            active.offloaded = None
            self._report.resumed.append(active.request_id)
            self._join(active)

    def _resume_is_due(self) -> bool:
        return bool(self._retracted) and self._retracted[0].rested_at <= self._round

    def _resumed_length(self, offloaded: OffloadedKV) -> int:
        """Committed tokens of a resumed request: those saved. (mutant: resume-refeeds-token)"""
        return offloaded.tokens

    def _resume_fits(self, tokens: int) -> bool:
        """True if the request and a page for each running one fit, so that it is not retracted at once."""
        needed = pages_for(tokens + 1, self._pool.page_size) + len(self._running)
        spare = self._pool.pages_free - self._reserved()
        if spare < needed:
            self._evict(dict.fromkeys(self._pool.paged, needed - spare))
            spare = self._pool.pages_free - self._reserved()
        idle = not (self._running or self._prefilling or self._ready)
        return spare >= needed or (idle and self._pool.pages_free >= pages_for(tokens + 1, self._pool.page_size))

    def _wait_for_something(self) -> None:
        if self._restoring:
            self.parts.backend.wait(self._restoring[0][0])
        elif self.parts.cache is not None:
            self.parts.cache.wait_oldest()

    def _drop_restored(self) -> None:
        kept: list[tuple[Signal, OffloadedKV]] = []
        for restored, offloaded in self._restoring:
            if self.parts.backend.query(restored):
                self.parts.offload.discard(offloaded)
            else:
                kept.append((restored, offloaded))
        self._restoring = kept


def _in_words(short: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {space} pages" for space, count in short.items())
