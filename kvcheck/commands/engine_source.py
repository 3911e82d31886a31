"""Sources of an engine: a checkout linked into an environment, and the versions that an engine requires.

Invariants:
- A checkout is not run, built or copied, but linked as by an editable install: the next run judges its current state.
- A version comes from the user or the checkout; else it is 0+source.
"""

from __future__ import annotations

import json
import re
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.probes.installed import ROOTS, checkout_of
from kvcheck.core.run.store import write_text

LISTS = ("requirements/common.txt", "requirements/cpu.txt", "requirements-common.txt", "requirements.txt")
VERSIONED = re.compile(r"""^__version__\s*(?::[^=]*)?=\s*["']([0-9][\w.+!-]*)["']""", re.MULTILINE)
UNVERSIONED = "0+source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkout. package: the folder of the engine's package."""

    engine: str
    checkout: Path
    package: Path
    version: str
    asks: tuple[str, ...]


def source_of(engine: str, checkout: Path) -> Source:
    package = checkout_of(engine, checkout)
    if package is None:
        known = ", ".join(str(Path(root) / engine) for root in ROOTS)
        raise UsageError(f"--source {checkout}: expected a checkout with one of {known}, found none")
    project = _project(package.parent)
    return Source(
        engine=engine,
        checkout=checkout,
        package=package,
        version=_version(project, package),
        asks=_asks(project, package.parent),
    )


def link(source: Source, site: Path, version: str | None) -> str:
    """Link the checkout's package and version into an environment. Returns the version."""
    named = version or source.version
    info = site / f"{source.engine}-{named}.dist-info"
    origin = {"url": source.checkout.as_uri(), "dir_info": {"editable": True}}
    files = {
        site / f"__editable__.{source.engine}.pth": f"{source.package.parent}\n",
        info / "METADATA": f"Metadata-Version: 2.1\nName: {source.engine}\nVersion: {named}\n",
        info / "INSTALLER": "kvcheck\n",
        info / "direct_url.json": json.dumps(origin) + "\n",
    }
    for path, text in files.items():
        write_text(path, text)
    write_text(info / "RECORD", "".join(f"{path.relative_to(site).as_posix()},,\n" for path in files))
    return named


def check_requirement(text: str) -> None:
    """Raise UsageError unless the text is a package name with or without versions: no link, no option."""
    try:
        is_plain = not Requirement(text).url
    except InvalidRequirement:
        is_plain = False
    if not is_plain:
        raise UsageError(f"expected the name of a package, with a version or without, got {text!r}")


def requirements_of_wheel(wheel: Path) -> tuple[str, ...]:
    try:
        with zipfile.ZipFile(wheel) as packed:
            (name,) = (
                name for name in packed.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1
            )
            text = packed.read(name).decode("utf-8")
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise UnknownVerdict(f"{wheel.name}: not a wheel with one METADATA: {error}") from error
    return tuple(Parser().parsestr(text).get_all("Requires-Dist") or ())


def pins(asks: Iterable[str], names: Iterable[str], python: str) -> list[str]:
    """Return each name with its required versions. The first line about a package counts, except lines of extras."""
    asked = _by_name(asks, python)
    return [f"{name}{asked.get(canonicalize_name(name), '')}" for name in names]


def _by_name(lines: Iterable[str], python: str) -> dict[str, str]:
    where = {"extra": "", "python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
    found: dict[str, str] = {}
    for line in lines:
        try:
            each = Requirement(line.partition(" #")[0].strip())
        except InvalidRequirement:  # an option or a link of a requirements file, which names no version
            continue
        if each.marker is None or each.marker.evaluate(where):
            found.setdefault(canonicalize_name(each.name), str(each.specifier))
    return found


def _project(root: Path) -> dict[str, object]:
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{root / 'pyproject.toml'}: {error}; expected the checkout's own project file") from error
    return table if isinstance(table, dict) else {}


def _version(project: dict[str, object], package: Path) -> str:
    if isinstance(told := project.get("version"), str):
        return told
    for name in ("_version.py", "version.py", "__init__.py"):
        file = package / name
        if file.is_file() and (found := VERSIONED.search(file.read_text(encoding="utf-8", errors="replace"))):
            return found[1]
    return UNVERSIONED


def _asks(project: dict[str, object], root: Path) -> tuple[str, ...]:
    told = project.get("dependencies")
    if isinstance(told, list):
        return tuple(str(line) for line in told)
    files = [root / name for name in LISTS if (root / name).is_file()]
    return tuple(line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
