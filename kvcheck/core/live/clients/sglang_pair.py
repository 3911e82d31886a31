"""A prefill and a decode server of SGLang, without a router.

Invariants:
- Cached counts are the prefill server's, which computes the prompt; the rest of the answer is the decode server's.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

from kvcheck.core.live.clients.asking import CompletionCall, converse
from kvcheck.core.live.clients.client import Reach, Trouble
from kvcheck.core.live.clients.reading import PartialAnswer
from kvcheck.core.live.clients.sglang import SglangClient
from kvcheck.core.live.exchange import Answer, Counters, End, Sending, Served
from kvcheck.core.live.http import CallFailed


class SglangPair:
    """The two servers as one. Retraction is forced at the decode server; both are flushed."""

    engine = "sglang"
    has_salts = True
    counted = SglangClient.counted
    computed = SglangClient.computed
    said = SglangClient.said
    flags: Mapping[str, str] = {**SglangClient.flags, "transfer": "start both servers with --enable-metrics"}

    def __init__(self, *, prefill: Reach, decode: Reach) -> None:
        self._prefill, self._decode = SglangClient(prefill), SglangClient(decode)
        self._room: tuple[str, int] | None = None
        self._asking = threading.Lock()

    def served(self) -> Served:
        prefill, decode = self._prefill.served(), self._decode.served()
        for served, mode, reach in ((prefill, "prefill", self._prefill.reach), (decode, "decode", self._decode.reach)):
            if served.mode != mode:
                raise Trouble(
                    f"{reach.server.address} is no {mode} server; start SGLang there with --disaggregation-mode {mode}"
                )
        facts = {
            f"{half}.{name}": fact
            for half, each in (("prefill", prefill), ("decode", decode))
            for name, fact in each.facts.items()
        }
        longest = [each.longest for each in (prefill, decode) if each.longest is not None]
        return replace(
            decode,
            longest=min(longest, default=None),
            has_host_tier=_either(prefill.has_host_tier, decode.has_host_tier),
            has_storage=_either(prefill.has_storage, decode.has_storage),
            mode="pair",
            bootstrap=prefill.bootstrap,
            facts=facts | {"prefill.pool": prefill.pool, "prefill.page": prefill.page},
        )

    def ask(self, sending: Sending) -> Answer:
        try:
            host, port = self._bootstrap()
        except Trouble as trouble:
            return Answer(end=End.UNREACHED, reason=str(trouble))
        room = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(62)}
        at_prefill, at_decode = self._prefill.call_for(sending, room), self._decode.call_for(sending, room)

        def abort_both() -> None:
            for call in (at_decode, at_prefill):
                if call.abort is not None:
                    call.abort()

        prefilling: Future[Answer] = Future()
        threading.Thread(target=_prefill, args=(at_prefill, prefilling), daemon=True).start()
        answer = converse(
            replace(at_decode, abort=abort_both), sending.abort, PartialAnswer(), is_timed=sending.is_timed
        )
        if answer.end is not End.DONE and not prefilling.done() and at_prefill.abort is not None:
            try:
                at_prefill.abort()  # it may wait for a decode server that has given the request up
            except CallFailed as failure:
                answer = replace(
                    answer, reason=f"{answer.reason or answer.end.value}; at the prefill server: {failure}"
                )
        return _together(answer, prefilling.result())

    def counters(self) -> Counters | None:
        both = [each for each in (self._prefill.counters(), self._decode.counters()) if each is not None]
        names = {name for each in both for name in each}
        return {name: sum(each.get(name, 0.0) for each in both) for name in sorted(names)} if both else None

    def is_alive(self) -> bool:
        return self._prefill.is_alive() and self._decode.is_alive()

    def retract(self) -> None:
        self._decode.retract()

    def flush(self) -> None:
        self._prefill.flush()
        self._decode.flush()

    def _bootstrap(self) -> tuple[str, int]:
        with self._asking:
            if self._room is None:
                self._room = self._prefill.served().bootstrap
            if self._room is None:
                raise Trouble(f"{self._prefill.reach.server.address} names no bootstrap port; is it a prefill server?")
            return self._room


def _either(one: bool | None, other: bool | None) -> bool | None:
    """None, which is unknown, unless one has it or both lack it."""
    return True if one or other else None if None in (one, other) else False


def _prefill(call: CompletionCall, prefilling: Future[Answer]) -> None:
    try:
        prefilling.set_result(converse(call, None, PartialAnswer()))
    except OSError as error:
        prefilling.set_exception(error)


def _together(decoded: Answer, prefilled: Answer) -> Answer:
    retractions = [each.retractions for each in (decoded, prefilled) if each.retractions is not None]
    reason = decoded.reason
    # after an abort, the end of the prefill server's answer is no failure
    if decoded.end is not End.ABORTED and prefilled.end not in (End.DONE, End.ABORTED):
        failed = f"prefill server: {prefilled.end.value}: {prefilled.reason}"
        reason = failed if reason is None else f"{reason}; {failed}"
    says_more = prefilled.cached is not None
    return replace(
        decoded,
        cached=prefilled.cached if says_more else decoded.cached,
        cached_by=prefilled.cached_by if says_more else decoded.cached_by,
        retractions=sum(retractions) if retractions else None,
        reason=reason,
    )
