"""Sends one request, whole or as a stream that is timed or aborted, for every engine.

Invariants:
- Prompt log-probabilities are never requested: engines read no prefix cache for such a request.
- A malformed line is skipped: a hidden counter is no evidence.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvcheck.core.live.clients.client import Reach, Trouble
from kvcheck.core.live.clients.reading import PartialAnswer, Unreadable, table
from kvcheck.core.live.exchange import AbortRequest, Answer, Counters, End
from kvcheck.core.live.http import CallFailed, Http, error_text, one_line

GRACE_S = 10.0
"""Tokens that arrive within this time after an abort was acknowledged may have been made before it: vLLM 0.32.0 had
made a whole answer of 169 tokens while a busy client had read 81 of them."""
_OWN_FAULT = 500  # from this status on the fault is the server's own
_HEALTH_S = 30.0  # engines that generate a token for it give up by themselves after 20 s
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\]|\\.)*"'
_LABELS = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\s*\{{((?:\s*{_LABEL}\s*,?)*)\s*\}})?\s+(\S+)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}
_NO_COUNTERS = ("_bucket", "_created")
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """streamed: the body for a stream. take: adds an answer or event to the reply; raises Unreadable."""

    server: Http
    path: str
    body: Mapping[str, object]
    streamed: Mapping[str, object]
    take: Callable[[Mapping[str, object], PartialAnswer], None]
    abort: Callable[[], object] | None = None


def converse(
    call: CompletionCall,
    abort: AbortRequest | None,
    reply: PartialAnswer,
    *,
    is_timed: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    began_s = clock()
    after_abort = None
    try:
        if abort is None and is_timed:
            end, reason = _timed(call, reply, clock)
        elif abort is None:
            _take(call, call.server.post_json(call.path, call.body), reply)
            end, reason = _end(reply)
        elif abort.by_call:
            end, reason, after_abort = _aborted_by_call(call, abort.after, reply)
        else:
            end, reason = _aborted_by_closing(call, abort.after, reply)
    except CallFailed as failure:
        end, reason = failure.end, failure.reason
    except Unreadable as error:
        end, reason = End.UNREADABLE, f"POST {call.path}: {call.server.shown(str(error))}"
    return Answer(
        end=end,
        tokens=tuple(reply.tokens),
        logprobs=reply.known_logprobs(),
        top=reply.known_top(),
        cached=reply.cached,
        cached_by=reply.cached_by,
        retractions=reply.retractions,
        prompt_tokens=reply.prompt_tokens,
        finish=reply.finish,
        rid=reply.rid,
        after_abort=after_abort,
        reason=reason,
        began_s=began_s,
        ended_s=clock(),
        first_s=reply.first_s,
        last_s=reply.last_s,
        first_tokens=reply.first_tokens,
    )


def _take(call: CompletionCall, value: object, reply: PartialAnswer) -> None:
    event = table(value, "answer")
    if event.get("error") is not None:
        reply.error = call.server.shown(error_text(event))
    else:
        call.take(event, reply)


def _end(reply: PartialAnswer) -> tuple[End, str | None]:
    if reply.error is not None:
        return End.REFUSED, reply.error
    return (End.ABORTED, "the engine says that it aborted the request") if reply.is_aborted else (End.DONE, None)


def _end_of_stream(reply: PartialAnswer) -> tuple[End, str | None]:
    if reply.error is None and not reply.is_aborted and reply.finish is None:
        return End.CUT, "the stream ended without a reason for its end"
    return _end(reply)


def _timed(call: CompletionCall, reply: PartialAnswer, clock: Callable[[], float]) -> tuple[End, str | None]:
    """Events that were read together have one time: a proxy may hold a stream back and release it at once."""
    read, now_s = 0, 0.0
    with call.server.stream(call.path, call.streamed) as events:
        for event in events:
            if events.reads != read:
                read, now_s = events.reads, clock()
            before = len(reply.tokens)
            _take(call, event, reply)
            reply.note_time(before, now_s)
    return _end_of_stream(reply)


def _aborted_by_closing(call: CompletionCall, after: int, reply: PartialAnswer) -> tuple[End, str | None]:
    """Close the connection after `after` tokens; 0: once the answer has begun."""
    with call.server.stream(call.path, call.streamed) as events:
        if after > 0:
            for event in events:
                _take(call, event, reply)
                if len(reply.tokens) >= after and reply.finish is None and reply.error is None:
                    return End.ABORTED, None
            return _end_of_stream(reply)
    return End.ABORTED, None


def _aborted_by_call(call: CompletionCall, after: int, reply: PartialAnswer) -> tuple[End, str | None, int | None]:
    """The last value: tokens that arrived more than GRACE_S after the acknowledgement."""
    acknowledged, failed = list[float](), list[str]()

    def send() -> None:
        try:
            if call.abort is None:
                raise Trouble("the engine has no call that aborts a request")
            call.abort()
            acknowledged.append(time.monotonic())
        except (CallFailed, Trouble) as failure:
            failed.append(f"not aborted: {failure}")

    sender = threading.Thread(target=send, daemon=True)
    late = 0
    try:
        with call.server.stream(call.path, call.streamed) as events:
            if after <= 0:
                sender.start()
            for event in events:
                is_late = bool(acknowledged) and time.monotonic() - acknowledged[0] >= GRACE_S
                before = len(reply.tokens)
                _take(call, event, reply)
                late += len(reply.tokens) - before if is_late else 0
                if sender.ident is None and len(reply.tokens) >= after and reply.finish is None:
                    sender.start()
        end, reason = _end_of_stream(reply)
    except CallFailed as failure:
        end, reason = failure.end, failure.reason
    if sender.ident is not None:
        sender.join()
    if acknowledged and reply.finish is None and end in (End.CUT, End.REFUSED):
        end = End.ABORTED
    return end, "; ".join(filter(None, [reason, *failed])) or None, late if acknowledged else None


def troubled(call: Callable[[], object]) -> object:
    try:
        return call()
    except (CallFailed, Unreadable) as error:
        raise Trouble(one_line(str(error), 400)) from error


def read_or_none(server: Http, *paths: str) -> Mapping[str, object] | None:
    """The JSON object at the first of the paths that has one. Raises CallFailed if the server cannot be reached."""
    for path in paths:
        try:
            value = server.get_json(path)
        except CallFailed as failure:
            if failure.end not in (End.REFUSED, End.UNREADABLE):
                raise
            continue
        if isinstance(value, dict):
            return value
    return None


def is_well(server: Http, path: str) -> bool:
    """A status below 500 counts: a proxy may lack the health call, or need another key."""
    try:
        server.call("GET", path, silence_s=min(server.silence_s, _HEALTH_S))
    except CallFailed as failure:
        return failure.status is not None and failure.status < _OWN_FAULT
    return True


def read_metrics(server: Http) -> str | None:
    path = "" if server.address.base.endswith("/metrics") else "/metrics"
    try:
        return server.get_text(path)
    except CallFailed as failure:
        if failure.status in (404, 405, 501):
            return None
        raise


def read_counters(reach: Reach, names: Iterable[str] = ()) -> Counters | None:
    """Sum over all metrics addresses, or the server. Raises Trouble. names: those with a label are summed as well."""
    labelled = [name for name in names if "{" in name]
    total: dict[str, float] = {}
    texts = []
    for server in reach.metrics or (reach.server,):
        try:
            text = read_metrics(server)
        except CallFailed as failure:
            raise Trouble(one_line(f"{server.address}: {failure}", 400)) from failure
        if text is None and reach.metrics:
            raise Trouble(f"{server.address} has no metrics")
        if text is not None:
            texts.append(text)
    for text in texts:
        sums = counters(parse_samples(text), labelled)
        if not sums and text.strip() and not text.lstrip().startswith("#"):
            raise Trouble(f"what the metrics address shows is no text for Prometheus: {one_line(text, 80)!r}")
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value
    return total if texts else None


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def parse_samples(text: str) -> Iterator[Sample]:
    for line in text.split("\n"):
        if line.startswith("#") or len(line) > _LONGEST_LINE or not (match := _SAMPLE.match(line.strip())):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = {name: _plain(written) for name, written in _LABELS.findall(match[2] or "")}
        yield Sample(match[1], labels, value)


def counters(samples: Iterable[Sample], labelled: Iterable[str] = ()) -> dict[str, float]:
    """Metric -> sum over its labels. labelled: further sums, as `name{label="value"}` with one label."""
    wanted: dict[tuple[str, str, str], str] = {}
    for row in labelled:
        match = _SAMPLE.match(f"{row} 0")
        pairs = _LABELS.findall(match[2] or "") if match else []
        assert match and len(pairs) == 1, f"{row} is no metric with one label"
        wanted[match[1], pairs[0][0], pairs[0][1]] = row
    sums: dict[str, float] = {}
    for sample in samples:
        if not math.isfinite(sample.value) or sample.name.endswith(_NO_COUNTERS):
            continue
        rows = [wanted[sample.name, *pair] for pair in sample.labels.items() if (sample.name, *pair) in wanted]
        for name in (sample.name, *rows):
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def _plain(written: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPED.get(match[1], match[0]), written)
