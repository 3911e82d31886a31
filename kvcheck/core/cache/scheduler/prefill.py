"""PrefillScheduler: computes prompts chunk by chunk and sends each while the next is computed.

Invariants:
- Pages and slot stay allocated until every decode rank has verified the bytes, or no read of them is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.base.paging import pages_for
from kvcheck.core.cache.backend.backend import Backend, Signal
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.scheduler.decoder import Chunk, Decoder
from kvcheck.core.cache.scheduler.parts import take_slot_and_row
from kvcheck.core.cache.scheduler.request import Request, SchedulerConfig, StepReport
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.sender import FAILED, PENDING, REFUSED, WANTED, Sender

ABORTED = "aborted by the prefill end"


@dataclass(slots=True, kw_only=True)
class PrefillRequest:
    """A prompt that is computed or sent. holding, slot: None if it failed before it began."""

    request: Request
    holding: Holding | None = None
    slot: int | None = None
    is_told: bool = False

    @property
    def tokens(self) -> int:
        return len(self.request.prompt)


# waiting -> Want of every decode rank -> computed and sent, chunk by chunk -> sealed -> DONE or FAILED -> freed
class PrefillScheduler:
    def __init__(
        self,
        pool: KVPool,
        metadata: MetadataBuffers,
        decoder: Decoder,
        sender: Sender,
        backend: Backend,
        config: SchedulerConfig,
        *,
        room_of: Callable[[int], int],
    ) -> None:
        self._pool = pool
        self._metadata = metadata
        self._decoder = decoder
        self.sender = sender
        self._backend = backend
        self._config = config
        self._room_of = room_of
        self._queued: deque[Request] = deque()  # an earlier attempt of the first one is not over
        self._refused: list[tuple[int, str]] = []
        self._waiting: deque[Request] = deque()
        self._computing: list[PrefillRequest] = []
        self._sending: list[PrefillRequest] = []
        self._report = StepReport()

    @property
    def is_idle(self) -> bool:
        return not (self._queued or self._waiting or self._computing or self._sending or self._refused)

    def submit(self, request: Request) -> None:
        """Raise LengthMismatch for a prompt that can never fit."""
        tokens = len(request.prompt)
        if tokens > self._pool.sizes.max_tokens or pages_for(tokens, self._pool.page_size) > self._pool.sizes.pages:
            raise LengthMismatch(
                f"request {request.request_id}: a prompt of {tokens} tokens does not fit into {self._pool.sizes.pages} "
                f"pages of {self._pool.page_size} and requests of at most {self._pool.sizes.max_tokens} tokens"
            )
        self._queued.append(request)
        self._open_queued()

    def abort(self, request_id: int) -> bool:
        """End a request; False if it is not here, was reported, or has failed here already: the other end may have
        received its prompt before."""
        for request in [each for each in self._queued if each.request_id == request_id]:
            self._queued.remove(request)
            self.sender.refuse(self._room_of(request_id), request.attempt, ABORTED)
            self._refused.append((request_id, ABORTED))
            return True
        here = [*self._waiting, *(each.request for each in (*self._computing, *self._sending))]
        if all(each.request_id != request_id for each in here):
            return False
        room = self._room_of(request_id)
        if self.sender.reason(room):
            return False
        self.sender.fail(room, ABORTED)
        return bool(self.sender.reason(room))

    def states(self) -> dict[int, str]:
        states = {each.request_id: "waiting" for each in (*self._queued, *self._waiting)}
        states |= {each.request.request_id: "prefilling" for each in self._computing}
        return states | {each.request.request_id: self._sending_state(each) for each in self._sending}

    def deadline(self, request_id: int) -> int | None:
        return self.sender.deadline(self._room_of(request_id))

    def _sending_state(self, prompt: PrefillRequest) -> str:
        return "draining" if self.sender.reason(self._room(prompt)) else "transferring"

    def poll(self) -> list[int]:
        """Receive, and return this rank's values for `RankGroup.agree`."""
        self.sender.poll()
        waiting = [self.sender.readiness(self._room_of(each.request_id)) for each in self._waiting]
        computing = [self.sender.readiness(self._room(each)) for each in self._computing]
        return waiting + computing + [self.sender.state(self._room(each)) for each in self._sending]

    def settle(self, agreed: Sequence[int]) -> StepReport:
        self._report = StepReport(failed=self._refused)
        self._refused = []
        values = iter(agreed)
        waiting = list(zip(list(self._waiting), values, strict=False))
        computing = list(zip(list(self._computing), values, strict=False))
        for prompt, state in zip(list(self._sending), values, strict=True):
            if state != PENDING:
                self._tell(prompt, has_failed=state == FAILED)
                self._give_back(prompt)
        self._open_queued()
        for prompt, readiness in computing:
            if readiness == REFUSED:
                self._computing.remove(prompt)
                self._fail(prompt)
        for request, readiness in waiting:
            if readiness == REFUSED:
                self._waiting.remove(request)
                self._fail(PrefillRequest(request=request))
            elif readiness == WANTED:
                self._admit(request)
        self._compute()
        return self._report

    def close(self) -> None:
        self._backend.drain()
        self.sender.free()
        self._metadata.free()
        self._pool.free()

    def _open_queued(self) -> None:
        """Open rooms in order of arrival, each once its earlier attempt is closed."""
        while self._queued and not self.sender.is_open(self._room_of(self._queued[0].request_id)):
            request = self._queued.popleft()
            room = self._room_of(request.request_id)
            self.sender.open(room, request.request_id, len(request.prompt), attempt=request.attempt)
            self._waiting.append(request)

    def _room(self, prompt: PrefillRequest) -> int:
        return self._room_of(prompt.request.request_id)

    def _fail(self, prompt: PrefillRequest) -> None:
        self.sender.fail(self._room(prompt), "another prefill rank failed")
        self._tell(prompt, has_failed=True)
        self._sending.append(prompt)

    def _tell(self, prompt: PrefillRequest, *, has_failed: bool) -> None:
        if has_failed and not prompt.is_told:
            prompt.is_told = True
            self._report.failed.append((prompt.request.request_id, self.sender.reason(self._room(prompt))))

    def _give_back(self, prompt: PrefillRequest) -> None:
        self._sending.remove(prompt)
        self.sender.close(self._room(prompt))
        if prompt.holding is not None and prompt.slot is not None:
            self._metadata.release(prompt.slot, prompt.request.request_id)
            self._pool.close(prompt.holding)

    def _admit(self, request: Request) -> None:
        size = self._pool.page_size
        reserved = sum(
            pages_for(each.tokens, size) - len(each.holding.pages)
            for each in self._computing
            if each.holding is not None
        )
        if self._pool.pages_free - reserved < pages_for(len(request.prompt), size):
            return
        taken = take_slot_and_row(self._metadata, self._pool, request.request_id)
        if taken is None:
            return
        slot, holding = taken
        self._waiting.remove(request)
        self._computing.append(PrefillRequest(request=request, holding=holding, slot=slot))
        self.sender.begin(self._room_of(request.request_id), holding)
        self._report.admitted.append(request.request_id)

    def _compute(self) -> None:
        chunks: list[Chunk] = []
        prompts: list[PrefillRequest] = []
        for prompt in self._computing:
            assert prompt.holding is not None
            start = prompt.holding.committed
            stop = min(prompt.tokens, start + self._config.chunk_tokens)
            if self._pool.grow(prompt.holding, stop, query=start):
                chunks.append(Chunk(prompt.request.request_id, prompt.holding, start, stop))
                prompts.append(prompt)
        if not chunks:
            return
        done = self._decoder.forward(chunks)
        for chunk, prompt in zip(chunks, prompts, strict=True):
            self._pool.commit(chunk.holding, chunk.stop)
            self.sender.send_pages(self._room(prompt), chunk.stop, done)
        self._backend.wait(done)
        for chunk in chunks:
            self._pool.evict_window(chunk.holding, chunk.stop)
        self._decoder.collect()
        for prompt in prompts:
            if prompt.holding is not None and prompt.holding.committed == prompt.tokens:
                self._hand_over(prompt, done)

    def _hand_over(self, prompt: PrefillRequest, done: Signal) -> None:
        assert prompt.slot is not None
        request_id = prompt.request.request_id
        written = self._metadata.set(prompt.slot, request_id, self._decoder.metadata(request_id))
        self.sender.finish(self._room(prompt), prompt.slot, (done, written))
        self._computing.remove(prompt)
        self._sending.append(prompt)
        self._report.joined.append(request_id)
