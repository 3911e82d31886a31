"""`kvcheck env`: an environment with a release of an engine, or with a checkout of it, for its probes.

For a CPU the requirements of the release are left out: a CUDA build of torch and gigabytes of compiled kernels. NEEDS
lists the engine's imports at load. For a GPU all requirements are installed, once the driver reports one, and compiled
code has to run on the device.

Invariants:
- Names, versions and folders are checked before they become arguments of pip.
- A foreign folder stays as it is. An unfinished one is made anew.
- A finished environment has all imports of the probes. If pip or the network fails, the exit code is 4.
- A checkout is not run, built or copied, but linked as by an editable install: the next run judges its current state.
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
import tomllib
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kvcheck.commands.options import Format
from kvcheck.commands.terminal import print_json, say
from kvcheck.core.base.cells import DRIVER
from kvcheck.core.base.child import StandardStreams, close_input, kill_group, spawn, tail
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.identity import MOONCAKE_BUILDS, commit_of
from kvcheck.core.base.nouns import counted
from kvcheck.core.probes import import_check
from kvcheck.core.probes.frame.tables import VARIABLES
from kvcheck.core.probes.installed import ENGINES, ROOTS, checkout_of
from kvcheck.core.run.store import make_folder, write_text

CPU, CUDA = "cpu", "cuda"
TORCH = "torch==2.13.0"
MARKER = "kvcheck-env.json"
HAS = "requirements.txt"
"""In a base: its installed requirements, one a line."""
VERSION = re.compile(r"[0-9][A-Za-z0-9.+!_-]{0,60}")
CHECK_S = 600.0
ELSEWHERE = "name another"
LISTS = ("requirements/common.txt", "requirements/cpu.txt", "requirements-common.txt", "requirements.txt")
"""Requirements of a checkout whose project file has none."""
VERSIONED = re.compile(r"""^__version__\s*(?::[^=]*)?=\s*["']([0-9][\w.+!-]*)["']""", re.MULTILINE)
UNVERSIONED = "0+source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Imports of an engine. light: of the base. own: of the release alone, without dependencies. full: with
    dependencies. leave_out: files of the package that need a GPU. build: the distribution, if named otherwise.
    has_base: whether it needs torch."""

    light: tuple[str, ...]
    own: tuple[str, ...]
    full: tuple[str, ...] = ("transformers",)
    leave_out: str | None = None
    build: str | None = None
    has_base: bool = True


BASE = ("numpy", "triton")
GRAMMARS = ("transformers", "xgrammar", "apache-tvm-ffi")
"""Installed together, so that an unpinned version suits the pinned ones of a release."""
SERVING = (
    *("orjson", "pyzmq", "pillow", "psutil", "pybase64", "requests", "aiohttp", "openai", "partial_json_parser"),
    *("sentencepiece", "compressed_tensors", "gguf", "msgspec", "einops", "prometheus_client", "fastapi", "uvloop"),
)
NEEDS = {
    "sglang": Needs(light=(*SERVING, "starlette", "ipython", "dill"), own=(), full=GRAMMARS),
    "vllm": Needs(
        light=(*SERVING, "regex"),
        own=("cbor2", "openai_harmony", "cachetools", "cloudpickle", "py-cpuinfo", "llguidance", "blake3"),
        full=GRAMMARS,
        leave_out="*.so",
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
    "mooncake": Needs(
        light=(), own=(), full=("requests", "aiohttp", "msgpack"), build=MOONCAKE_BUILDS[0], has_base=False
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is asked for. base: the environment with torch that several share; None: no torch, or the release's own."""

    engine: str
    version: str | None
    source: Path | None
    folder: Path
    base: Path | None
    python: str
    torch: str
    also: tuple[str, ...]
    device: str

    @property
    def facts(self) -> dict[str, object]:
        """Content of the marker file; equal for equal orders."""
        source = None if self.source is None else str(self.source)
        device = {} if self.device == CPU else {"device": self.device}
        return {"engine": self.engine, "version": self.version, "source": source, "also": [*self.also], **device}


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
    format_name: Format = "text",
) -> None:
    *named, place = words
    engine, version = _release(named, source)
    program, folder = shutil.which(python or sys.executable), Path(place).absolute()
    if program is None:
        raise UsageError(f"--python {python}: expected an interpreter, found none")
    if device not in (CPU, CUDA):
        raise UsageError(f"--device {device}: expected {CPU} or {CUDA}")
    if device == CUDA and (base is not None or torch is not None):
        raise UsageError("--device cuda: expected no --base and no --torch, as each release brings a torch of its own")
    if device == CUDA and not any(CUDA in row.devices for row in ENGINES.load(engine).probes):
        raise UsageError(f"--device {CUDA}: no probe of {engine} runs on a GPU; leave --device out")
    for name in (torch or TORCH, *(also or ())):
        if (asked := _requirement(name)) is None or asked.url:
            raise UsageError(f"expected the name of a package, with a version or without, got {name!r}")
    if source is not None and checkout_of(engine, source) is None:
        known = ", ".join(str(Path(root) / engine) for root in ROOTS)
        raise UsageError(f"--source {source}: expected a checkout with one of {known}, found none")
    shared = folder.with_name(f"{folder.name}-base") if base is None else base.absolute()
    if shared == folder:
        raise UsageError(f"--base {base}: expected another folder than the environment itself")
    order = Order(
        engine=engine,
        version=version,
        source=None if source is None else source.absolute(),
        folder=folder,
        base=shared if device == CPU and NEEDS[engine].has_base else None,
        python=program,
        torch=torch or TORCH,
        also=tuple(also or ()),
        device=device,
    )
    is_made = _is_made(order)
    with redirect_stdout(sys.stderr if format_name == "json" else sys.stdout):
        say(f"An environment that can import {engine} is enough: kvcheck probe {engine}:VENV")
        if not is_made:
            _make(order)
    version = _installed(folder, NEEDS[engine].build or engine).version
    target = f"kvcheck probe {engine}:{folder}{'' if device == CPU else ' --device cuda'}"
    if format_name == "json":
        made = {"engine": engine, "version": version, "folder": str(folder)}
        print_json({**made, "made_before": is_made, "next": target})
    else:
        say(f"{place}: made before; next: {target}" if is_made else f"{folder}: {engine} {version}; next: {target}")


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


def _requirement(line: str) -> Requirement | None:
    try:
        return Requirement(line.partition(" #")[0].strip())
    except InvalidRequirement:  # an option or a link of a requirements file, which names no version
        return None


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


def _is_made(order: Order) -> bool:
    """Whether the environment is finished. Raise UsageError for a foreign folder or one of another order."""
    folder, marker = order.folder, order.folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: expected a new folder, got a file")
    if not marker.is_file():
        if folder.exists() and any(folder.iterdir()):
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


def _make(order: Order) -> None:
    folder, needs = order.folder, NEEDS[order.engine]
    if order.device == CUDA and (why := no_device()) is not None:
        raise UnknownVerdict(
            f"--device {CUDA}: {why}; nothing was installed; next: the same command on the machine with the GPU"
        )
    if order.base is not None:
        say(f" base with torch in {order.base}")
        _make_base(order, order.base)
    say(f" environment in {folder}")
    if (folder / MARKER).is_file():
        say(f"   {folder} was not finished: it is made anew")
        shutil.rmtree(folder)
    make_folder(folder, elsewhere=ELSEWHERE)
    _mark(order, made=False)
    _run([order.python, "-I", "-m", "venv", str(folder)])
    if order.base is not None:
        write_text(_site(folder) / "base.pth", f"{_site(order.base)}\n")
    version = order.version or UNVERSIONED
    if order.source is not None:
        version = _link(order, order.source)
    if order.device == CUDA:
        say(f" {order.engine}=={version} and all that it asks for: gigabytes")
        _install(folder, f"{order.engine}=={version}", *order.also)
    else:
        name = needs.build or order.engine
        if order.source is None:
            _install(folder, "--no-deps", "--only-binary", ":all:", f"{name}=={version}")
        for file in _site(folder).glob(f"{order.engine}/**/{needs.leave_out}") if needs.leave_out else ():
            file.unlink()
        say(" packages of the release")
        wanted = (*needs.full, *needs.own, *order.also)
        pins = [f"torch=={_installed(order.base, 'torch').version}"] if order.base is not None else []
        pins += versions(_installed(folder, name).requires or (), wanted)
        write_text(folder / "constraints.txt", "\n".join(pins) + "\n")
        given = ("--constraint", str(folder / "constraints.txt"))
        _install(folder, *given, *needs.full, *order.also)
        if needs.own:
            _install(folder, *given, "--no-deps", *needs.own)
    say(" imports")
    _check_imports(order)
    _mark(order, made=True)


def _mark(order: Order, *, made: bool) -> None:
    write_text(order.folder / MARKER, json.dumps({"order": order.facts, "made": made}, indent=1) + "\n")


def _make_base(order: Order, base: Path) -> None:
    has = base / HAS
    if base.exists() and not has.is_file() and (not base.is_dir() or any(base.iterdir())):
        raise UsageError(f"--base {base}: expected a new folder or a base, which has a {HAS}; name another")
    make_folder(base, elsewhere=ELSEWHERE)
    if not has.is_file():
        write_text(has, "")
    known = has.read_text(encoding="utf-8").split()
    torch = next((each for each in known if re.match(r"torch\b(?![-_])", each)), None)
    if torch not in (None, order.torch):
        raise UsageError(f"--base {base}: made with {torch}; expected {order.torch}; name another base")
    if not (base / "bin" / "python").exists():
        _run([order.python, "-I", "-m", "venv", str(base)])
    if lacks := [each for each in (order.torch, *BASE, *NEEDS[order.engine].light) if each not in known]:
        say(f"   {counted(len(lacks), 'package')}{'' if known else ', gigabytes, once for all engines'}")
        _install(base, order.torch, *lacks)
        # compressed_tensors and others pull a transformers of their own; each release brings its own.
        unwanted = ("transformers", "huggingface_hub", "tokenizers")
        _run([str(base / "bin" / "python"), "-I", "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted])
        write_text(has, "\n".join((*known, *lacks)) + "\n")


def versions(asks: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the requirements on these packages, as constraints of pip, which takes no extras."""
    wanted = {canonicalize_name(name) for name in names}
    found = [each for line in asks if (each := _requirement(line)) and canonicalize_name(each.name) in wanted]
    return [f"{each.name}{each.specifier}{f'; {each.marker}' if each.marker else ''}" for each in found]


def _link(order: Order, checkout: Path) -> str:
    """Link the checkout's package, with its version and requirements. Returns the version."""
    package, site = checkout_of(order.engine, checkout), _site(order.folder)
    assert package is not None, "a checkout of the engine"
    say(f" {checkout}: {commit_of(package) or 'git knows no commit of it'}")
    told, asks = described(package)
    version = order.version or told
    info = site / f"{order.engine}-{version}.dist-info"
    origin = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    about = f"Metadata-Version: 2.1\nName: {order.engine}\nVersion: {version}\n"
    files = {
        site / f"__editable__.{order.engine}.pth": f"{package.parent}\n",
        info / "METADATA": about + "".join(f"Requires-Dist: {each}\n" for each in map(_requirement, asks) if each),
        info / "INSTALLER": "kvcheck\n",
        info / "direct_url.json": json.dumps(origin) + "\n",
    }
    for path, text in files.items():
        write_text(path, text)
    write_text(info / "RECORD", "".join(f"{path.relative_to(site).as_posix()},,\n" for path in files))
    return version


def described(package: Path) -> tuple[str, list[str]]:
    """Return the version and the requirements of a checkout. Raises UsageError."""
    root = package.parent
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except FileNotFoundError:
        project = {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{root / 'pyproject.toml'}: {error}; expected the checkout's own project file") from error
    files = [package / name for name in ("_version.py", "version.py", "__init__.py")]
    found = [VERSIONED.search(file.read_text(encoding="utf-8", errors="replace")) for file in files if file.is_file()]
    version = project.get("version") or next((each[1] for each in found if each), UNVERSIONED)
    lists = [root / name for name in LISTS if (root / name).is_file()]
    lines = [line for file in lists for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return version, project.get("dependencies", lines)


def _check_imports(order: Order) -> None:
    python = order.folder / "bin" / "python"
    with tempfile.TemporaryFile("w+") as answers, tempfile.TemporaryFile() as said:
        streams = StandardStreams(stdin=subprocess.PIPE, stdout=answers, stderr=said)
        asked = (import_check.__name__, order.engine, order.device)
        started = spawn(*asked, streams=streams, variables=VARIABLES[order.device], engine_python=python)
        try:
            started.greet(CHECK_S)
            status = started.process.wait(CHECK_S)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise UnknownVerdict(f"{python}: imports took more than {CHECK_S:g} s") from error
        finally:
            kill_group(started.process)
            close_input(started.process)
        answers.seek(0)
        lines = answers.read().splitlines() or (tail(said.fileno(), 20_000).splitlines()[-1:] if status else [])
    if status or lines:
        raise UnknownVerdict(
            f"{order.folder} is not made: {'; '.join(lines) or f'status {status}'}; next: the same command with --also "
            "PACKAGE for a package that is missing or too new, or an environment of your own in which "
            f"{order.engine} can be imported: kvcheck probe {order.engine}:VENV"
        )


def _site(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def _installed(folder: Path, name: str) -> metadata.Distribution:
    places = [str(each) for each in folder.glob("lib/python*/site-packages")]
    found = next(iter(metadata.distributions(name=name, path=places)), None)
    if found is None:
        raise UsageError(f"{folder}: expected {name} in it, found none; remove the folder and run the command again")
    return found


def _install(folder: Path, *arguments: str) -> None:
    # An engine lacks what the probes do not import, of which pip would warn.
    _run([str(folder / "bin" / "python"), "-I", "-m", "pip", "install", "--no-warn-conflicts", *arguments])


def _run(command: list[str]) -> None:
    """Run a program that prints on stderr. Raises UnknownVerdict if it fails."""
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    try:
        done = subprocess.run(command, env={**os.environ, **quiet}, stdin=subprocess.DEVNULL, stdout=2)
    except OSError as error:
        raise UnknownVerdict(f"{command[0]} cannot be started: {error}") from error
    if done.returncode:
        raise UnknownVerdict(
            f"{' '.join(command[3:5])} ended with status {done.returncode}, see above; next: the command again if the "
            "network failed, or another version or --python"
        )
