"""Edit: one change of one module's text, made by one operator, with an id that does not depend on line numbers.

Invariants:
- Every edit gives a text that compiles and whose syntax tree differs from the original's.
- The same text gives the same edits in the same order. Two edits of a module have different ids.
- An id depends on file, function, operator, old and new text alone, and counts equal ones in their order.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvcheck
from kvcheck.core.base.errors import UsageError
from tools.mutation.operators import OPERATORS
from tools.mutation.source import Place, Source

PACKAGE = Path(kvcheck.__file__).parent
CACHE = "core/cache"
"""The edited code, below the package's folder."""
INSTRUMENT = ("simulated", "eager", "cuda", "delays", "device", "graphs", "holds", "streamed", "threads")
"""Modules of cache/backend that run the product's operations for a test, and are no product."""
PROCESSES = (
    *("transfer/mooncake/", "transfer/sockets/", "transfer/ipc/", "scheduler/process_group.py"),
    *("backend/shared_memory.py", "backend/region_backend.py", "backend/copy_lane.py", "backend/device_region.py"),
)
"""Files that run in ranks as processes, or with Mooncake's libraries, alone. No simulated schedule reaches them."""
ID_CHARS = 12
GUARD = re.compile(r"_*(check|require)|__post_init__$")
GUARD_CALL = re.compile(r"[\w.]*\b_?(check|require)\w*\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change. file: path below the package's folder. line: where it begins.

    start, end: what of the file's bytes is replaced. old, new: the text there. first, last: lines of which one has to
    run before the change can matter; 0 and 0: it runs when the module is imported. is_guard: it is in a check, which
    refuses what no correct caller does.
    """

    id: str
    file: str
    line: int
    function: str
    operator: str
    start: int
    end: int
    old: str
    new: str
    first: int
    last: int
    is_guard: bool = False

    def applied(self, text: str) -> str:
        """The file's text with the change. Raises UsageError if the text is not the one it was made for."""
        raw = text.encode()
        if raw[self.start : self.end].decode(errors="replace") != self.old:
            raise UsageError(
                f"{self.file}:{self.line}: expected {self.old!r} there; the file has changed since edit {self.id}"
            )
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()


def is_product(file: str) -> bool:
    """Whether simulated schedules judge a file: it is neither a part of a test, nor for ranks as processes alone."""
    path = Path(file)
    is_instrument = path.parent.name == "backend" and path.stem in INSTRUMENT
    return not is_instrument and not file.startswith(tuple(f"{CACHE}/{part}" for part in PROCESSES))


def module_of(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join(("kvcheck", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def read_sources() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((PACKAGE / CACHE).rglob("*.py"))
    }


def chosen_files(sources: Sequence[str], named: Sequence[str]) -> list[str]:
    """The files that the names mean: files or folders, below kvcheck/core/cache, kvcheck/ or the checkout.

    None named: all. A file that is no product is chosen by its own name alone. Raises UsageError for a name that means
    none.
    """
    chosen: dict[str, None] = {}
    for name in named or (CACHE,):
        plain = name.strip("/").removeprefix("kvcheck/").removeprefix(f"{CACHE}/")
        wanted = f"{CACHE}/{plain}" if plain != CACHE else CACHE
        found = [file for file in sources if file == wanted or (file.startswith(f"{wanted}/") and is_product(file))]
        if not found:
            raise UsageError(f"{name}: expected a file or folder below kvcheck/{CACHE}, such as hicache or offload.py")
        chosen |= dict.fromkeys(found)
    return [file for file in sources if file in chosen]


def edits_of(file: str, text: str, names: frozenset[str]) -> list[Edit]:
    """All edits of one module. names: identifiers of the whole package, so that a swapped name exists."""
    source = Source(file, text)
    return [*_identified(source, _changes(source, names | source.identifiers))]


def all_edits(sources: Mapping[str, str], files: Sequence[str]) -> dict[str, list[Edit]]:
    names = frozenset().union(*(Source("", text).identifiers for text in sources.values()))
    return {file: edits_of(file, sources[file], names) for file in files}


def sampled(edits: Sequence[Edit], count: int | None, seed: int) -> list[Edit]:
    """So many edits, spread over the files and operators by their numbers; all of them for None. In the order given."""
    if count is None or count >= len(edits):
        return [*edits]
    strata: dict[tuple[str, str], list[Edit]] = {}
    for edit in edits:
        strata.setdefault((edit.file, edit.operator), []).append(edit)
    places = []
    for key, rows in strata.items():
        ranked = sorted(rows, key=lambda edit: _draw(seed, edit.id))
        offset = _draw(seed, *key) / (1 << 64)
        # The n-th of a stratum of m is due after n/m of the sample, so every stratum has its share at every length.
        places += [((at + offset) / len(rows), edit.id) for at, edit in enumerate(ranked)]
    chosen = {name for _, name in sorted(places)[:count]}
    return [edit for edit in edits if edit.id in chosen]


def _draw(seed: int, *words: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join((str(seed), *words)).encode()).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class _Change:
    operator: str
    place: Place
    start: int
    end: int
    new: str


def _changes(source: Source, names: frozenset[str]) -> Iterator[_Change]:
    seen: set[tuple[int, int, str]] = set()
    for node, place in source.nodes.items():
        for operator, row in OPERATORS.items():
            if not place.in_function and not row.of_tables:
                continue
            for start, end, new in row.make(source, node, names):
                key = (start, end, new)
                if key not in seen and new != source.between(start, end) and _compiles(source, node, start, end, new):
                    seen.add(key)
                    yield _Change(operator, place, start, end, new)


def _identified(source: Source, changes: Iterator[_Change]) -> Iterator[Edit]:
    count: Counter[tuple[str, ...]] = Counter()
    for change in sorted(changes, key=lambda each: (each.start, each.end, each.operator, each.new)):
        old = source.between(change.start, change.end)
        key = (source.file, change.place.function, change.operator, old, change.new)
        count[key] += 1
        text = "\0".join((*key, str(count[key])))
        line = source.text.encode()[: change.start].count(b"\n") + 1
        first, last = _lines(change.place, line)
        yield Edit(
            id=hashlib.sha256(text.encode()).hexdigest()[:ID_CHARS],
            file=source.file,
            line=line,
            function=change.place.function,
            operator=change.operator,
            start=change.start,
            end=change.end,
            old=old,
            new=change.new,
            first=first,
            last=last,
            is_guard=_is_guard(source, change, old),
        )


def _is_guard(source: Source, change: _Change, old: str) -> bool:
    """Whether the change is in a check: a function of checks, a condition that only raises, a call of a check, a strict
    zip."""
    name = change.place.function.rpartition(".")[2]
    at = change.place.statement
    only_raises = isinstance(at, ast.If) and all(isinstance(each, ast.Raise) for each in at.body) and not at.orelse
    is_strict = source.between(max(0, change.start - len("strict=")), change.start) == "strict="
    return GUARD.match(name) is not None or only_raises or is_strict or GUARD_CALL.match(old) is not None


def _lines(place: Place, line: int) -> tuple[int, int]:
    """The lines of which one has to run: of a simple statement all, of a compound one those before its block."""
    at = place.statement
    if at is None or not place.in_function:
        return 0, 0
    body = getattr(at, "body", None)
    if isinstance(body, list) and body:
        return at.lineno, max(at.lineno, line, body[0].lineno - 1)
    return at.lineno, at.end_lineno or at.lineno


def _compiles(source: Source, node: ast.AST, start: int, end: int, new: str) -> bool:
    outer = node
    while not isinstance(source.parents[outer], ast.Module | ast.ClassDef):
        outer = source.parents[outer]
    first, last = source.span(outer)
    first -= getattr(outer, "col_offset", 0)
    text = source.between(first, start) + new + source.between(end, max(last, end))
    try:
        compile(textwrap.dedent(text), source.file, "exec")
    except SyntaxError:
        return False
    return True


def diff_of(edit: Edit, text: str) -> str:
    return diff_of_texts(text, edit.applied(text))


def diff_of_texts(before: str, after: str) -> str:
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)][2:]
    return "\n".join(line for line in lines if not line.startswith("@@"))
