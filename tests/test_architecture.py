"""Imports go one way, files stay small, and what product code may not touch is not touched.

Invariants:
- The order of imports is the contracts of [tool.importlinter] in pyproject.toml, each with its reason.
- A check is a function of (module name, source text): test_architecture_checks.py fails each on a literal text.
- A string "kvcheck.module:attribute" in a table must lead somewhere: into its own package, where no reason is stated.
- An exception is a row with its reason; a row that nothing needs any more fails too.
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

STARTED = ("core.cache.transfer.mooncake.child", "core.probes.frame.probe_server", "core.probes.mooncake.agent")

# Tables that name what lies in another package: module: reason
NAMES_OTHERS = {
    "core.run.runners": "a subject is a folder above the run, and a row that is imported when it is used",
    "core.report": "run.json is a format like others, and the run writes it",
    "commands.doctor": "it lists the tables of all packages",
}

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
    "tools.mutation.forks": "an edit raises anything",
    "tools.servers.inside.on_path.sitecustomize": "a server must not go on without it",
    **dict.fromkeys(("commands.main", "commands.worker"), "the last place where a crash of our own becomes exit 70"),
}
ADAPTERS = {  # optional or slow library: the only modules that import it
    "mooncake": ("core.cache.transfer.mooncake.child",),
    **dict.fromkeys(("sglang", "vllm", "lmcache"), ("core.stress.targets",)),
    "ray": ("core.stress.seeds.ray_crew",),
    **dict.fromkeys(("triton", "numba"), ("kernels",)),
    "safetensors": ("core.model.folder",),
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
        where=("core.stress", "core.run"),
        but=("core.run.identity", "core.run.store"),
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


def check_tables(module: str, tree: ast.Module) -> Iterator[str]:
    """A table's rows lie in its own package."""
    for line, name, attribute in table_rows(tree):
        if module not in NAMES_OTHERS and package_of(name) != package_of(module):
            yield f"line {line}: {name}:{attribute} lies in another package; NAMES_OTHERS has the tables that may"


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
    for library, adapters in () if is_under(module, "tools") else ADAPTERS.items():
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
    check_tables,
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


def test_no_file_lies_directly_in_core() -> None:
    assert [path.name for path in (PACKAGE / "core").iterdir() if path.is_file()] == ["__init__.py"]


def test_every_package_has_its_init() -> None:
    folders = {path.parent for path in MODULE_FILES.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_imports_keep_the_contracts(capsys: pytest.CaptureFixture[str]) -> None:
    """Late imports and TYPE_CHECKING blocks count."""
    lint = pytest.importorskip("importlinter.cli", reason="import-linter is not installed: pip install -e '.[dev]'")
    code = lint.lint_imports(config_filename=str(PROJECT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert code == 0, capsys.readouterr().out


def test_exceptions_are_still_there() -> None:
    assert {*LONG_FILES, *NAMES_OTHERS} <= set(MODULE_FILES)
    for key in LONG_FUNCTIONS:
        module, _, function = key.partition(":")
        assert f"def {function}(" in MODULE_FILES[module].read_text(), key
