"""What was changed in an engine, as parts that run or do not.

Invariants:
- A change without code of its own, such as a removed line, has run once the lines before and behind it have.
- A line outside functions has run once a function of its file has.
"""

from __future__ import annotations

import inspect
import os
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from kvcheck.core.base.errors import UnknownVerdict, UsageError, why_unread
from kvcheck.core.base.identity import git
from kvcheck.core.base.nouns import some_of
from kvcheck.core.probes.frame.lines_run import as_ranges

RANGE = re.compile(r"([\w@][\w./~^@{}+-]*?)(?:(\.\.\.?)(?:HEAD|@)?)?")
HUNK = re.compile(r"\+\+\+ b/(.+)|@@ -\S+ \+(\d+)(?:,(\d+))? @@")
MOST_NAMED = 4
Ran = Mapping[str, Mapping[str, Collection[int]]]
"""Lines by cell and file."""


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
    for code in found:  # it grows
        found += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _lines(code: CodeType) -> set[int]:
    """Return the lines of its own code, without a function's head, which runs where it is defined."""
    lines = {line for _, _, line in code.co_lines() if line}
    return lines - {code.co_firstlineno} or lines if code.co_flags & inspect.CO_OPTIMIZED else lines
