"""Child processes: start, greeting, environment and end of every process that kvcheck starts.

Invariants:
- A child imports the parent's own kvcheck, and nothing from the current folder; it reports this before it is used.
- It inherits the variables of INHERITED (an engine: of ENGINE too), and never one that looks like a secret.
- It ends with its parent, also after SIGKILL and while it is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import kvcheck
from kvcheck.core.base import child_start
from kvcheck.core.base.errors import InternalError, UnknownVerdict, machine_trouble

INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|XDG_CACHE_HOME|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|CC|CXX|CPATH|C_INCLUDE_PATH|LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX"
    r"|(CUDA|NVIDIA|NCCL|GLOO|UCX|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|NUMBA|MC|MOONCAKE)_\w+"
    r"|(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|MALLOC)_\w+|GLIBC_TUNABLES"
)
"""Variables of the caller that every child inherits, as documented in docs/children.md."""
ENGINE = re.compile(
    r"HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|TRANSFORMERS_CACHE|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
    r"|(SGLANG|SGL|VLLM|LMCACHE|FLASHINFER|TVM)_\w+"
)
SECRET = re.compile(
    r"(.*_)?(TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|KEY|APIKEY|AUTH)(_.*)?", re.IGNORECASE
)
SECRET_VALUE = re.compile(r"://[^/\s]*@")
"""A name and password within an address."""

GREETING_S = 120.0
ENDING_S = 5.0
LOOK_S = 0.005
PACKAGE = str(Path(kvcheck.__file__).resolve().parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    package: str
    version: str
    python: str


OWN = Build(package=PACKAGE, version=kvcheck.__version__, python=sys.version.split()[0])


def inherited(variables: Mapping[str, str], *, is_engine: bool = False) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if (INHERITED.fullmatch(name) or (is_engine and ENGINE.fullmatch(name)))
        and not SECRET.fullmatch(name)
        and not SECRET_VALUE.search(value)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardStreams:
    stdin: int | IO[str] | IO[bytes] | None = subprocess.DEVNULL
    stdout: int | IO[str] | IO[bytes] | None = subprocess.PIPE
    stderr: int | IO[str] | IO[bytes] | None = None


class Started:
    def __init__(self, program: str, process: subprocess.Popen[str], hello: int) -> None:
        self.program = program
        self.process = process
        self._hello = hello

    def greet(self, within_s: float = GREETING_S) -> Build | None:
        """Return the build that the child reports; None if it ended before. Raises TimeoutError."""
        said = b""
        deadline = time.monotonic() + within_s
        poll = select.poll()
        poll.register(self._hello, select.POLLIN)
        try:
            while not said.endswith(b"\n"):
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise TimeoutError
                if not (more := os.read(self._hello, 1 << 16)):
                    return None
                said += more
        finally:
            os.close(self._hello)
        try:
            return Build(**{str(name): str(value) for name, value in json.loads(said).items()})
        except (ValueError, TypeError, AttributeError):
            return Build(package=repr(said[:200]), version="unknown", python="unknown")


def start(
    program: str,
    *arguments: str,
    streams: StandardStreams,
    variables: Mapping[str, str] | None = None,
    leads_group: bool = True,
) -> subprocess.Popen[str]:
    """Run `program` as __main__ in a new process of this interpreter; return once it has reported this build.

    Raises UnknownVerdict if the machine cannot start it, InternalError if it imports another kvcheck.
    """
    try:
        child = spawn(program, *arguments, streams=streams, variables=variables, leads_group=leads_group)
    except OSError as error:
        trouble = machine_trouble(error) or f"the machine cannot start this process: {error}"
        raise UnknownVerdict(f"{program}: {trouble}") from error
    is_greeted = False
    try:
        build = child.greet()
        if build is None:
            raise UnknownVerdict(f"{program}: the process {_ended(child.process)} before kvcheck was loaded in it")
        check(build, program)
        is_greeted = True
    except TimeoutError:
        raise UnknownVerdict(f"{program}: the process said nothing for {GREETING_S:g} s") from None
    finally:
        if not is_greeted:  # e.g. interrupted: no other code holds the process
            child.process.kill()
            child.process.wait()
            for stream in (child.process.stdin, child.process.stdout):
                if stream is not None:
                    stream.close()
    return child.process


def check(build: Build, program: str, *, is_own_python: bool = True) -> None:
    """Raise InternalError unless `build` is this kvcheck. is_own_python: and this version of Python."""
    expected = OWN if is_own_python else Build(package=OWN.package, version=OWN.version, python=build.python)
    if build != expected:
        raise InternalError(
            f"{program} runs another kvcheck: expected {_text(expected)}, got {_text(build)}; "
            "next: start again, and leave the installed kvcheck as it is while it runs"
        )


def spawn(
    program: str,
    *arguments: str,
    streams: StandardStreams,
    variables: Mapping[str, str] | None = None,
    leads_group: bool = True,
    engine_python: Path | None = None,
) -> Started:
    """Like `start`, without waiting for the report. Raises OSError.

    engine_python: the interpreter of an engine's environment. Its process imports from there and leads a group, which
    ends as a whole with kvcheck.
    """
    is_engine = engine_python is not None
    hello, said = os.pipe()
    command = [
        *([str(engine_python), "-I"] if is_engine else [sys.executable, "-I", *_interpreter_flags()]),
        "-u",
        child_start.__file__,
        program,
        json.dumps(asdict(OWN)),
        str(said),
        str(os.getpid()),
        child_start.GROUP if is_engine else child_start.PROCESS,
        json.dumps(None if is_engine else import_paths(sys.path)),
        *arguments,
    ]

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**inherited(os.environ, is_engine=is_engine), **(variables or {})},
            start_new_session=leads_group or is_engine,
            pass_fds=(said,),
        )

    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, hello)
        try:
            process = _STARTER.run(begin)
        finally:
            os.close(said)
        on_failure.pop_all()
    return Started(program, process, hello)


def listen(process: subprocess.Popen[str], put: Callable[[str | None], None], longest: int = -1) -> None:
    """Start a thread that passes each line of the child's output to `put`, then None at its end.

    longest: longer lines arrive in pieces; -1: no limit.
    """
    stdout = process.stdout
    assert stdout is not None, "the child's output is a pipe"

    def pump() -> None:
        with stdout, contextlib.suppress(ValueError, OSError):
            while line := stdout.readline(longest):
                put(line)
        put(None)

    threading.Thread(target=pump, daemon=True).start()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None, "the child's input is a pipe"
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(line + "\n")
        process.stdin.flush()


def close_input(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def tail(descriptor: int, most_bytes: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, most_bytes, max(0, size - most_bytes)).decode(errors="replace").strip("\0 \n")


def has_ended(process: subprocess.Popen[str], within_s: float | None = None) -> bool:
    """True if the child ends within that time; None: wait for its end. It is not reaped, so it keeps its pid."""
    deadline = None if within_s is None else time.monotonic() + within_s
    while process.returncode is None:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def kill_group(process: subprocess.Popen[str]) -> int:
    if process.returncode is None:  # its pid is not reused before it is reaped
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def end(*processes: subprocess.Popen[str], within_s: float = ENDING_S) -> None:
    """Send SIGTERM to all, then SIGKILL to those that have not ended in time; stopped ones always need it."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + within_s
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def import_paths(paths: list[str]) -> list[str]:
    """`paths` without the current folder, as a relative entry or full path."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    return [path for path in paths if os.path.isabs(path) and path != here]


def _interpreter_flags() -> list[str]:
    return [
        *(["-B"] if sys.dont_write_bytecode else []),
        *([f"-{'O' * sys.flags.optimize}"] if sys.flags.optimize else []),
        *(["-X", "utf8"] if sys.flags.utf8_mode else []),
        *(f"-W{option}" for option in sys.warnoptions),
    ]


def _ended(process: subprocess.Popen[str]) -> str:
    try:
        code = process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _text(build: Build) -> str:
    return f"{build.package} version {build.version} on Python {build.python}"


class _Starter:
    """The thread that starts all children. The kernel ends a tied child with the thread that started it, so this thread
    lives as long as the process."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[str]], Future[subprocess.Popen[str]]]]
        self._orders = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, begin: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
        future: Future[subprocess.Popen[str]] = Future()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="starter of children", daemon=True)
                self._thread.start()
        self._orders.put((begin, future))
        has_result = False
        try:
            process = future.result()
            has_result = True
            return process
        finally:
            if not has_result and not future.cancel():  # interrupted
                future.add_done_callback(_abandon)

    def _serve(self) -> None:
        while True:
            begin, future = self._orders.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                process = begin()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                future.set_exception(error)
            else:
                future.set_result(process)


def _abandon(future: Future[subprocess.Popen[str]]) -> None:
    if future.exception() is None:
        with contextlib.suppress(OSError):
            future.result().kill()


_STARTER = _Starter()
