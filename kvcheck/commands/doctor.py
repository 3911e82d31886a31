"""`kvcheck doctor`, `kvcheck list` and `kvcheck explain`: facts of this machine and entries of kvcheck's tables.

Invariants:
- Only doctor inspects the machine. It makes the folder for runs, and removes temporary folders of killed runs.
- Versions are read from package metadata; torch is imported for other facts only.
- An unknown fact is "unknown", never "ok".
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.options import DEFAULT_OUT, Format
from kvcheck.commands.terminal import say
from kvcheck.core.base.cells import CONNECTIONS
from kvcheck.core.base.codes import BUGS, CODES, Code
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.registry import Registry, did_you_mean, unknown_name
from kvcheck.core.base.scratch import sweep
from kvcheck.core.base.server_facts import EvidenceKind
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.mooncake.library import LIBRARIES, why_unusable
from kvcheck.core.run.store import write_text

OLDEST_PYTHON = (3, 11)
PRESSURE_FILE = Path("/proc/pressure/cpu")
BUSY_PERCENT = 20.0

# Distribution, and what it is needed for. All of them take part in a CPU stress run and its reports.
REQUIRED = {
    "torch": "tensors",
    "numpy": "patterns",
    "typer": "the command line",
    "pandas": "CSV reports",
    "matplotlib": "HTML reports",
    "jinja2": "HTML reports",
}
ENGINE = "mooncake-transfer-engine"
# Distribution: the command that installs it, and what it is for.
OPTIONAL = {
    "triton": ("pip install triton", "CUDA kernels"),
    "numba": ("pip install 'kvcheck[fast]'", "digests and compares large host memory as fast as one core reads it"),
    "pytest": ("pip install pytest", "tests of your own pool: pytest --kvcheck"),
    ENGINE: ("pip install 'kvcheck[mooncake]'", "the mooncake transport, and the cell of kvcheck stress over it"),
}

# Kind of `kvcheck list`: the tables that hold it, as "module:attribute".
KINDS: dict[str, tuple[str, ...]] = {
    "scenarios": ("kvcheck.core.stress.scenarios:SCENARIOS",),
    "shapes": ("kvcheck.core.stress.workload.shapes:SHAPES",),
    "oracles": ("kvcheck.core.stress.oracles:ORACLES",),
    "mutants": ("kvcheck.core.stress.targets.mutants:MUTANTS",),
    "strategies": ("kvcheck.core.stress.strategies:STRATEGIES",),
    "decoders": ("kvcheck.core.stress.workload:DECODERS",),
    "targets": ("kvcheck.core.stress.targets:TARGETS",),
    "engines": ("kvcheck.core.probes.installed:ENGINES",),
    "probes": ("kvcheck.core.probes.installed:probes",),
    "transports": ("kvcheck.core.cache.transfer:TRANSPORTS",),
    "cases": ("kvcheck.core.bench:CASES",),
    "formats": (
        "kvcheck.core.report:WRITERS",
        "kvcheck.core.report:GATE_WRITERS",
        "kvcheck.core.report:COMPARISON_WRITERS",
        "kvcheck.core.report:STORY_WRITERS",
    ),
    "codes": ("kvcheck.core.base.codes:CODES",),
    "server-scenarios": ("kvcheck.core.live.scenarios:LIVE_SCENARIOS",),
    "servers": ("kvcheck.core.live.clients:CLIENTS",),
    "evidence": ("kvcheck.core.base.server_facts:OBSERVED",),
    "situations": ("kvcheck.core.base.situations:SITUATIONS",),
}
NOTES = {
    "probes": "For kvcheck probe ENGINE --probe NAME, or NAME.SUBJECT.",
    "server-scenarios": "For kvcheck live URL.",
    "servers": "Engines that kvcheck asks over HTTP.",
    "evidence": "What a running server did under requests that were judged.",
    "situations": "What a schedule makes happen, by the state in which it happens.",
}
EXPLAINED_KINDS = ("oracles", "mutants", "scenarios")
EXPLAINED = (*EXPLAINED_KINDS, *(kind for kind in KINDS if kind not in (*EXPLAINED_KINDS, "codes")))
"""Kinds in the order in which a name is looked for."""
_ONE_OF = {"strategies": "strategy", "evidence": "evidence"}
CARD_FIELDS = ("shows", "matters", "example")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of doctor. state: "ok", "missing" or "unknown"."""

    name: str
    state: str
    detail: str
    fix: str = ""
    needed: bool = False


def doctor(
    out: Annotated[Path, typer.Option(help="Folder where runs will be stored.")] = DEFAULT_OUT,
    format_name: Format = "text",
) -> None:
    """Exit with 0 if a stress run on the CPU has all its requirements, else with 4."""
    checks = [_python(), _platform(), *_libraries(), *_torch_checks(), _pressure(), _leftovers(), _writable(out)]
    width = max(len(check.name) for check in checks)
    if format_name == "json":
        typer.echo(json.dumps([asdict(check) for check in checks], indent=1))
    for check in checks if format_name == "text" else ():
        fix = f"   fix: {check.fix}" if check.fix else ""
        say(f"{check.state:<8} {check.name:<{width}}  {check.detail}{fix}")
    wanting = [check for check in checks if check.needed and check.state != "ok"]
    if wanting:
        names = ", ".join(check.name for check in wanting)
        raise UnknownVerdict(f"a stress run on the CPU cannot be judged here: missing {names}; next: {wanting[0].fix}")
    if format_name == "text":
        say("All that a stress run on the CPU needs is here: kvcheck stress")


def list_kind(
    kind: Annotated[str | None, typer.Argument(help=f"{', '.join(KINDS)}. Default: these kinds.")] = None,
    format_name: Format = "text",
) -> None:
    table = {each: NOTES.get(each, "") for each in KINDS} if kind is None else things(kind)
    rows = [_row(name, thing) for name, thing in table.items()]
    if format_name == "json":
        typer.echo(json.dumps(rows, indent=1))
        return
    if kind is None:
        say("kvcheck list KIND, with one of these kinds:")
    elif kind in NOTES:
        say(NOTES[kind])
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        breaks = f" (breaks {', '.join(row['breaks'])})" if "breaks" in row else ""
        say(f"{row['name']:<{width}}  {row['about']}".rstrip() + breaks)


def explain(
    code: Annotated[
        str | None,
        typer.Argument(help="A finding code such as KV102, a bug's letter, or a name that kvcheck list prints."),
    ] = None,
    format_name: Format = "text",
) -> None:
    if code is None:
        kinds = ", ".join((*EXPLAINED_KINDS, "codes", *EXPLAINED[len(EXPLAINED_KINDS) :]))
        raise UsageError(
            f"explain: expected a code such as KV102, or a name that kvcheck list KIND prints; kinds: {kinds}"
        )
    card = _card(code)
    if format_name == "json":
        typer.echo(json.dumps(card, indent=1))
        return
    for key, value in card.items():
        for line in [f"{key.replace('_', ' ')}: {value}"] if "\n" not in value else [f"{key}:", *value.splitlines()]:
            say(line)


def things(kind: str) -> dict[str, object]:
    """Return rows by name, over all tables of one kind; sentences for a registry. Raises UsageError."""
    if kind not in KINDS:
        raise UsageError(unknown_name("kind", kind, KINDS))
    found: dict[str, object] = {}
    for entry in KINDS[kind]:
        module, attribute = entry.split(":")
        table = getattr(importlib.import_module(module), attribute)
        table = table() if callable(table) else table
        if isinstance(table, Registry):
            found |= {name: _text_of(table, name) for name in table.names() if name not in found}
        elif isinstance(table, Mapping):
            found.update((str(name), thing) for name, thing in table.items())
        else:
            assert isinstance(table, Iterable), f"{entry} is neither a table nor a row of names"
            found.update((str(getattr(thing, "name", thing)), thing) for thing in table)
    return found


def _text_of(table: Registry[object], name: str) -> str:
    try:
        thing = table.load(name)
    except ImportError as error:
        return " ".join(filter(None, (table.about(name), f"It is not usable here: {error}.")))
    return table.about(name) or str(getattr(thing, "shows", ""))


def _row(name: str, thing: object) -> dict[str, str | list[str]]:
    row: dict[str, str | list[str]] = {"name": name, "about": _about(thing)}
    if isinstance(thing, ModelShape):
        row["source"] = thing.source
    if isinstance(thing, EvidenceKind):
        row["unit"] = thing.unit
    if breaks := _breaks(thing):
        row["breaks"] = breaks
    return row


def _about(thing: object) -> str:
    if isinstance(thing, Code):
        return f"{thing.title}: {thing.meaning}"
    if isinstance(thing, ModelShape):
        return f"{thing.family}: {_sentence(thing.source)}"
    if isinstance(thing, EvidenceKind):
        return f"{thing.meaning[:1].upper()}{thing.meaning[1:]}; counted in {thing.unit}."
    return _sentence(thing if isinstance(thing, str) else str(getattr(thing, "shows", "")))


def _sentence(text: str) -> str:
    first, stop, _ = text.partition(". ")
    return f"{first}." if stop else text


def _card(name: str) -> dict[str, str]:
    """Return the card of a code, a bug or a row of a kind. Raises UsageError with a near match."""
    if (known := CODES.get(name.upper())) is not None:
        return {key: str(value) for key, value in asdict(known).items()}
    names = list(CODES)
    looks_like_code = re.fullmatch(r"(?i)kv\d+", name) is not None
    for kind in () if looks_like_code else EXPLAINED:
        for key, thing in things(kind).items():
            names.append(key)
            if key.lower() == name.lower():
                if kind == "probes":
                    from kvcheck.commands.changed import probe_card

                    return {"probe": key, **probe_card(key)}
                about = (
                    {"card": str(thing)}
                    if kind in EXPLAINED_KINDS
                    else {"about": _about(thing), "see": f"kvcheck list {kind}"}
                )
                return {_ONE_OF.get(kind, kind.removesuffix("s")): key, **(_prose(thing) or about)}
    if name.lower() in (letters := {text[0]: text for text in BUGS.values()}):
        return {"bug": letters[name.lower()], "see": "docs/bugs.md"}
    titled = [f"{code} {row.title}" for code, row in CODES.items() if name.lower() in row.title.split()]
    near = f"; codes with this word: {', '.join(titled)}" if titled else did_you_mean(name, names)
    raise UsageError(
        f"nothing called {name!r} to explain; expected a code, or a name that kvcheck list prints{near}; "
        "see kvcheck list codes"
    )


def _prose(thing: object) -> dict[str, str]:
    if not any(isinstance(getattr(thing, field, None), str) for field in CARD_FIELDS):
        return {}
    fields = ("bug", "scenario", "shape", "killed_by", "code", "bound", *CARD_FIELDS)
    card = {field: str(getattr(thing, field)) for field in fields if isinstance(getattr(thing, field, None), str)}
    return card | ({"breaks": "\n".join(breaks)} if (breaks := _breaks(thing)) else {})


def _breaks(thing: object) -> list[str]:
    return list(getattr(thing, "breaks", ()))


def _python() -> Check:
    enough = sys.version_info[:2] >= OLDEST_PYTHON
    oldest = ".".join(map(str, OLDEST_PYTHON))
    detail = platform.python_version() if enough else f"{platform.python_version()}, older than {oldest}"
    fix = "" if enough else f"install Python {oldest} or newer"
    return Check(name="python", state="ok" if enough else "missing", detail=detail, fix=fix, needed=True)


def _platform() -> Check:
    system, release = platform.system(), platform.release()
    is_tried = system == "Linux" and "microsoft" not in release.lower()
    detail = f"{system} {release}" + ("" if is_tried else ": kvcheck has been tried on Linux alone, not on WSL")
    return Check(name="platform", state="ok" if is_tried else "unknown", detail=detail)


def _libraries() -> list[Check]:
    checks = [_library(name, fix=f"pip install {name}", use=use, needed=True) for name, use in REQUIRED.items()]
    return checks + [_library(name, fix=fix, use=use, needed=False) for name, (fix, use) in OPTIONAL.items()]


def _library(name: str, *, fix: str, use: str, needed: bool) -> Check:
    version = _version(name, variants=not needed)
    if version is None:
        return Check(name=name, state="missing", detail=f"for {use}", fix=fix, needed=needed)
    if name == ENGINE and (why := why_unusable()) is not None:
        return Check(name=name, state="missing", detail=f"{version}, for {use}: {why}", fix=LIBRARIES, needed=needed)
    return Check(name=name, state="ok", detail=version, needed=needed)


def _version(name: str, *, variants: bool) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        for found in importlib.metadata.distributions() if variants else ():
            if found.name.startswith(f"{name}-"):
                return f"{found.version} ({found.name})"
    return None


def _torch_checks() -> list[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a broken build fails in the loader of its shared libraries
        detail = f"torch cannot be imported: {error}"
        fix = "pip install --force-reinstall torch"
        return [
            Check(name="torch threads", state="missing", detail=detail, fix=fix, needed=True),
            Check(name="CUDA device", state="unknown", detail="torch is needed to look for one"),
        ]
    threads = Check(name="torch threads", state="ok", detail=str(torch.get_num_threads()), needed=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        found = Check(name="CUDA device", state="ok", detail=f"{count} x {', '.join(names)}")
        return [threads, found, _held_lanes()]
    reason = str(said[0].message).splitlines()[0] if said else f"torch {torch.__version__} sees none"
    fix = "install a driver and a CUDA build of torch; the CPU needs neither"
    return [threads, Check(name="CUDA device", state="missing", detail=reason, fix=fix)]


def _held_lanes() -> Check:
    """Check that streams of the first device run beside a held one."""
    from kvcheck.core.cache.backend.cuda import CudaDevice
    from kvcheck.core.cache.backend.probe import probe

    name = "held lanes"
    try:
        found = probe(CudaDevice(0))
    except UnknownVerdict as error:
        return Check(name=name, state="unknown", detail=str(error))
    except RuntimeError as error:
        detail = f"the device failed: {str(error).splitlines()[0]}"
        return Check(name=name, state="unknown", detail=detail, fix="look at the driver's log, then run doctor again")
    most = " ".join(f"{name}={value}" for name, value in CONNECTIONS.items())
    fix = f"{most} gives more streams a queue of their own, if set before the process starts" if found.behind else ""
    return Check(name=name, state="ok", detail=found.text, fix=fix)


def _pressure() -> Check:
    """Report how long runnable work waited for a CPU, which distorts measured times."""
    name = "CPU noise"
    try:
        some = PRESSURE_FILE.read_text(encoding="ascii").splitlines()[0]
        percent = float(dict(part.split("=") for part in some.split()[1:])["avg10"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        fix = "boot with psi=1 to measure it; stress runs need it not"
        return Check(name=name, state="unknown", detail=f"{PRESSURE_FILE}: {error}", fix=fix)
    busy = "; busy, times will scatter" if percent >= BUSY_PERCENT else ""
    return Check(name=name, state="ok", detail=f"work waited {percent:.1f}% of the last 10 s{busy}")


def _leftovers() -> Check:
    name, swept = "temporary folders", sweep()
    removed = f"removed {', '.join(swept.removed)}, left by runs that were killed" if swept.removed else ""
    if swept.kept:
        said = f"cannot remove {'; '.join(swept.kept)}"
        return Check(name=name, state="unknown", detail="; ".join(filter(None, (said, removed))))
    return Check(name=name, state="ok", detail=removed or "none is left by a run that was killed")


def _writable(out: Path) -> Check:
    """Write a file to check that runs can be stored: permissions are not enough."""
    probe = out / ".kvcheck-doctor"
    try:
        write_text(probe, "kvcheck doctor\n")
        probe.unlink()
    except (UsageError, OSError) as error:
        return Check(
            name="reports folder", state="missing", detail=str(error), fix="kvcheck stress --out DIR", needed=True
        )
    return Check(name="reports folder", state="ok", detail=f"{out} can be written", needed=True)
