"""Imports go one way, files stay small, and what product code may not touch is not touched.

Invariants:
- A check is a function of (module name, source text): test_architecture_checks.py fails each on a literal text.
- A string "kvcheck.module:attribute" in a table is an import: it obeys the same order and must lead somewhere.
- An exception is a row with its reason; a row that nothing needs any more fails too.

The order and the reasons are explained in ARCHITECTURE.md.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "kvcheck"

# Loads no tensor library: a report, a gate and the start of a command need no more than these.
BASE = frozenset(
    f"core.base.{name}"
    for name in (
        *("errors", "paging", "registry", "record", "codes", "bugs", "rounds", "deadline"),
        *("child", "child_start", "devices", "private_network", "scratch", "identity", "cells", "causes"),
        *("evidence_kinds", "server_facts", "seeds", "situations", "story", "untold", "nouns", "misspelt"),
    )
)
CONTENT, HOLD = ("core.base.content", "core.base.deviation", "core.base.rng"), "core.base.cuda_hold"
MOVED = ("kernels", *CONTENT, "core.cache.backend", "core.cache.pools")
CACHE = (*MOVED, "core.cache.offload", "core.cache.hicache", "core.cache.transfer", "core.cache.scheduler")
KINDS = ("core.stress.workload.tier_events", "core.stress.workload.report_events")
EVENTS = ("core.stress.workload.events", *KINDS)
JUDGED = (*CACHE, "core.stress.workload", "core.stress.targets")
STARTED = ("core.cache.transfer.mooncake.child", "core.probes.frame.probe_server", "core.probes.mooncake.agent")
ENGINES = ("core.probes.sglang", "core.probes.vllm", "core.probes.lmcache", "core.probes.mooncake")

# module or package: (what it may import besides itself and BASE, why). Lowest first; the longest match rules.
MAY_IMPORT: dict[str, tuple[tuple[str, ...], str]] = {
    "kernels": ((), "tensor in, tensor out; even BASE is above them"),
    **dict.fromkeys(sorted(BASE), ((), "BASE: all others stand on it, so it stands on itself alone")),
    **dict.fromkeys((*CONTENT, HOLD), (("kernels",), "words with owners, seeds, holds: for targets and engines alike")),
    "core.base.deviation": (("core.base.content", "kernels"), "whose words a row holds, by the rule of their content"),
    "core.cache.backend": (("kernels", HOLD), "runs operations, knows nothing of pools"),
    "core.cache.pools.shape": ((), "a value of plain numbers that workloads share with pools"),
    "core.cache.pools": (("core.cache.backend", "kernels"), "own the tensors, reach them through a backend"),
    "core.cache.offload": (MOVED, "a sibling of hicache and transfer"),
    "core.cache.hicache": (MOVED, "a sibling of offload and transfer"),
    "core.cache.transfer": (MOVED, "a sibling of offload and hicache"),
    "core.cache.transfer.sockets": ((*MOVED, "core.cache.transfer"), "wires between processes; no engine"),
    **dict.fromkeys(
        ("core.cache.transfer.mooncake", "core.cache.transfer.ipc"),
        ((*MOVED, "core.cache.transfer", "core.cache.transfer.sockets"), "wires whose bytes go another way than links"),
    ),
    "core.cache.scheduler": (CACHE[:-1], "drives pools, offload, host tier and transfer together"),
    "core.live": (CONTENT, "a server is reached from outside: nothing of the cache, of a target or of a probe"),
    "core.stress.workload": ((*MOVED, *CACHE[-2:], "core.live.model"), "feeds a scheduler; names no target"),
    "core.stress.workload.mismatch": ((), "plain numbers that an event holds"),
    **dict.fromkeys(KINDS, ((), "plain values: hashes, ids and counts")),
    "core.stress.workload.events": (
        (*KINDS, "core.stress.workload.mismatch", "core.base.content", "core.cache.backend.backend"),
        "made by whoever observes a part, judged by the oracles: values of the layers below, none of their parts",
    ),
    "core.stress.targets": ((*CACHE, *EVENTS), "puts the parts together, fixed or broken on purpose"),
    "core.probes.frame": ((*CONTENT, HOLD), "runs where there is torch alone; triton where it is"),
    **dict.fromkeys(ENGINES, ((*CONTENT, "core.probes.frame"), "its names, what is tried")),
    "core.probes.installed": (("core.probes.frame", *ENGINES), "engines by name"),
    "core.probes": (("core.probes.frame", "core.probes.installed"), "installed engines; nothing of the cache"),
    "core.stress.history": (("core.stress.workload.events", "core.cache.backend.backend"), "passes events on"),
    "core.stress.clocks": ((), "numbers and edges; it knows no event"),
    "core.stress.access_log": (("core.cache.backend.backend",), "footprints and numbers; it knows no event"),
    "core.stress.oracles": (
        (
            *(*EVENTS, "core.stress.workload.mismatch", "core.stress.history", "core.stress.clocks"),
            *("core.stress.access_log", "core.base.content", "core.base.deviation", "core.cache.backend.backend"),
        ),
        "judge a history alone, from any target",
    ),
    "core.stress": ((*JUDGED, "core.probes"), "runs targets under workloads; knows no benchmark"),
    "core.report": ((), "a record is all it needs, so that any stored run can be shown again"),
    "core.stress.mutation.table": (("core.stress.mutation", "core.report"), "its tables are written as all others"),
    "core.bench": (JUDGED, "times targets under workloads; knows no schedule search"),
    "core.bench.fresh_rounds": (("core.bench", "core.report.gate"), "measures rows that the gate asks for"),
    "testing": (
        ("core.base.content", "core.base.rng", "core.probes.frame"),
        "for people's own tests; no cache of ours",
    ),
    "commands": (("core",), "argv to exit code; nothing imports a command"),
    "commands.pytest_asks": ((), "pytest loads it and the plugin in every project, so they import nothing"),
    "commands.pytest_run": (
        ("testing", "commands", "core.report.wording"),
        "the one user of kvcheck.testing: tests of others, as a run",
    ),
    "commands.pytest_plugin": (("testing", "commands.pytest_asks", "commands.pytest_run"), "--kvcheck, and fixtures"),
    "__main__": (("commands.main",), "python -m kvcheck"),
    "kvcheck": ((), "the version, for everybody"),
    "tools": (("core", "commands"), "a checkout's scripts, which measure kvcheck; they are not installed"),
}
ROOT_NAMES = frozenset({"kvcheck", "__version__"})  # the root package and what it defines
# No row: a row would let everything below import everything.
NAMESPACES = frozenset({"core", "core.base", "core.cache"})
ONLY_COMMANDS = "core.stress.targets.mutants"  # broken on purpose: nothing below a command may reach it, but for
# commands, the price of a fix beside its mutant, and what judges mutants by their cards
KNOW_MUTANTS = ("commands", "core.bench", "core.stress.mutant_trials")

MOST_PACKAGES = 14
LINES_OF_A_FILE = 500
LINES_OF_A_FUNCTION = 70
LONG_FILES: dict[str, str] = {}  # module: reason
LONG_FUNCTIONS: dict[str, str] = {}  # "module:function": reason
DRAWERS = frozenset({"util", "utils", "helper", "helpers", "common", "misc", "manager"})
MAY_CATCH_ALL = {
    "core.cache.backend.threads": "whatever a chunk raises is kept for the process, which judges it",
    "core.probes.frame.guard": "whatever an engine raises is its finding, or what cannot be driven",
    "core.stress.runner": "a crash of an oracle is UNKNOWN and a crash of the target is a finding",
    **dict.fromkeys(("commands.report", "commands.smaller", "commands.stories"), "its crash changes no verdict"),
    **dict.fromkeys(("core.base.errors", "core.stress.targets.own"), "others raise anything"),
    "core.stress.mutation.server": "an edit raises anything",
    **dict.fromkeys(("commands.main", "commands.worker"), "the last place where a crash of our own becomes exit 70"),
}
ADAPTERS = {  # optional or slow library: the only modules that import it
    "mooncake": ("core.cache.transfer.mooncake.child", "core.cache.hicache.mooncake_store"),
    **dict.fromkeys(("sglang", "vllm", "lmcache"), ("core.stress.targets",)),
    "ray": ("core.stress.seeds.ray_crew",),
    **dict.fromkeys(("triton", "numba"), ("kernels",)),
    "safetensors": ("core.live.model.folder",),
    "pandas": ("core.report",),
    "matplotlib": ("core.report",),
    "jinja2": ("core.report",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """What modules under `where`, except those under `but`, may not name, call, call as a method, or set."""

    where: tuple[str, ...]
    but: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    """Set on any object."""
    why: str


EVERYWHERE = ("",)
BANS = (
    Ban(
        where=("core.stress",),
        names=frozenset({"random", "time.time", "time.time_ns", "secrets", "uuid.uuid4", "numpy.random.seed"}),
        calls=frozenset({"hash", "id"}),
        why="a schedule must replay: clock, randomness and order are arguments",
    ),
    Ban(
        where=tuple(f"core.cache.{name}" for name in ("pools", "offload", "hicache", "transfer", "scheduler")),
        methods=frozenset({"copy_", "to", "cpu", "cuda", "synchronize", "wait_event", "wait_stream"}),
        why="product code moves bytes through a backend and the kernels only",
    ),
    Ban(
        where=EVERYWHERE,
        but=("core.cache.pools.pool",),
        attributes=frozenset({"committed"}),
        why="KVPool.commit is its one writer",
    ),
    Ban(
        where=EVERYWHERE,
        names=frozenset({"pickle", "marshal", "torch.load"}),
        calls=frozenset({"eval", "exec"}),
        why="a trace, a record or a schedule line from a stranger must not run code",
    ),
    Ban(where=EVERYWHERE, but=("tools",), names=frozenset({"tools"}), why="it is not there where kvcheck is installed"),
    Ban(
        where=EVERYWHERE,
        # read by libraries
        but=("commands", "core.base.child", *STARTED, "tools"),
        names=frozenset({"os.environ", "os.environb", "os.getenv", "os.putenv"}),
        why="the environment is read in commands/ only, so a plan says everything a run depends on",
    ),
)


parsed: Callable[[str], ast.Module] = cache(ast.parse)
nodes_of: Callable[[ast.AST], tuple[ast.AST, ...]] = cache(lambda tree: tuple(ast.walk(tree)))
"""Each file is parsed and walked once for all rules."""


def is_under(name: str, package: str) -> bool:
    """Whether `name` is `package` or lies in it; everything lies in ""."""
    return not package or name == package or name.startswith(package + ".")


def row_of(module: str) -> str | None:
    """The longest row of MAY_IMPORT that `module` lies in."""
    return max((row for row in MAY_IMPORT if is_under(module, row)), key=len, default=None)


def dotted(path: Path) -> str:
    """Module name of a file below kvcheck/ or tools/, without the leading "kvcheck."; the root package is "kvcheck"."""
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts).removeprefix("kvcheck.")


@cache
def imported(tree: ast.AST) -> tuple[tuple[int, str], ...]:
    """(line, full dotted name) of every absolute import, TYPE_CHECKING blocks included."""
    found: list[tuple[int, str]] = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return tuple(found)


def table_rows(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, module, attribute) of every string that names an object of the package; `module` without "kvcheck."."""
    for node in nodes_of(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and (match := re.fullmatch(r"kvcheck\.([\w.]+):(\w+)", text)):
            yield node.lineno, match[1], match[2]


def within_package(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name without "kvcheck.") of every import that stays in the package."""
    for line, name in imported(tree):
        if is_under(name, "kvcheck"):
            yield line, name.removeprefix("kvcheck.")


def names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every import and of every attribute chain that starts at an imported name."""
    yield from imported(tree)
    full = {
        alias.asname or alias.name: alias.name
        for node in nodes_of(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in nodes_of(tree):
        chain: list[str] = []
        at: ast.AST = node
        while isinstance(at, ast.Attribute):
            chain.append(at.attr)
            at = at.value
        if chain and isinstance(at, ast.Name) and at.id in full:
            yield node.lineno, ".".join((full[at.id], *reversed(chain)))  # type: ignore[attr-defined]


def check_imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Downwards only, by absolute name, and never straight to a mutant."""
    if module in NAMESPACES:
        yield from (f"{module} only groups packages; it may not import {name}" for _, name in imported(tree))
        return
    row = row_of(module)
    if row is None:
        yield f"{module} has no row in MAY_IMPORT; add one where it belongs in the order"
        return
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"line {node.lineno}: relative import; write the absolute name"
    allowed = {row, *MAY_IMPORT[row][0]} | (BASE if row != "kernels" else set())
    by_string = [(line, name) for line, name, _ in table_rows(tree)]
    for line, name in [*within_package(tree), *by_string]:
        if name in ROOT_NAMES and row != "kernels":
            continue
        if not any(is_under(name, package) for package in allowed):
            yield f"line {line}: {row} may not import {name}; {row}: {MAY_IMPORT[row][1]}"
    for line, name in within_package(tree):
        if is_under(name, ONLY_COMMANDS) and not any(is_under(module, ok) for ok in (ONLY_COMMANDS, *KNOW_MUTANTS)):
            yield f"line {line}: mutants are broken on purpose: only commands and benchmarks may import them"


def check_bans(module: str, tree: ast.Module) -> Iterator[str]:
    """Names, calls and methods that this module may not use."""
    used, calls = [*names_used(tree)], [node for node in nodes_of(tree) if isinstance(node, ast.Call)]
    stores = [node for node in nodes_of(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    for ban in BANS:
        if not any(is_under(module, place) for place in ban.where) or any(is_under(module, ok) for ok in ban.but):
            continue
        found = {(line, name) for line, name in used if any(is_under(name, bad) for bad in ban.names)}
        for node in calls:
            if isinstance(node.func, ast.Name) and node.func.id in ban.calls:
                found.add((node.lineno, f"{node.func.id}()"))
            elif isinstance(node.func, ast.Attribute) and node.func.attr in ban.methods:
                found.add((node.lineno, f".{node.func.attr}()"))
        found |= {(node.lineno, f".{node.attr} =") for node in stores if node.attr in ban.attributes}
        yield from (f"line {line}: {name} is banned here: {ban.why}" for line, name in sorted(found))
    for library, adapters in ADAPTERS.items():
        for line, name in imported(tree):
            if is_under(name, library) and not any(is_under(module, place) for place in adapters):
                yield f"line {line}: {library} is imported only in {', '.join(adapters)}, so that others start without"


def check_handlers(module: str, tree: ast.Module) -> Iterator[str]:
    """Nobody swallows what he does not know."""
    if module in MAY_CATCH_ALL:
        return
    for node in nodes_of(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(c is None or (isinstance(c, ast.Name) and c.id in ("Exception", "BaseException")) for c in caught):
                yield f"line {node.lineno}: catches everything; name the exception"


def check_docstring(module: str, tree: ast.Module) -> Iterator[str]:
    """One line of purpose, then the invariants as a list, if there are any; and a name that is not a drawer's."""
    if module.rpartition(".")[2] in DRAWERS:
        yield f"{module} is the name of a drawer; name the concept"
    text = ast.get_docstring(tree)
    if not text:
        yield "no module docstring: one line that says what the module is for"
    elif text.partition("\n")[2] and text.splitlines()[1]:
        yield "the docstring's first line is the purpose, alone; then an empty line"
    elif "Invariants:" in text and not re.search(r"^Invariants:\n- ", text, re.MULTILINE):
        yield 'the docstring has no list under "Invariants:"'


def check_size(module: str, tree: ast.Module) -> Iterator[str]:
    """A function fits a screen."""
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if (length > LINES_OF_A_FUNCTION) != (f"{module}:{node.name}" in LONG_FUNCTIONS):
                most = f"at most {LINES_OF_A_FUNCTION} (LONG_FUNCTIONS)"
                yield f"line {node.lineno}: {node.name} has {length} lines; {most}"


CHECKS: tuple[Callable[[str, ast.Module], Iterator[str]], ...] = (
    check_imports,
    check_bans,
    check_handlers,
    check_docstring,
    check_size,
)


def violations(module: str, source: str) -> list[str]:
    """Everything wrong with one module, from its text alone."""
    tree = parsed(source)
    found = [message for check in CHECKS for message in check(module, tree)]
    return found + too_long(module, source)


def too_long(module: str, source: str) -> list[str]:
    """What is wrong with the length of a file; module: "" for one outside the package."""
    lines = source.count("\n")
    is_as_stated = (lines > LINES_OF_A_FILE) == (module in LONG_FILES)
    return [] if is_as_stated else [f"{lines} lines; at most {LINES_OF_A_FILE} (LONG_FILES)"]


def defined(tree: ast.Module) -> set[str]:
    """Names a module defines or imports at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def loose_ends(sources: dict[str, str], packages: set[str], entry_points: set[str]) -> list[str]:
    """Modules that nothing reaches, and table rows that reach nothing."""
    trees = {module: parsed(source) for module, source in sources.items()}
    reached = {"__main__", "commands.worker", *entry_points, *packages}  # stress starts workers with python -m
    found: list[str] = []
    for module, tree in trees.items():
        for line, target, attribute in table_rows(tree):
            if target not in trees or attribute not in defined(trees[target]):
                found.append(f"{module}, line {line}: kvcheck.{target}:{attribute} does not exist")
            elif target != module:
                reached.add(target)
        for _, name in within_package(tree):  # "a.b.c" may be module a.b and attribute c
            reached |= {name, name.rpartition(".")[0]} - {module}
    return found + [
        f"{module}: no module imports it and no table names it" for module in trees if module not in reached
    ]


MODULE_FILES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
RULED_FILES = MODULE_FILES | {dotted(path): path for path in sorted((PROJECT / "tools").rglob("*.py"))}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_modules_keep_the_rule(check: Callable[[str, ast.Module], Iterator[str]]) -> None:
    found = [f"{name}: {text}" for name, path in RULED_FILES.items() for text in check(name, parsed(path.read_text()))]
    assert not found, "\n".join(found)


def test_no_file_is_long() -> None:
    files = [*RULED_FILES.items(), *(("", path) for path in sorted(Path(__file__).parent.rglob("*.py")))]
    found = [
        f"{path.relative_to(PROJECT)}: {text}" for module, path in files for text in too_long(module, path.read_text())
    ]
    assert not found, "\n".join(found)


def test_nothing_is_dead_and_every_table_row_leads_somewhere() -> None:
    sources = {module: path.read_text() for module, path in MODULE_FILES.items()}
    packages = {module for module, path in MODULE_FILES.items() if path.name == "__init__.py"}
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    targets = (project["scripts"] | project["entry-points"]["pytest11"]).values()
    entry_points = {target.partition(":")[0].removeprefix("kvcheck.") for target in targets}
    found = loose_ends(sources, packages, entry_points)
    assert not found, "\n".join(found)


def package_of(module: str) -> str:
    """The node of the import graph by package: kernels, commands, a wing of core, or kvcheck, which has the version."""
    parts = module.split(".")
    if parts[0] == "core":
        return ".".join(parts[:2])
    return {"__main__": "commands"}.get(parts[0], parts[0])  # python -m kvcheck is the command line


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules that it imports, late imports and TYPE_CHECKING blocks included."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = {name for _, name in within_package(parsed(source))}
        graph[module] = {n if n in sources else n.rpartition(".")[0] for n in names} & set(sources) - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Nodes that reach themselves, one sorted list for all those that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        queue = [*graph[start]]
        while queue:
            at = queue.pop()
            if at not in seen:
                seen.add(at)
                queue += graph.get(at, ())
        reached[start] = seen
    found = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return [list(nodes) for nodes in sorted(found)]


def test_the_house_has_few_rooms_and_no_circle() -> None:
    graph = import_graph({module: path.read_text() for module, path in MODULE_FILES.items()})
    assert circles(graph) == [], "files that import each other"
    packages: dict[str, set[str]] = {}
    for module, below in graph.items():
        here = package_of(module)
        packages.setdefault(here, set()).update({package_of(name) for name in below} - {here})
    assert circles(packages) == [], "packages that import each other"
    assert len(packages) <= MOST_PACKAGES, f"at most {MOST_PACKAGES} packages, got {', '.join(sorted(packages))}"


def test_no_file_lies_directly_in_core() -> None:
    assert [path.name for path in (PACKAGE / "core").iterdir() if path.is_file()] == ["__init__.py"]


def test_every_package_has_its_init() -> None:
    folders = {path.parent for path in MODULE_FILES.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_order_goes_downwards() -> None:
    """Each row names rows above it in the table only, so the table as a whole can have no cycle."""
    order = list(MAY_IMPORT)
    for row, (below, reason) in MAY_IMPORT.items():
        assert reason, f"{row} has no reason"
        if row not in ("commands", "tools"):  # all of core, by one word
            assert all(order.index(row_of(name) or row) < order.index(row) for name in below), row


def test_exceptions_are_still_there() -> None:
    assert set(LONG_FILES) <= set(MODULE_FILES)
    for key in LONG_FUNCTIONS:
        module, _, function = key.partition(":")
        assert f"def {function}(" in MODULE_FILES[module].read_text(), key
