"""A server that speaks as SGLang or vLLM do and answers what a right one answers, with one fault if it is told so."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fakes.speech import KEY, SPEAKS
from rigs.model_engine import COUNTS, STORES, Job, ModelEngine
from rigs.wrong_answers import WRONG

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model.alphabet import Alphabet

BROKEN = ("hang", "hang-once", "dies", "some-500", "garbage", "half", "slow", "needs-key")
FAULTS = (*WRONG, *STORES, *BROKEN, *COUNTS, "front-cache", "frozen-counters", "after-abort")
KEYED = 24  # first tokens of a prompt by which the response cache in front of the engine knows it
TURN = 3  # the request that hangs or is the last one answered; or each third one fails


class Fake:
    """The server. As a context manager it serves in a thread. mode: of a pair. calls: (path, body) besides requests.
    first: the request from which on answers are garbage, or broken off.

    model: an engine to serve instead of one of known answers. Other options are those of ModelEngine.
    has_metrics: whether it shows counters. beside: other servers behind the same address, each answering in its turn;
    is_pinned: counters are those of the first one, not of whoever's turn it is. lag: counters lack the last request.
    traffic: requests of others between two readings of the counters.
    """

    def __init__(
        self,
        alphabet: Alphabet | None,
        engine: str = "sglang",
        *,
        model: ModelEngine | None = None,
        fault: str | None = None,
        mode: str = "null",
        first: int = 1,
        has_metrics: bool = True,
        beside: int = 0,
        is_pinned: bool = False,
        lag: bool = False,
        traffic: int = 0,
        **options: Any,
    ) -> None:
        assert fault in (None, *FAULTS), f"faults: {', '.join(FAULTS)}"
        self.fault, self.mode, self.first, self.is_dead = fault, mode, first, False
        assert model is not None or alphabet is not None
        self.model = model or ModelEngine(alphabet=alphabet, fault=fault, **options)
        self.speaks = SPEAKS[engine](self.model, mode)
        others = [ModelEngine(alphabet=alphabet, fault=fault, **options) for _ in range(beside)]
        self.turns = itertools.cycle([self.speaks, *(SPEAKS[engine](each, mode) for each in others)])
        self.has_metrics, self.is_pinned, self.lag, self.traffic, self.read = has_metrics, is_pinned, lag, traffic, 0
        self.stored: dict[tuple[int, ...], Job] = {}
        self.calls: list[tuple[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.http = type("Http", (ThreadingHTTPServer,), {"request_queue_size": 128})(
            ("127.0.0.1", 0), type("Bound", (Handler,), {"fake": self})
        )
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Fake:
        threading.Thread(target=self.http.serve_forever, args=(0.005,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def counted(self) -> str | None:
        if not self.has_metrics:
            return None
        speaks = self.speaks if self.is_pinned else next(self.turns)
        real, self.read = speaks.model.counters, self.read + 1
        said = {name: count + self.read * self.traffic for name, count in real().items()}
        if self.lag:
            said["requests"] -= 1
        speaks.model.counters = lambda: said  # type: ignore[method-assign]
        try:
            return speaks.metrics()
        finally:
            speaks.model.counters = real  # type: ignore[method-assign]

    def die(self) -> None:
        """No connection is taken any more, and whoever waits gets no answer."""
        self.is_dead = True
        self.model.stop()
        self.http.shutdown()
        self.http.server_close()


class Handler(BaseHTTPRequestHandler):
    fake: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        fake, size = self.fake, int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        if fake.fault == "needs-key" and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.give(401, {"error": {"message": f"a key is needed, got {self.headers.get('Authorization')}"}})
        elif self.path == fake.speaks.path:
            self.complete(body)
        else:
            fake.calls.append((self.path, body))
            said = fake.counted() if self.path == "/metrics" else fake.speaks.call(self.path, body)
            self.give(
                *(said if isinstance(said, tuple) else (404, {"detail": "Not Found"}) if said is None else (200, said))
            )

    do_POST = do_GET

    def complete(self, body: dict[str, Any]) -> None:
        fake = self.fake
        fake.bodies.append(body)
        speaks = next(fake.turns)
        turn, fault, model = len(fake.bodies), fake.fault, speaks.model
        if fault == "hang" or (fault == "hang-once" and turn == TURN):
            model.over.wait()
        if fault == "dies" and turn > TURN and not fake.is_dead:
            fake.die()
        if fake.is_dead:
            self.close_connection = True
        elif fault == "some-500" and turn % TURN == 0:
            self.give(500, {"error": {"message": "out of luck"}})
        elif fault == "garbage" and turn >= fake.first:
            self.give(200, "<html>it works</html>")
        else:
            time.sleep(0.2 if fault == "slow" else 0)
            ids = body.get("input_ids") or body["prompt"]
            count = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
            rid = body.get("rid") or body.get("request_id", "")
            try:
                salt = body.get("extra_key") or body.get("cache_salt")
                stored = fake.stored.get(tuple(ids[:KEYED])) if fault == "front-cache" else None
                job = stored or model.admit(rid, ids, 1 if fake.mode == "prefill" else count, salt)
                fake.stored.setdefault(tuple(ids[:KEYED]), job)
            except UsageError as error:
                self.give(400, {"error": {"message": f"this model has no answer to it: {error}"}})
            else:
                steps = iter(job.tokens) if stored is not None else model.steps(rid, job)
                self.answer(rid, job, steps, bool(body.get("stream")))

    def answer(self, rid: str, job: Job, steps: Iterator[int], is_stream: bool) -> None:
        fake, tokens = self.fake, list[int]()
        is_half = fake.fault == "half" and len(fake.bodies) >= fake.first
        if is_stream:
            self.head(200, "text/event-stream", {"Transfer-Encoding": "chunked"})
        try:
            for token in steps:
                tokens.append(token)
                if is_stream:
                    self.chunk(json.dumps(fake.speaks.event(rid, job, tokens, 1, None)))
                if is_half and len(tokens) * 2 >= len(job.tokens):
                    break
            finish = "abort" if job.is_aborted and len(tokens) < len(job.tokens) else "length"
            last = fake.speaks.event(rid, job, tokens, 0 if is_stream else len(tokens), finish)
            if not is_stream:
                self.give(200, last, is_half=is_half)
            elif not is_half:
                self.chunk(json.dumps(last))
                self.chunk("[DONE]")
                self.wfile.write(b"0\r\n\r\n")
        except OSError:  # whoever asked has closed the connection
            self.close_connection = True
        finally:
            if isinstance(steps, Generator):
                steps.close()
        self.close_connection = self.close_connection or is_half

    def chunk(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def give(self, status: int, said: object, *, is_half: bool = False) -> None:
        text = (said if isinstance(said, str) else json.dumps(said)).encode()
        self.head(
            status, "text/plain" if isinstance(said, str) else "application/json", {"Content-Length": str(len(text))}
        )
        self.wfile.write(text[: len(text) // 2] if is_half else text)

    def head(self, status: int, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""
