"""What neither import-linter nor ruff can see: tables that lead somewhere, lengths, bytes that bypass the backend."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "kvcheck"

# Tables that name what lies in another package: module: reason
NAMES_OTHERS = {
    "core.run.runners": "a subject is a folder above the run, and a row that is imported when it is used",
    "core.report": "run.json is a format like others, and the run writes it",
    "commands.doctor": "it lists the tables of all packages",
}

LINES_OF_A_FILE = 500
LINES_OF_A_FUNCTION = 70
METHODS_OF_A_PROTOCOL = 12
"""Those that it adds: who takes one needs most of what it asks for."""
DRAWERS = frozenset({"util", "utils", "helper", "helpers", "common", "misc", "manager"})
MOVE_BYTES = frozenset({"copy_", "to", "cpu", "cuda", "synchronize", "wait_event", "wait_stream"})
"""Methods that parts of the cache leave to the backend and the kernels."""
REPLAYED = ("core.stress", "core.run")
PARTS = tuple(f"core.cache.{name}" for name in ("pools", "offload", "hicache", "transfer", "scheduler"))

parsed: Callable[[str], ast.Module] = cache(ast.parse)
nodes_of: Callable[[ast.AST], tuple[ast.AST, ...]] = cache(lambda tree: tuple(ast.walk(tree)))
"""Each file is parsed and walked once for all rules."""


def is_under(name: str, *packages: str) -> bool:
    """Whether `name` is one of the packages or lies in one."""
    return any(name == each or name.startswith(each + ".") for each in packages)


def dotted(path: Path) -> str:
    """Module name of a file below kvcheck/ or tools/, without the leading "kvcheck."; the root package is "kvcheck"."""
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts).removeprefix("kvcheck.")


def package_of(module: str) -> str:
    """kernels, commands, testing, or a wing of core."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "core" else parts[0]


def table_rows(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, module, attribute) of every string that names an object of the package; `module` without "kvcheck."."""
    for node in nodes_of(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and (match := re.fullmatch(r"kvcheck\.([\w.]+):(\w+)", text)):
            yield node.lineno, match[1], match[2]


def check_tables(module: str, tree: ast.Module) -> Iterator[str]:
    """A table's rows lie in its own package."""
    for line, name, attribute in table_rows(tree):
        if module not in NAMES_OTHERS and package_of(name) != package_of(module):
            yield f"line {line}: {name}:{attribute} lies in another package; NAMES_OTHERS has the tables that may"


def check_bans(module: str, tree: ast.Module) -> Iterator[str]:
    """Calls, methods and attributes that this module may not use."""
    for node in nodes_of(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "committed":
            if module != "core.cache.pools.pool":
                yield f"line {node.lineno}: .committed = is banned here: KVPool.commit is its one writer"
        elif isinstance(called, ast.Attribute) and called.attr in MOVE_BYTES and is_under(module, *PARTS):
            yield f"line {called.lineno}: .{called.attr}() is banned here: a backend and the kernels move bytes"
        elif (
            isinstance(called, ast.Name) and called.id in ("hash", "id") and is_under(module, "core.stress", "core.run")
        ):
            yield f"line {called.lineno}: {called.id}() is banned here: a schedule must replay"


def check_docstring(module: str, tree: ast.Module) -> Iterator[str]:
    """One line of purpose, alone; and a name that is not a drawer's."""
    if module.rpartition(".")[2] in DRAWERS:
        yield f"{module} is the name of a drawer; name the concept"
    first, *rest = (ast.get_docstring(tree) or "").splitlines() or [""]
    if not first or (rest and rest[0]):
        yield "expected a module docstring whose first line has the purpose, alone"


def check_size(module: str, tree: ast.Module) -> Iterator[str]:
    """A function fits a screen, and a Protocol a head."""
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > LINES_OF_A_FUNCTION:
                yield f"line {node.lineno}: {node.name} has {length} lines; at most {LINES_OF_A_FUNCTION}"
        elif isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
            count = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            if count > METHODS_OF_A_PROTOCOL:
                yield f"line {node.lineno}: {node.name} adds {count} methods; at most {METHODS_OF_A_PROTOCOL}"


CHECKS: tuple[Callable[[str, ast.Module], Iterator[str]], ...] = (check_tables, check_bans, check_docstring, check_size)


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


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of the package that are imported, and what may be a module or its attribute, without "kvcheck."."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.module and is_under(node.module, "kvcheck"):
            yield node.module.removeprefix("kvcheck.")
            yield from (f"{node.module}.{alias.name}".removeprefix("kvcheck.") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("kvcheck.") for alias in node.names)


def loose_ends(sources: dict[str, str], reached: set[str]) -> list[str]:
    """Modules that nothing reaches, and table rows that reach nothing. reached: entry points and packages."""
    trees, reached, found = {module: parsed(source) for module, source in sources.items()}, {*reached}, []
    for module, tree in trees.items():
        for line, target, attribute in table_rows(tree):
            if target not in trees or attribute not in defined(trees[target]):
                found.append(f"{module}, line {line}: kvcheck.{target}:{attribute} does not exist")
            elif target != module:
                reached.add(target)
        reached |= {*imported(tree)} - {module}
    return found + [f"{module}: no module imports it and no table names it" for module in trees.keys() - reached]


MODULE_FILES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
RULED_FILES = MODULE_FILES | {dotted(path): path for path in sorted((PROJECT / "tools").rglob("*.py"))}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_modules_keep_the_rule(check: Callable[[str, ast.Module], Iterator[str]]) -> None:
    found = [f"{name}: {text}" for name, path in RULED_FILES.items() for text in check(name, parsed(path.read_text()))]
    assert not found, "\n".join(found)


def test_no_file_is_long() -> None:
    files = [*RULED_FILES.values(), *Path(__file__).parent.rglob("*.py")]
    assert [str(path) for path in files if path.read_text().count("\n") > LINES_OF_A_FILE] == []


def test_nothing_is_dead_and_every_table_row_leads_somewhere() -> None:
    sources = {module: path.read_text() for module, path in MODULE_FILES.items()}
    packages = {module for module, path in MODULE_FILES.items() if path.name == "__init__.py"}
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    targets = (project["scripts"] | project["entry-points"]["pytest11"]).values()
    entry_points = {target.partition(":")[0].removeprefix("kvcheck.") for target in targets}
    found = loose_ends(sources, {"__main__", "commands.worker", *entry_points, *packages})
    assert not found, "\n".join(found)


def test_every_package_has_its_init_and_core_holds_packages_alone() -> None:
    folders = {path.parent for path in MODULE_FILES.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []
    assert [path.name for path in (PACKAGE / "core").iterdir() if path.is_file()] == ["__init__.py"]


def test_imports_keep_the_contracts(capsys: pytest.CaptureFixture[str]) -> None:
    """Late imports and TYPE_CHECKING blocks count."""
    lint = pytest.importorskip("importlinter.cli", reason="import-linter is not installed: pip install -e '.[dev]'")
    code = lint.lint_imports(config_filename=str(PROJECT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert code == 0, capsys.readouterr().out


# The checks themselves, on literal sources


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("core.run.runners", 'ROWS = {"a": "kvcheck.core.stress.rows:SCHEDULE"}'),
        ("core.stress.targets", 'MUTANTS = {"a": "kvcheck.core.stress.targets.mutants.metadata:ViewMetadata"}'),
        ("core.cache.pools.pool", "holding.committed = 3"),
        ("core.cache.scheduler.decode", "start = holding.committed"),
        ("core.cache.backend.cuda", "torch.cuda.synchronize()"),
        ("core.base.codes", "key = hash(name)"),
        ("core.base.codes", "class Wide(Protocol):\n" + "".join(f"    def m{at}(self): ...\n" for at in range(12))),
    ],
)
def test_checker_accepts(module: str, code: str) -> None:
    tree = parsed(f'"""Purpose.\n\nInvariants:\n- One.\n"""\n{code}')
    assert [text for check in CHECKS for text in check(module, tree)] == []


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("core.cache.pools.mha", 'ROWS = {"a": "kvcheck.core.stress.runner:run"}', "lies in another package"),
        ("core.cache.pools.mha", "target.copy_(source)", ".copy_() is banned"),
        ("core.cache.offload", "holding.committed = 3", ".committed = is banned"),
        ("core.cache.scheduler.decode", "chunk.holding.committed += 1", ".committed = is banned"),
        ("core.stress.walk", "key = hash(name)", "hash() is banned"),
        ("core.cache.pools.utils", "x = 1", "name of a drawer"),
        ("core.cache.pools.mha", "def long() -> None:\n" + "    x = 1\n" * 70, "long has 71 lines"),
        (
            "core.base.codes",
            "class Wide(Reader, Protocol[T]):\n" + "".join(f"    def m{at}(self): ...\n" for at in range(13)),
            "Wide adds 13 methods",
        ),
    ],
)
def test_checker_refuses(module: str, code: str, message: str) -> None:
    tree = parsed(f'"""Purpose."""\n{code}')
    (told,) = [text for check in CHECKS for text in check(module, tree)]
    assert message in told


@pytest.mark.parametrize("source", ["x = 1", '"""Purpose\nthat goes on."""'])
def test_checker_wants_a_docstring(source: str) -> None:
    assert len([*check_docstring("core.base.codes", parsed(source))]) == 1


def test_loose_ends_are_found() -> None:
    sources = {
        "core.cache.pools": 'P = {"a": "kvcheck.core.cache.pools.mha:MhaPool", "b": "kvcheck.core.cache.pools.mla:X"}',
        "core.cache.pools.mha": "from kvcheck.core.cache.pools.buffers import Buffers\nclass MhaPool: ...",
        "core.cache.pools.mla": "class Renamed: ...",
        "core.cache.pools.buffers": "class Buffers: ...",
        "core.cache.pools.forgotten": "from kvcheck.core.cache.pools.forgotten import itself",
        "commands.main": "def main() -> None: ...",
    }
    assert sorted(loose_ends(sources, {"core.cache.pools", "commands.main"})) == [
        "core.cache.pools, line 1: kvcheck.core.cache.pools.mla:X does not exist",
        "core.cache.pools.forgotten: no module imports it and no table names it",
        "core.cache.pools.mla: no module imports it and no table names it",
    ]
