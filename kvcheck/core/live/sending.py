"""Sends a round to a server: waves of requests from threads, aborts, and retractions on demand.

Invariants:
- Requests are handed out in the round's order; their order of arrival is up to the machine.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcheck.core.live.clients.client import Trouble
from kvcheck.core.live.exchange import Answer, End, Exchange, Sending
from kvcheck.core.live.scenarios.scenario import Order, Round, Wave

POLL_S = 0.1
SHORTEST_GAP_S = 0.02
FORCED_CALL_S = 30.0
"""Time limit of a retraction call after the end of its wave."""


class Recipient(Protocol):
    """The receiver of a round: a `Client`, or an arm of requests to one."""

    def ask(self, sending: Sending) -> Answer:
        """Send a request and wait for its answer."""

    def retract(self) -> None:
        """Make the engine retract all running requests. Raises Trouble."""


@dataclass(slots=True)
class Delivery:
    """The exchanges of a round. forced: accepted retractions on demand; troubles: why others failed."""

    exchanges: list[Exchange] = field(default_factory=list)
    forced: int = 0
    troubles: list[str] = field(default_factory=list)
    is_whole: bool = True


class RequestSender:
    """gap_s: between retractions on demand; less than an answer takes, so that several hit it. until: time.monotonic()
    after which no request begins."""

    def __init__(
        self, client: Recipient, *, gap_s: float, may_force: bool, until: float | None = None, is_timed: bool = False
    ) -> None:
        self._client, self._may_force, self._until, self._is_timed = client, may_force, until, is_timed
        self._gap_s = max(gap_s, SHORTEST_GAP_S)
        self._running = 0
        self._lock = threading.Lock()
        self.interrupted = Delivery()

    def send(self, round_: Round, told: Callable[[int], None] = lambda answered: None) -> Delivery:
        """told: called with the number of answers so far. After KeyboardInterrupt, `interrupted` holds the answers."""
        sent = Delivery()
        self.interrupted = sent
        for wave in round_.waves:
            if self._is_over():
                sent.is_whole = False
                break
            self._send_wave(wave, sent, told)
        return sent

    def _send_wave(self, wave: Wave, sent: Delivery, told: Callable[[int], None]) -> None:
        """Threads are daemons, so that an interrupt does not wait for answers."""
        orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        for order in wave.orders:
            orders.put(order)
        results: queue.SimpleQueue[list[Exchange] | OSError] = queue.SimpleQueue()
        ended = threading.Event()
        left = len(wave.orders)
        self._threads(self._work, min(wave.concurrency, left), orders, ended, results)
        retractions = wave.retractions if self._may_force else 0
        forcer = threading.Thread(target=self._force, args=(retractions, ended, sent), daemon=True)
        forcer.start()
        try:
            while left:
                try:
                    result = results.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                if isinstance(result, OSError):
                    raise result
                left -= 1
                sent.exchanges += result
                sent.is_whole = sent.is_whole and bool(result)
                told(len(sent.exchanges))
        finally:
            ended.set()
            forcer.join(FORCED_CALL_S)  # a server that was paused for a retraction goes on before we leave

    def _threads(self, work: Callable[..., None], number: int, *arguments: object) -> None:
        for _ in range(number):
            threading.Thread(target=work, args=arguments, daemon=True).start()

    def _work(
        self,
        orders: queue.SimpleQueue[Order],
        ended: threading.Event,
        results: queue.SimpleQueue[list[Exchange] | OSError],
    ) -> None:
        while not ended.is_set():
            try:
                order = orders.get_nowait()
            except queue.Empty:
                return
            result: list[Exchange] | OSError = []
            try:
                result = self._one(order)
            except OSError as error:
                result = error
            finally:
                results.put(result)

    def _one(self, order: Order) -> list[Exchange]:
        if self._is_over():
            return []
        first = Sending(
            question=order.question, rid=new_rid(), priority=order.priority, abort=order.abort, is_timed=self._is_timed
        )
        exchanges = [Exchange(first, self._ask(first))]
        if order.retries and exchanges[0].answer.end is End.ABORTED and not self._is_over():
            second = Sending(question=order.question, rid=new_rid(), priority=order.priority)
            exchanges.append(Exchange(second, self._ask(second)))
        return exchanges

    def _ask(self, sending: Sending) -> Answer:
        with self._lock:
            self._running += 1
        try:
            return self._client.ask(sending)
        finally:
            with self._lock:
                self._running -= 1

    def _force(self, times: int, ended: threading.Event, sent: Delivery) -> None:
        while times > 0 and not ended.wait(self._gap_s):
            if self._running < 2:
                continue
            times -= 1
            try:
                self._client.retract()
                sent.forced += 1
            except Trouble as trouble:
                sent.troubles.append(str(trouble))

    def _is_over(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until


def typical_s(answers: Sequence[Answer]) -> float:
    spans = sorted(answer.ended_s - answer.began_s for answer in answers)
    return spans[len(spans) // 2] if spans else 0.0


def new_rid() -> str:
    return f"kvcheck-{secrets.token_hex(8)}"
