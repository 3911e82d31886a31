"""Source: a module's text and syntax tree, with the nodes that may be edited and where each of them stands.

Invariants:
- Code that changes no behaviour is left out: docstrings, annotations, decorators, messages, Protocol bodies, emitted
  events and functions that only emit them, and functions that only name a request's state.
- Offsets count bytes of the UTF-8 text, as `ast` does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import cast

UNJUDGED_FUNCTIONS = frozenset({"__repr__", "__str__"})
"""They make text for people."""
UNJUDGED_NAMES = frozenset({"__slots__", "__all__"})
STANDINGS = frozenset({"states", "room_states", "deadline"})
"""Functions that name a request's state, or the time that it has, for scenarios. The cache never calls them."""
STANDING_PARTS = frozenset({"_waiting_state", "_prefilling_state", "_sending_state", "_room_state"})
"""Functions that those alone call."""
REPORTERS = frozenset(
    {
        *("_report_lock", "_report_query", "_report_lookup", "_report_computed", "_report_begin", "_report_stored"),
        "_report_refused",
        *("report_wanted", "report_chosen"),
    }
)
"""Functions that emit an event of a prefix cache, and do nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node stands. function: qualified name, "" outside functions. statement: the one it belongs to."""

    function: str
    statement: ast.stmt | None
    in_function: bool


@dataclass(frozen=True, eq=False)
class Source:
    """One module. file: its path below the package's folder."""

    file: str
    text: str
    _raw: bytes = field(init=False, repr=False)
    tree: ast.Module = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_raw", self.text.encode())
        object.__setattr__(self, "tree", ast.parse(self.text))

    @cached_property
    def nodes(self) -> dict[ast.AST, Place]:
        found: dict[ast.AST, Place] = {}
        self._collect(self.tree, Place(function="", statement=None, in_function=False), found)
        return found

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def identifiers(self) -> frozenset[str]:
        found = set()
        for node in ast.walk(self.tree):
            for name in ("id", "attr", "arg", "name"):
                if isinstance(value := getattr(node, name, None), str):
                    found.add(value)
        return frozenset(found)

    @cached_property
    def functions(self) -> tuple[tuple[str, int, int], ...]:
        """(qualified name, first line, last line) of each function, outer ones first."""
        found = []

        def collect(node: ast.AST, name: str) -> None:
            for child in ast.iter_child_nodes(node):
                inner = name
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    inner = f"{name}.{child.name}" if name else child.name
                    if not isinstance(child, ast.ClassDef):
                        found.append((inner, child.lineno, child.end_lineno or child.lineno))
                collect(child, inner)

        collect(self.tree, "")
        return tuple(found)

    def function_at(self, line: int) -> str:
        return next((name for name, first, last in reversed(self.functions) if first <= line <= last), "")

    def span(self, node: ast.AST) -> tuple[int, int]:
        at = cast(ast.expr, node)
        assert at.end_lineno is not None and at.end_col_offset is not None, "a parsed node has an end"
        return self._starts[at.lineno - 1] + at.col_offset, self._starts[at.end_lineno - 1] + at.end_col_offset

    def between(self, start: int, end: int) -> str:
        return self._raw[start:end].decode()

    def of(self, node: ast.AST) -> str:
        return self.between(*self.span(node))

    def only_reports(self, node: ast.If) -> bool:
        """True for a condition on which nothing but an event depends."""
        return not node.orelse and all(isinstance(each, ast.Expr) and self._reports(each) for each in node.body)

    def block(self, node: ast.stmt) -> list[ast.stmt]:
        parent = self.parents[node]
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and node in value:
                return value
        raise AssertionError("a statement stands in a block")

    def _reports(self, node: ast.Expr) -> bool:
        call = node.value
        name = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
        return name in REPORTERS or "_emit(" in self.of(node)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(line) for line in self._raw.splitlines(keepends=True))]

    def _collect(self, node: ast.AST, place: Place, found: dict[ast.AST, Place]) -> None:
        for child in self._judged_children(node, place):
            here = place
            if isinstance(child, ast.stmt):
                here = Place(function=place.function, statement=child, in_function=place.in_function)
            found[child] = here
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{place.function}.{child.name}" if place.function else child.name
                is_function = not isinstance(child, ast.ClassDef)
                here = Place(function=name, statement=None, in_function=place.in_function or is_function)
            self._collect(child, here, found)

    def _judged_children(self, node: ast.AST, place: Place) -> Iterator[ast.AST]:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            children: list[ast.AST] = [*node.body]
        elif isinstance(node, ast.AnnAssign):
            children = [node.target, *([node.value] if node.value is not None else [])]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "cast"):
            children = [*node.args[:1]]
        elif isinstance(node, ast.If) and self.only_reports(node):
            children = []
        else:
            children = [*ast.iter_child_nodes(node)]
        yield from (child for child in children if not self._is_unjudged(child, place))

    def _is_unjudged(self, node: ast.AST, place: Place) -> bool:
        """True for what changes no behaviour, whatever is edited in it."""
        if isinstance(node, ast.Expr):
            is_text = isinstance(node.value, ast.Constant)
            return is_text or self._reports(node)
        if isinstance(node, ast.ClassDef):
            return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return node.name in UNJUDGED_FUNCTIONS | STANDINGS | STANDING_PARTS | REPORTERS
        if isinstance(node, ast.If):
            return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_named = any(isinstance(target, ast.Name) and target.id in UNJUDGED_NAMES for target in targets)
            is_field = not place.in_function and bool(place.function)
            return is_named or is_field
        return False
