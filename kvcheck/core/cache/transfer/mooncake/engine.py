"""MooncakeEngine: a worker's side of Mooncake's transfer engine: whole regions registered once, checked writes.

Invariants:
- Every wait ends: by the library's own bounds, by the watchdog of the call, or because the process is killed.
- After a failed call nothing more is sent, and the source stays in use until `fence`. A code of -1 does not mean that
  the library has stopped.
- A code of 0 means that the library reports the write as done. The receiver checks the bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from kvcheck.core.base.child import StandardStreams, start, tail
from kvcheck.core.base.errors import TransferError, UnknownVerdict, UsageError
from kvcheck.core.cache.backend.shared_memory import SharedRegion
from kvcheck.core.cache.transfer.mooncake import child
from kvcheck.core.cache.transfer.mooncake.frames import (
    CODE,
    MOST_DESCRIPTORS,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    FrameType,
    pack_call,
    pack_json,
    unpack_json,
)
from kvcheck.core.cache.transfer.mooncake.library import (
    PROTOCOLS,
    EngineSettings,
    require_library,
    require_protocol,
)
from kvcheck.core.cache.transfer.mooncake.plan import BlockBatch, Extent, calls_of, entries_of

CALLS_AHEAD = 4
"""Most unanswered calls; all of them fit the socket, so sending never blocks."""
SOCKET_BYTES = 1 << 20
LOG_TAIL_BYTES = 2000
LOG_BYTES = 1 << 20
SESSION = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class PeerInfo:
    session: str
    regions: Mapping[str, Extent]

    def __post_init__(self) -> None:
        match = SESSION.fullmatch(self.session)
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise TransferError(f"not the session of an engine: {self.session!r}; expected host:port")
        for name, (address, size) in self.regions.items():
            if not (0 < address < 1 << 63 and 0 < size < (1 << 63) - address):
                raise TransferError(f"region {name} of peer {self.session}: no memory lies at {address} + {size} bytes")


@dataclass(frozen=True, slots=True)
class Submission:
    number: int
    size_bytes: int


class MooncakeEngine:
    """A running engine process. One thread at a time, except for `fence`. Raise UnknownVerdict without a usable
    library.

    protocol: a row of PROTOCOLS. Without the hardware, or with a build that lacks the transport, most names silently
    give TCP. nvlink_intra takes device memory only. host: address for peers. The library listens on all interfaces in
    any case and authenticates no peer, so use it only in trusted networks. network: the path of a PrivateNetwork.
    """

    def __init__(
        self,
        regions: Mapping[str, SharedRegion],
        *,
        protocol: str = "tcp",
        host: str = "127.0.0.1",
        network: str | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        require_protocol(protocol)
        if len(regions) > MOST_DESCRIPTORS:
            raise UsageError(f"an engine takes at most {MOST_DESCRIPTORS} regions, got {len(regions)}")
        self.protocol = protocol
        self.version = require_library()
        self._settings = settings or EngineSettings()
        self._lock = threading.RLock()
        self._poison: str | None = None
        self._waiting: deque[tuple[int, str, bytes]] = deque()  # (submission, peer, columns) not handed over yet
        self._ahead: deque[int] = deque()  # submissions of the calls handed over, in order
        self._moved_at = 0.0  # when the engine process last answered, or was given its only call
        self._last_submission = 0
        self._log = os.memfd_create("kvcheck-engine-log", os.MFD_CLOEXEC)
        self._process, self._channel = self._spawn()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.fence)
            self.session, self._regions = self._handshake(regions, host, network)
            on_failure.pop_all()

    def regions(self) -> dict[str, Extent]:
        return dict(self._regions)

    @property
    def info(self) -> PeerInfo:
        return PeerInfo(self.session, self.regions())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_poisoned(self) -> bool:
        return self._poison is not None

    @property
    def is_fenced(self) -> bool:
        """True once the engine process has ended. The peer's engine may still write here until it is fenced too."""
        return self._process.poll() is not None

    def write(self, peer: PeerInfo, batches: Sequence[BlockBatch]) -> int:
        """Copy every block, and wait. Return the bytes that the library reports.

        Raise TransferError for blocks outside a region or with shared targets, before anything is sent; and for a
        failed or late call, with the engine poisoned.
        """
        return self.wait(self.submit(peer, batches))

    def submit(self, peer: PeerInfo, batches: Sequence[BlockBatch]) -> Submission:
        """Queue a checked write. Calls run in the order of submission. The source must not change before `wait`."""
        with self._lock:
            self._check_usable()
            if os.fstat(self._log).st_size > LOG_BYTES:
                os.ftruncate(self._log, 0)
            entries = entries_of(batches, self._regions, peer.regions)
            self._last_submission += 1
            submission = Submission(self._last_submission, int(entries[2].sum()))
            # The library does not order the writes of a call, so no call holds those of two submissions: a flag could
            # arrive before its data.
            if submission.size_bytes:
                for call in calls_of(entries):
                    self._waiting.append((submission.number, peer.session, call.tobytes()))
            self._move(self._hand_over)
            return submission

    def is_done(self, submission: Submission) -> bool:
        """True if the library reports all blocks as done. Raises like `write`."""
        with self._lock:
            while self._is_open(submission):
                self._check_usable()
                if not self._move(lambda: self._take(deadline=0.0)):
                    return False
            return True

    def wait(self, submission: Submission) -> int:
        with self._lock:
            while self._is_open(submission):
                self._check_usable()
                self._move(lambda: self._take(deadline=self._moved_at + self._settings.call_s))
            return submission.size_bytes

    def fence(self) -> None:
        """Kill the engine process and wait for its end. It then uses no memory.

        Raise TransferError if it does not end in time: then the memory stays in use.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            self._process.wait(self._settings.fence_s)
        except subprocess.TimeoutExpired as error:
            raise TransferError(
                f"engine process {self.pid} does not end within {self._settings.fence_s} s of being killed; all its "
                "regions stay in use"
            ) from error
        with self._lock:  # a waiting holder gets the socket's end at once
            self._poison = self._poison or "it was fenced"
            self._channel.close()
            if self._log >= 0:
                os.close(self._log)
                self._log = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.fence()

    def _spawn(self) -> tuple[subprocess.Popen[str], Channel]:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        with theirs:
            streams = StandardStreams(stdin=theirs.fileno(), stdout=self._log, stderr=self._log)
            process = start(child.__name__, streams=streams, leads_group=False)  # it ends with its worker's group
        return process, Channel(ours)

    def _handshake(
        self, regions: Mapping[str, SharedRegion], host: str, network: str | None
    ) -> tuple[str, dict[str, Extent]]:
        deadline = time.monotonic() + self._settings.start_s
        asked = {
            "host": host,
            "network": network,
            "protocol": PROTOCOLS[self.protocol].told,
            "flag": PROTOCOLS[self.protocol].flag,
            "variables": self._settings.environment(self.protocol),
            "regions": {name: region.size_bytes for name, region in regions.items()},
        }
        descriptors = [region.fileno() for region in regions.values()]
        try:
            self._channel.send(FrameType.START, 0, pack_json(asked), deadline=deadline, descriptors=descriptors)
            reply = self._channel.receive(deadline=deadline)
            answer = unpack_json(reply.payload)
        except ChannelTimeout as error:
            raise TransferError(
                f"engine process {self.pid} is not ready after {self._settings.start_s} s{self._said()}"
            ) from error
        except ChannelClosed as error:
            raise TransferError(f"no engine for protocol {self.protocol}: {self._end()}{self._said()}") from error
        if reply.kind is FrameType.REFUSED and answer.get("is_library"):
            raise UnknownVerdict(f"transport mooncake, protocol {self.protocol}: {answer.get('why')}")
        if reply.kind is not FrameType.READY:
            raise TransferError(f"no engine for protocol {self.protocol}: {answer.get('why')}{self._said()}")
        extents = answer["regions"]
        assert isinstance(extents, dict)
        return f"{host}:{answer['port']}", {str(name): (int(at), int(size)) for name, (at, size) in extents.items()}

    def _is_open(self, submission: Submission) -> bool:
        first = self._ahead[0] if self._ahead else self._waiting[0][0] if self._waiting else None
        return first is not None and first <= submission.number

    def _move(self, step: Callable[[], None]) -> bool:
        """Run one step; False if there was no answer yet. A failure poisons the engine."""
        try:
            step()
        except ChannelTimeout:
            if time.monotonic() < self._moved_at + self._settings.call_s:
                return False
            raise self._fail(f"gave no answer within {self._settings.call_s} s") from None
        except ChannelClosed as error:
            raise self._fail(f"gave no answer: {self._end()}") from error
        return True

    def _hand_over(self) -> None:
        while self._waiting and len(self._ahead) < CALLS_AHEAD:
            submission, peer, columns = self._waiting[0]
            if not self._ahead:
                self._moved_at = time.monotonic()
            deadline = self._moved_at + self._settings.call_s
            self._channel.send(FrameType.WRITE, submission, pack_call(columns, peer), deadline=deadline)
            self._ahead.append(submission)
            self._waiting.popleft()

    def _take(self, *, deadline: float) -> None:
        frame = self._channel.receive(deadline=deadline)
        submission = self._ahead[0]
        if frame.kind is not FrameType.DONE or frame.number != submission:
            raise self._fail(f"answered {frame.kind.name} {frame.number}, expected the end of write {submission}")
        (code,) = CODE.unpack(frame.payload)
        if code != 0:
            raise self._fail(f"returned {code}, expected 0,")
        self._ahead.popleft()
        self._moved_at = time.monotonic()
        self._hand_over()

    def _fail(self, what: str) -> TransferError:
        """Poison the engine. Every open write raises the same text."""
        write = f"write {self._ahead[0]}" if self._ahead else "a write"
        self._poison = (
            f"engine {self.session} {what} in {write}; {len(self._ahead) + len(self._waiting)} calls are open; their "
            f"sources here and targets at the peer stay in use until both engines are fenced{self._said()}"
        )
        return TransferError(self._poison)

    def _check_usable(self) -> None:
        if self._poison is not None:
            raise TransferError(f"this engine takes no more writes: {self._poison}; fence it and start another")

    def _end(self) -> str:
        try:
            code = self._process.wait(self._settings.fence_s)
        except subprocess.TimeoutExpired:
            return f"process {self.pid} closed its socket and still runs"
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"process {self.pid} ended {how}"

    def _said(self) -> str:
        if self._log < 0:
            return ""
        text = tail(self._log, LOG_TAIL_BYTES)
        return f"; it printed: {text}" if text else ""
