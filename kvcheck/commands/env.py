"""`kvcheck env`: an environment with a release of an engine, or with a checkout of it, for its probes.

For a CPU the requirements of the release are left out: a CUDA build of torch and gigabytes of compiled kernels. NEEDS
lists the engine's imports at load. For a GPU all requirements are installed, once the driver reports one, and compiled
code has to run on the device.

Invariants:
- No shell is run. Names, versions and folders are checked before they become arguments.
- A foreign folder stays as it is. An unfinished one is made anew.
- A finished environment has all imports of the probes. If pip or the network fails, the exit code is 4.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcheck.commands.engine_source import Source, check_requirement, link, pins, requirements_of_wheel, source_of
from kvcheck.commands.terminal import ProgressLine, clear_passing, say
from kvcheck.core.base.cells import DRIVER
from kvcheck.core.base.child import StandardStreams, check, close_input, kill_group, spawn, tail
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.identity import MOONCAKE_BUILDS as BUILDS
from kvcheck.core.base.identity import commit_of
from kvcheck.core.base.nouns import counted
from kvcheck.core.probes import import_check
from kvcheck.core.probes.frame.probe_server import VARIABLES
from kvcheck.core.probes.installed import ENGINES, checkout_of
from kvcheck.core.run.store import write_text

CPU, CUDA = "cpu", "cuda"
TORCH = "torch==2.13.0"
MARKER = "kvcheck-env.json"
HAS = "requirements.txt"
"""In a base: its installed requirements, one a line."""
VERSION = re.compile(r"[0-9][A-Za-z0-9.+!_-]{0,60}")
CHECK_S = 600.0
MOST_BYTES = 100_000
FINAL = ("No matching distribution found", "ResolutionImpossible", "requires a different Python")
"""Words of pip after which the same command fails again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Imports of an engine. light: of the base. own: of the release alone, without dependencies. full: with
    dependencies. leave_out: endings of GPU-only files in its wheel. build: the distribution, if named otherwise.
    has_base: whether it needs torch."""

    light: tuple[str, ...]
    own: tuple[str, ...]
    full: tuple[str, ...] = ("transformers",)
    leave_out: tuple[str, ...] = ()
    build: str | None = None
    has_base: bool = True


BASE = ("numpy", "triton")
GRAMMARS = ("transformers", "xgrammar", "apache-tvm-ffi")
"""Installed together, so that an unpinned version suits the pinned ones of a release."""
NEEDS = {
    "sglang": Needs(
        light=(
            *("orjson", "pyzmq", "pillow", "starlette", "psutil", "pybase64", "requests", "ipython", "aiohttp"),
            *("openai", "partial_json_parser", "dill", "sentencepiece", "compressed_tensors", "gguf", "msgspec"),
            *("einops", "prometheus_client", "fastapi", "uvloop"),
        ),
        own=(),
        full=GRAMMARS,
    ),
    "vllm": Needs(
        light=(
            *("regex", "psutil", "requests", "pyzmq", "msgspec", "pillow", "prometheus_client", "aiohttp", "openai"),
            *("einops", "fastapi", "uvloop", "orjson", "partial_json_parser", "sentencepiece", "compressed_tensors"),
            *("gguf", "pybase64"),
        ),
        own=(*("cbor2", "openai_harmony", "cachetools", "cloudpickle", "py-cpuinfo", "llguidance", "blake3"),),
        full=GRAMMARS,
        leave_out=(".so",),
    ),
    "lmcache": Needs(
        light=(
            *("msgspec", "psutil", "pyzmq", "aiohttp", "fastapi", "safetensors", "requests", "prometheus_client"),
            "pyyaml",
        ),
        own=(
            *("aiofile", "aiofiles", "caio", "blake3", "cachetools", "nvtx", "opentelemetry-sdk"),
            *("opentelemetry-semantic-conventions", "sortedcontainers", "redis", "py-cpuinfo", "numba", "llvmlite"),
            *("cryptography", "cffi"),
        ),
    ),
    "mooncake": Needs(light=(), own=(), full=("requests", "aiohttp", "msgpack"), build=BUILDS[0], has_base=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    engine: str
    version: str | None
    source: Source | None
    folder: Path
    base: Path
    python: str
    torch: str
    also: tuple[str, ...]
    device: str

    def __post_init__(self) -> None:
        if self.device not in (CPU, CUDA):
            raise UsageError(f"--device {self.device}: expected {CPU} or {CUDA}")
        if self.device == CUDA and not any(CUDA in row.devices for row in ENGINES.load(self.engine).probes):
            raise UsageError(f"--device {CUDA}: no probe of {self.engine} runs on a GPU; leave --device out")
        for name in (self.torch, *self.also):
            check_requirement(name)
        if self.base == self.folder:
            raise UsageError(f"--base {self.base}: expected another folder than the environment itself")

    @property
    def has_base(self) -> bool:
        """Whether torch comes from a base that several environments share."""
        return self.device == CPU and NEEDS[self.engine].has_base

    @property
    def facts(self) -> dict[str, object]:
        """Content of the marker file; equal for equal orders."""
        source = None if self.source is None else str(self.source.checkout)
        device = {} if self.device == CPU else {"device": self.device}
        return {"engine": self.engine, "version": self.version, "source": source, "also": [*self.also], **device}

    @property
    def target(self) -> str:
        return f"kvcheck probe {self.engine}:{self.folder}{'' if self.device == CPU else ' --device cuda'}"


def env(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ENGINE==VERSION DIR",
            help="A release of sglang, vllm, lmcache or mooncake, and a new folder. With --source the release may be "
            "left out.",
        ),
    ],
    source: Annotated[
        Path | None,
        typer.Option(metavar="CHECKOUT", help="A checkout of the engine, linked as an editable install does."),
    ] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Environment with torch that several share. Default: DIR-base.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter, 3.11 or newer. Default: kvcheck's own.")] = None,
    torch: Annotated[
        str | None, typer.Option(help=f"Requirement of torch, for a base that has none. Default: {TORCH}.")
    ] = None,
    also: Annotated[list[str] | None, typer.Option(help="One more package of the release; repeatable.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu; or cuda, on a machine with a GPU: all that the release asks for, of gigabytes.")
    ] = CPU,
) -> None:
    *named, folder = words
    engine, version = _release(named, source)
    place = Path(folder).absolute()
    program = shutil.which(python or sys.executable)
    if program is None:
        raise UsageError(f"--python {python}: expected an interpreter, found none")
    if device == CUDA and (base is not None or torch is not None):
        raise UsageError(
            f"--device {CUDA}: expected no --base and no --torch, as each release brings a torch of its own"
        )
    order = Order(
        engine=engine,
        version=version,
        source=None if source is None else source_of(engine, source.absolute()),
        folder=place,
        base=place.with_name(f"{place.name}-base") if base is None else base.absolute(),
        python=program,
        torch=torch or TORCH,
        also=tuple(also or ()),
        device=device,
    )
    say(f"An environment that can import {engine} is enough: kvcheck probe {engine}:VENV")
    if _is_made(order):
        say(f"{folder}: made before; next: {order.target}")
    elif device == CUDA:
        _make_for_a_gpu(order)
    else:
        _make_for_a_cpu(order)


def _release(named: list[str], source: Path | None) -> tuple[str, str | None]:
    if not named and source is not None:
        found = [name for name in ENGINES.names() if checkout_of(name, source) is not None]
        if len(found) != 1:
            raise UsageError(
                f"--source {source}: expected a checkout of one engine, found {' and '.join(found) or 'none'}; "
                f"name one of {', '.join(ENGINES.names())} before DIR"
            )
        return found[0], None
    if len(named) != 1:
        raise UsageError("expected ENGINE==VERSION DIR, such as sglang==0.5.23 envs/sglang, or --source CHECKOUT DIR")
    engine, equals, version = named[0].partition("==")
    ENGINES.require(engine)
    if (not equals and source is None) or (equals and not VERSION.fullmatch(version)):
        raise UsageError(f"{named[0]!r}: expected ENGINE==VERSION, such as {engine}==0.5.23, or --source CHECKOUT")
    return engine, version or None


def _make_for_a_gpu(order: Order) -> None:
    if (why := no_device()) is not None:
        raise UnknownVerdict(
            f"--device {CUDA}: {why}; nothing was installed; next: the same command on the machine with the GPU"
        )
    say(f" 1/3  environment in {order.folder}")
    _begin(order)
    if order.source is None:
        say(f" 2/3  {order.engine}=={order.version} and all that it asks for: gigabytes")
        _pip(order.folder, "install", f"{order.engine}=={order.version}", *order.also)
        version = str(order.version)
    else:
        say(f" 2/3  all that {order.source.checkout} asks for: gigabytes")
        _pip(order.folder, "install", *order.source.asks, *order.also)
        version = link(order.source, _site(order.folder), order.version)
    say(" 3/3  imports, and compiled code on the device")
    _check_imports(order)
    _mark(order, made=True)
    say(f"{order.folder}: {order.engine} {version}; next: {order.target}")


def no_device(open_library: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """Return why no GPU can be used, before gigabytes are downloaded; None if the driver reports one."""
    try:
        driver = open_library(DRIVER)
    except OSError as error:
        return f"this machine has no driver of a GPU: {error}"
    count = ctypes.c_int()
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the driver of this machine reaches no GPU: {DRIVER} returned {code}; see nvidia-smi"
    return None if count.value else "the driver of this machine tells of no GPU; see nvidia-smi"


def _make_for_a_cpu(order: Order) -> None:
    if order.has_base:
        say(f" 1/6  base with torch in {order.base}")
        _make_base(order)
    else:
        say(f" 1/6  no base: {order.engine} needs no torch")
    say(f" 2/6  environment in {order.folder}")
    _begin(order)
    with tempfile.TemporaryDirectory(prefix="kvcheck-engine-") as scratch:
        asks, wheel = _take(order, Path(scratch))
        needs, python = NEEDS[order.engine], _python_version(order.folder)
        say(" 4/6  packages of the release")
        given = _constraints(order, Path(scratch))
        _pip(order.folder, "install", *given, *pins(asks, (*needs.full, *order.also), python))
        if needs.own:
            _pip(order.folder, "install", "--no-deps", *pins(asks, needs.own, python))
        say(f" 5/6  {order.engine}")
        version = _put_engine(order, wheel)
    say(" 6/6  imports")
    _check_imports(order)
    _mark(order, made=True)
    say(f"{order.folder}: {order.engine} {version}, {_size(order.folder)}; next: {order.target}")


def _size(folder: Path) -> str:
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return f"{sum(file.lstat().st_size for file in files) / 1e9:.1f} GB"


def _is_made(order: Order) -> bool:
    """Whether the environment is finished. Raise UsageError for a foreign folder or one of another order."""
    folder = order.folder
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a new folder, got a file")
    marker = folder / MARKER
    if not marker.is_file():
        if any(folder.iterdir()):
            raise UsageError(f"{folder}: expected a new or empty folder; it holds files that kvcheck env did not make")
        return False
    try:
        told = json.loads(marker.read_text(encoding="utf-8"))
        facts, is_made = told["order"], told["made"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{marker}: cannot be read ({error}); remove the folder and start again") from error
    if is_made is True and facts != order.facts:
        raise UsageError(f"{folder}: holds {facts}, and {order.facts} was asked for; name another folder")
    return is_made is True


def _mark(order: Order, *, made: bool) -> None:
    write_text(order.folder / MARKER, json.dumps({"order": order.facts, "made": made}, indent=1) + "\n")


def _begin(order: Order) -> None:
    if (order.folder / MARKER).is_file():
        say(f"      {order.folder} was not finished: it is made anew")
        shutil.rmtree(order.folder)
    _make_folder(order.folder)
    _mark(order, made=False)
    _run([order.python, "-I", "-m", "venv", str(order.folder)], "make an environment")
    if order.has_base:
        write_text(_site(order.folder) / "base.pth", f"{_site(order.base)}\n")


def _make_base(order: Order) -> None:
    has = order.base / HAS
    if order.base.exists() and not has.is_file() and (not order.base.is_dir() or any(order.base.iterdir())):
        raise UsageError(f"--base {order.base}: expected a new folder or a base, which has a {HAS}; name another")
    _make_folder(order.base)
    if not has.is_file():
        write_text(has, "")
    known = has.read_text(encoding="utf-8").split()
    torch = next((each for each in known if re.match(r"torch\b(?![-_])", each)), None)
    if torch not in (None, order.torch):
        raise UsageError(f"--base {order.base}: made with {torch}; expected {order.torch}; name another base")
    if not (order.base / "bin" / "python").exists():
        _run([order.python, "-I", "-m", "venv", str(order.base)], "make an environment")
    lacks = [each for each in (order.torch, *BASE, *NEEDS[order.engine].light) if each not in known]
    if lacks:
        size = "" if known else "; gigabytes and minutes, once for all engines"
        say(f"      {counted(len(lacks), 'package')}{size}: {', '.join(lacks)}")
        _pip(order.base, "install", order.torch, *lacks)
        # compressed_tensors and others pull a transformers of their own; each release brings its own.
        _pip(order.base, "uninstall", "--yes", "transformers", "huggingface_hub", "tokenizers")
        write_text(has, "\n".join((*known, *lacks)) + "\n")
        say(f"      {_size(order.base)}")


def _take(order: Order, scratch: Path) -> tuple[tuple[str, ...], Path | None]:
    if order.source is not None:
        say(f" 3/6  {order.source.checkout}: {commit_of(order.source.package) or 'git knows no commit of it'}")
        return order.source.asks, None
    release = f"{NEEDS[order.engine].build or order.engine}=={order.version}"
    say(f" 3/6  {release}")
    _pip(order.folder, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), release)
    wheels = [*scratch.glob("*.whl")]
    if len(wheels) != 1:
        raise UnknownVerdict(f"pip download {release}: expected one wheel, got {len(wheels)}")
    return requirements_of_wheel(wheels[0]), wheels[0]


def _constraints(order: Order, scratch: Path) -> list[str]:
    """Options of pip that pin the torch of the base: a newer package could replace it."""
    if not order.has_base:
        return []
    program = "from importlib.metadata import version; print('torch==' + version('torch'))"
    python = str(order.folder / "bin" / "python")
    write_text(scratch / "torch.txt", _run([python, "-I", "-c", program], "say which torch the base has"))
    return ["--constraint", str(scratch / "torch.txt")]


def _put_engine(order: Order, wheel: Path | None) -> str:
    site = _site(order.folder)
    if order.source is not None:
        return link(order.source, site, order.version)
    assert wheel is not None and order.version is not None, "a release has both"
    leave_out = NEEDS[order.engine].leave_out
    if not leave_out:
        _pip(order.folder, "install", "--no-deps", str(wheel))
        return order.version
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site, [name for name in packed.namelist() if not name.endswith(leave_out)])
    return order.version


def _check_imports(order: Order) -> None:
    python = order.folder / "bin" / "python"
    with tempfile.TemporaryFile() as said:
        streams = StandardStreams(stdin=subprocess.PIPE, stderr=said)
        started = spawn(
            import_check.__name__,
            order.engine,
            order.device,
            streams=streams,
            variables=VARIABLES[order.device],
            engine_python=python,
        )
        child = started.process
        try:
            build = started.greet(CHECK_S)
            if build is not None:
                check(build, str(python), is_own_python=False)
            assert child.stdout is not None, "the child's output is a pipe"
            lines = child.stdout.read().splitlines()
            status = child.wait(CHECK_S)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise UnknownVerdict(f"{python}: imports took more than {CHECK_S:g} s") from error
        finally:
            kill_group(child)
            close_input(child)
            if child.stdout is not None:
                child.stdout.close()
        if lines or status:
            last = tail(said.fileno(), 20_000).splitlines()[-1:]
            raise UnknownVerdict(
                f"{order.folder} is not made: {'; '.join(lines or last) or f'status {status}'}; next: the same command "
                "with --also PACKAGE for a package that is missing or too new, or an environment of your own in which "
                f"{order.engine} can be imported: kvcheck probe {order.engine}:VENV"
            )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}; expected a folder that can be written") from error


def _site(folder: Path) -> Path:
    command = [str(folder / "bin" / "python"), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(_run(command, "say where its packages are").strip())


def _python_version(folder: Path) -> str:
    command = [str(folder / "bin" / "python"), "-I", "-c", "import platform; print(platform.python_version())"]
    return _run(command, "say its version").strip()


def _pip(folder: Path, action: str, *arguments: str) -> None:
    options = ["--quiet"] if action == "uninstall" else ["--progress-bar", "off"]
    _run([str(folder / "bin" / "python"), "-I", "-m", "pip", action, *options, *arguments], f"pip {action}")


def _run(command: Sequence[str], what: str) -> str:
    """Return the output of a program, showing its last line with a clock. Raises UnknownVerdict if it fails."""
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                command, env={**os.environ, **quiet}, stdin=subprocess.DEVNULL, stdout=said, stderr=errors
            )
        except OSError as error:
            raise UnknownVerdict(f"{what}: {command[0]} cannot be started: {error}") from error
        _wait(child, lambda: f"{what}: {tail(said.fileno(), 4000).rpartition(chr(10))[2].strip()}")
        if not child.returncode:
            return tail(said.fileno(), MOST_BYTES)
        lines = (tail(errors.fileno(), MOST_BYTES) + "\n" + tail(said.fileno(), MOST_BYTES)).splitlines()
    told = [line.strip() for line in lines if line.strip()]
    why = next((line for line in told if line.startswith("ERROR")), told[-1] if told else "it said nothing")
    is_final = any(words in line for line in told for words in FINAL)
    next_step = "another version, or another --python" if is_final else "run the command again"
    raise UnknownVerdict(f"{what} ended with status {child.returncode}: {why[:400]}; next: {next_step}")


def _wait(child: subprocess.Popen[bytes], last_line: Callable[[], str]) -> None:
    line = ProgressLine()
    try:
        while child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
                break
            line.show(last_line()[:200])
    finally:
        clear_passing()
        child.kill()  # where it was interrupted
        child.wait()
