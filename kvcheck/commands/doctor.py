"""`kvcheck doctor`, `kvcheck list` and `kvcheck explain`: facts of this machine and entries of kvcheck's tables.

Invariants:
- Only doctor inspects the machine. It makes the folder for runs, and removes temporary folders of killed runs.
- Versions are read from package metadata; torch is imported for other facts only.
- An unknown fact is "unknown", never "ok".
"""

from __future__ import annotations

import importlib
import importlib.metadata
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
from kvcheck.commands.terminal import columns, print_json, say, say_fitting, say_table
from kvcheck.core.base.cells import CONNECTIONS
from kvcheck.core.base.codes import BUGS, CODES, Code
from kvcheck.core.base.errors import UnknownVerdict, UsageError, installation_of
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.registry import Registry, did_you_mean, unknown_name
from kvcheck.core.base.scratch import sweep
from kvcheck.core.base.server_facts import EvidenceKind
from kvcheck.core.cache.transfer.mooncake.library import LIBRARIES, why_unusable
from kvcheck.core.report.wording import LABEL, labelled
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

# Kind of `kvcheck list`: its use, and the tables that hold it, as "module:attribute".
KINDS: dict[str, tuple[str, ...]] = {
    "scenarios": ("Workloads, for kvcheck stress NAME.", "kvcheck.core.stress.scenarios:SCENARIOS"),
    "shapes": ("Models and their pools, for --shape NAME.", "kvcheck.core.stress.workload.shapes:SHAPES"),
    "oracles": ("Judges of a schedule's history.", "kvcheck.core.stress.oracles:ORACLES"),
    "mutants": ("Bugs put back, for kvcheck stress --mutant NAME.", "kvcheck.core.stress.targets.mutants:MUTANTS"),
    "strategies": ("Orders of operations, for --strategy NAME.", "kvcheck.core.stress.strategies:STRATEGIES"),
    "decoders": ("Sources of tokens, for --decoder NAME.", "kvcheck.core.stress.workload:DECODERS"),
    "targets": ("Caches, for --target NAME; also MODULE:NAME, code of yours.", "kvcheck.core.stress.targets:TARGETS"),
    "engines": ("Installed engines, for kvcheck probe NAME.", "kvcheck.core.probes.installed:ENGINES"),
    "probes": ("For kvcheck probe ENGINE --probe NAME, or NAME.SUBJECT.", "kvcheck.core.probes.installed:probes"),
    "transports": ("Ways between ranks, for --transport NAME.", "kvcheck.core.cache.transfer:TRANSPORTS"),
    "cases": ("Prices, for kvcheck bench NAME.", "kvcheck.core.bench:CASES"),
    "formats": (
        "Reports, for -o NAME=PATH.",
        "kvcheck.core.report:WRITERS",
        "kvcheck.core.report:GATE_WRITERS",
        "kvcheck.core.report:COMPARISON_WRITERS",
        "kvcheck.core.report:STORY_WRITERS",
    ),
    "codes": ("Kinds of findings.", "kvcheck.core.base.codes:CODES"),
    "server-scenarios": ("For kvcheck live URL NAME.", "kvcheck.core.live.scenarios:LIVE_SCENARIOS"),
    "servers": ("Engines whose running servers can be checked.", "kvcheck.core.live.clients:CLIENTS"),
    "evidence": (
        "Work of a running server under requests that were judged.",
        "kvcheck.core.base.server_facts:OBSERVED",
    ),
    "situations": (
        "Events of schedules, by the state in which they happen.",
        "kvcheck.core.base.situations:SITUATIONS",
    ),
}
EXPLAINED_KINDS = ("oracles", "mutants", "scenarios")
EXPLAINED = (*EXPLAINED_KINDS, *(kind for kind in KINDS if kind not in (*EXPLAINED_KINDS, "codes")))
"""Kinds in the order in which a name is looked for."""
RUN_BY = {"mutants": "kvcheck stress --mutant {} --seed 1", "scenarios": "kvcheck stress {} --seed 1"}
_ONE_OF = {"strategies": "strategy", "evidence": "evidence"}
BY_LETTER = {text[0]: text for text in BUGS.values()}
Row = dict[str, str | int | list[str]]
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
    if format_name == "json":
        print_json(checks)
    else:
        say_table(("state", "part", "found"), [(check.state, check.name, check.detail) for check in checks])
        if fixes := [(check.name, check.fix) for check in checks if check.fix]:
            say()
            say_table(("part", "fix"), fixes)
        say()
    wanting = [check for check in checks if check.needed and check.state != "ok"]
    if wanting:
        names = ", ".join(check.name for check in wanting)
        raise UnknownVerdict(f"a stress run on the CPU cannot be judged here: missing {names}; next: {wanting[0].fix}")
    if format_name == "text":
        others = counted(sum(check.state != "ok" for check in checks), "other part")
        say_fitting(f" PASS  all that a stress run on the CPU needs is here; {others} missing or unknown")
        say(" next   kvcheck stress")


def list_kind(
    kind: Annotated[str | None, typer.Argument(help=f"{', '.join(KINDS)}. Default: these kinds.")] = None,
    format_name: Format = "text",
) -> None:
    rows = _kinds() if kind is None else [_row(name, thing) for name, thing in things(kind).items()]
    if format_name == "json":
        print_json(rows)
    elif kind is None:
        _say_kinds(rows)
    else:
        say_table(("name", "meaning"), [(str(row["name"]), str(row["about"])) for row in rows])
        say()
        say_fitting(f" {counted(len(rows), 'name')}. {KINDS[kind][0]}")
        say(f" next   kvcheck explain {rows[0]['name']}")


def explain(
    code: Annotated[
        str | None,
        typer.Argument(help="A finding code such as KV102, a bug's letter, or a name that kvcheck list prints."),
    ] = None,
    format_name: Format = "text",
) -> None:
    if code is None:
        if format_name == "text":
            _say_kinds(_kinds())
        raise UsageError("explain: expected a code such as KV102, or a name that kvcheck list KIND prints")
    card = _card(code)
    if format_name == "json":
        print_json(card)
        return
    for key, value in card.items():
        first, *more = value.splitlines()
        for line in labelled(key.replace("_", " "), first, columns()):
            say(line)
        for line in more:
            say(f"{'':{LABEL + 1}}{line}")


def things(kind: str) -> dict[str, object]:
    """Return rows by name, over all tables of one kind; sentences for a registry. Raises UsageError."""
    if kind not in KINDS:
        raise UsageError(unknown_name("kind", kind, KINDS))
    found: dict[str, object] = {}
    for entry in KINDS[kind][1:]:
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


def _kinds() -> list[Row]:
    named = {kind: [*things(kind)] for kind in KINDS}
    return [
        {"name": kind, "about": KINDS[kind][0], "names": len(names), "example": names[0]}
        for kind, names in named.items()
    ]


def _say_kinds(rows: list[Row]) -> None:
    heads = ("kind", "names", "an example", "use")
    say_table(heads, [tuple(str(row[key]) for key in ("name", "names", "example", "about")) for row in rows])
    say()
    say(" next   kvcheck list mutants, kvcheck explain KV102")


def _text_of(table: Registry[object], name: str) -> str:
    try:
        thing = table.load(name)
    except ImportError as error:
        return " ".join(filter(None, (table.about(name), f"It is not usable here: {error}.")))
    return table.about(name) or str(getattr(thing, "shows", ""))


def _row(name: str, thing: object) -> Row:
    row: Row = {"name": name, "about": _about(thing)}
    if source := getattr(thing, "source", ""):  # of a ModelShape, whose module loads torch
        row["source"] = source
    if isinstance(thing, EvidenceKind):
        row["unit"] = thing.unit
    if breaks := _breaks(thing):
        row["breaks"] = breaks
    return row


def _about(thing: object) -> str:
    if isinstance(thing, Code):
        return f"{thing.title}: {thing.meaning}"
    if source := getattr(thing, "source", ""):
        return f"{getattr(thing, 'family', '')}: {_sentence(source)}"
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
                card = {_ONE_OF.get(kind, kind.removesuffix("s")): key, **(_prose(thing) or about)}
                return card | ({"next": RUN_BY[kind].format(key)} if kind in RUN_BY else {})
    if name.lower() in BY_LETTER:
        return {"bug": BY_LETTER[name.lower()], "see": "docs/bugs.md"}
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
    if "bug" in card:
        card["bug"] = BY_LETTER.get(card["bug"], card["bug"])
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
    checks = [_library(name, fix=installation_of([name]), use=use, needed=True) for name, use in REQUIRED.items()]
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
        is_absent = isinstance(error, ModuleNotFoundError)
        fix = installation_of(["torch"]) if is_absent else "pip install --force-reinstall torch"
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
