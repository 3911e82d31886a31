"""What was changed in an engine, as parts that run or do not.

Invariants:
- A change without code of its own, such as a removed line, has run once the lines before and behind it have.
- A line outside functions has run once a function of its file has.
- A row is stale once a file that it ran has changed. It is measured again, the others stay. Another kvcheck has a map
  of its own.
- A cell whose child was lost has no row, and may run any file.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType

from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.errors import UnknownVerdict, UsageError, why_unread
from kvcheck.core.base.identity import code_digest, file_digest, git
from kvcheck.core.base.nouns import some_of
from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.probes.frame.lines_run import as_ranges, from_ranges
from kvcheck.core.probes.installed import parse_target
from kvcheck.core.probes.runner import ProbeRunner
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.store import write_text

RANGE = re.compile(r"([\w@][\w./~^@{}+-]*?)(?:(\.\.\.?)(?:HEAD|@)?)?")
HUNK = re.compile(r"\+\+\+ b/(.+)|@@ -\S+ \+(\d+)(?:,(\d+))? @@")
MOST_NAMED = 4
Ran = Mapping[str, Mapping[str, Collection[int]]]
"""Lines by cell and file."""
WHOLE = ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """A file of the package. parts: lines that count together; each is a change, or a line in a function of a whole
    file. functions: that hold them."""

    name: str
    parts: frozenset[tuple[int, ...]]
    outside: frozenset[int]
    is_whole: bool
    functions: tuple[str, ...] = ()

    def ran(self, ran: Ran) -> dict[str, set[tuple[int, ...]]]:
        """Return the parts that have run, by cell."""
        found = {}
        for cell, files in ran.items():
            lines = files.get(self.name, ())
            if done := {part for part in self.parts if lines and all(at in lines or at in self.outside for at in part)}:
                found[cell] = done
        return found

    def missed(self, ran: Ran) -> set[tuple[int, ...]]:
        return {*self.parts}.difference(*self.ran(ran).values())

    def text(self, ran: Ran) -> str:
        missed = self.missed(ran)
        cells = some_of([cell.rpartition("/")[2] for cell in self.ran(ran)], MOST_NAMED)
        count = f"{len(self.parts) - len(missed)} of {len(self.parts)}"
        functions = f" ({some_of(self.functions, MOST_NAMED)})" if self.functions else ""
        text = f"changed: {count} changed lines of {self.name}{functions} ran"
        if self.is_whole:
            text = f"changed: no changes of {self.name} in git; in the first schedules {count} lines in functions ran"
        text += f", of {cells}" if cells else ""
        return text if self.is_whole or not missed else f"{text}; not run: {as_ranges({part[0] for part in missed})}"


@dataclass(frozen=True, slots=True)
class Change:
    files: tuple[ChangedFile, ...]

    def texts(self, ran: Ran) -> list[str]:
        return [each.text(ran) for each in self.files]

    def has_run(self, ran: Ran) -> bool:
        return any(each.ran(ran) for each in self.files)

    def misses(self, ran: Ran) -> bool:
        """Whether a changed line has run nowhere. Lines of whole files are not waited for."""
        return any(not each.is_whole and each.missed(ran) for each in self.files)


def changed_files(text: str, folder: Path) -> list[ChangedFile]:
    """text: a file of the package in `folder`, or a git range of its checkout, up to the files as they are."""
    path = next((each for each in _places(text, folder) if os.path.isfile(each) and each.is_relative_to(folder)), None)
    if path is not None:
        if path.suffix != ".py":
            raise UsageError(f"--changed {text}: expected a Python file, as only their lines can be traced")
        name = path.relative_to(folder).as_posix()
        hunks = _hunks(_diff(folder, ["HEAD"], name) or "")
        return [_changed(folder, name, hunks.get(name))]
    found = RANGE.fullmatch(text)
    since = None if found is None else _diff(folder, ["--merge-base"] * (found[2] == "...") + [found[1]])
    if since is None:
        raise UsageError(
            f"--changed {text}: expected a file below {folder}, or a git range of its checkout up to HEAD, such as "
            "main..HEAD or HEAD~1"
        )
    if not (hunks := _hunks(since)):
        raise UnknownVerdict(f"nothing was judged: --changed {text} has no Python file below {folder}")
    return [_changed(folder, name, each) for name, each in hunks.items()]


def _places(text: str, folder: Path) -> list[Path]:
    """Return where the file may be: here, in the package, or in the checkout around it."""
    parents = (Path.cwd(), folder, folder.parent, folder.parent.parent)
    return [Path(os.path.realpath(parent / text)) for parent in parents]


def _diff(folder: Path, since: Sequence[str], files: str = "*.py") -> str | None:
    options = ("--no-color", "--no-ext-diff", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/")
    return git(folder, "diff", "-U0", "--relative", *options, *since, "--", files)


def _hunks(diff: str) -> dict[str, list[tuple[int, int]]]:
    """Return first line and number of lines of each change, by file."""
    found: dict[str, list[tuple[int, int]]] = {}
    name = ""
    for line in diff.splitlines():
        if line.startswith("+++ /dev/null"):
            name = ""
        elif (hunk := HUNK.match(line)) is None:
            continue
        elif hunk[1]:
            name = hunk[1].rstrip("\t")
        elif name:
            found.setdefault(name, []).append((int(hunk[2]), int(hunk[3] or 1)))
    return found


def _changed(folder: Path, name: str, hunks: Sequence[tuple[int, int]] | None) -> ChangedFile:
    codes = codes_of(folder / name)
    inside, outside = code_lines(codes)
    lines = sorted(inside | outside)
    parts: set[tuple[int, ...]] = {(line,) for line in inside} if hunks is None else set()
    for first, count in hunks or ():
        behind = first + max(count, 1)
        at, end = bisect_left(lines, first), bisect_left(lines, behind)
        if count and at < end:
            parts |= {(line,) for line in lines[at:end]}
        else:  # git names the line before removed ones
            before = bisect_left(lines, first + (not count))
            around = tuple(lines[max(0, before - 1) : before] + lines[end : end + 1])
            parts |= {around} if around else set()
    held = set[int]().union(*parts) if hunks is not None else set()
    changed = [code for code in codes if code.co_flags & inspect.CO_OPTIMIZED and held & _lines(code)]
    return ChangedFile(
        name=name,
        parts=frozenset(parts),
        outside=frozenset(outside),
        is_whole=hunks is None,
        functions=tuple(dict.fromkeys(code.co_qualname.partition(".<")[0] for code in changed)),
    )


def code_lines(codes: Iterable[CodeType]) -> tuple[set[int], set[int]]:
    """Return lines with code in functions, and those outside."""
    inside: set[int] = set()
    outside: set[int] = set()
    for code in codes:
        if code.co_flags & inspect.CO_OPTIMIZED:
            inside |= _lines(code)
        else:
            outside |= _lines(code)
    return inside, outside - inside


def codes_of(path: Path) -> list[CodeType]:
    """Return the code of a file, and of all inside it. Raises UsageError."""
    try:
        found = [compile(path.read_bytes(), str(path), "exec")]
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path}: cannot be compiled: {error}") from error
    except OSError as error:
        raise UsageError(f"{path}: {why_unread(error)}") from error
    for code in found:  # also over what the loop appends
        found += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _lines(code: CodeType) -> set[int]:
    """Return the lines of its own code, without a function's head, which runs where it is defined."""
    lines = {line for _, _, line in code.co_lines() if line}
    return lines - {code.co_firstlineno} or lines if code.co_flags & inspect.CO_OPTIMIZED else lines


@dataclass(frozen=True, slots=True)
class FileRun:
    """digest: of the file when it was measured. lines: as ranges."""

    digest: str
    lines: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMap:
    """cells: file -> its lines, by cell. Files are relative to the package."""

    kvcheck: str
    target: str
    cells: dict[str, dict[str, FileRun]] = field(default_factory=dict)

    def runs(self, cell: str, files: Collection[str]) -> int:
        """Return how many lines of these files the cell ran; 1 if that is not known."""
        row = self.cells.get(cell)
        return 1 if row is None else sum(len(from_ranges(row[name].lines)) for name in files if name in row)

    def stale(self, folder: Path, plans: Sequence[Plan], but: Collection[str]) -> list[Plan]:
        """Return plans whose row is missing, or ran a file that has changed. but: files whose changes are known."""
        digest = cache(lambda name: _digest(folder / name))
        return [
            plan
            for plan in plans
            if (row := self.cells.get(plan.cell)) is None
            or any(run.digest != digest(name) for name, run in row.items() if name not in but)
        ]

    def measured(self, runner: ProbeRunner, plans: Sequence[Plan], progress: Callable[[str], None]) -> LineMap:
        """Run a schedule of each plan with all lines traced, and return the map with their rows."""
        folder, cells = Path(runner.start().folder or ""), dict(self.cells)
        digest = cache(lambda name: _digest(folder / name))
        runner.traced = WHOLE
        for number, plan in enumerate(plans):
            progress(f"measuring lines: {number} of {len(plans)} cells")
            cells.pop(plan.cell, None)
            if not runner.run(plan).is_lost:
                cells[plan.cell] = {
                    name: FileRun(digest(name), as_ranges(lines)) for name, lines in runner.ran[plan.cell].items()
                }
        runner.traced = ()
        runner.ran.clear()
        return replace(self, cells=cells)

    def save(self, file: Path) -> None:
        write_text(
            file, json.dumps(to_plain(self)) + "\n", elsewhere="set XDG_CACHE_HOME to a folder that can be written"
        )


def file_of(folder: Path, target: str, device: str) -> Path:
    """Return the place of a target's map. folder: of all maps."""
    found = parse_target(target)
    name = hashlib.sha256(f"{found.python} {kind_of(device)}".encode("utf-8", "surrogateescape")).hexdigest()
    return folder / f"{found.engine}-{name[:12]}.json"


def load(file: Path, target: str) -> LineMap:
    """Return the map of this kvcheck; one without rows if there is none that can be read."""
    try:
        found: LineMap = value_from(LineMap, json.loads(file.read_text(encoding="utf-8")), file.name)
        for row in found.cells.values():
            for run in row.values():
                from_ranges(run.lines)
    except (OSError, ValueError, RecursionError):
        found = LineMap(kvcheck="", target=target)
    return found if found.kvcheck == code_digest() else LineMap(kvcheck=code_digest(), target=target)


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except UsageError:  # it was removed
        return ""
