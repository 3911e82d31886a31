"""A Protocol adds at most twelve methods, so that whoever takes one needs most of what it asks for.

Invariants:
- Methods of Protocols that it extends do not count: those can be taken alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kvcheck"
METHODS_MOST = 12


def wide(source: str) -> list[str]:
    """The Protocols of a source that add more."""
    return [
        f"line {node.lineno}: Protocol {node.name} adds {count} methods; at most {METHODS_MOST}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).partition("[")[0] in ("Protocol", "typing.Protocol") for base in node.bases)
        and (count := sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body))
        > METHODS_MOST
    ]


def with_methods(bases: str, count: int) -> str:
    """A class over these bases with so many methods."""
    return f"class Wide({bases}):\n" + "".join(f"    def method_{at}(self) -> None: ...\n" for at in range(count))


def test_no_protocol_is_wide() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert paths
    assert {str(path): found for path in paths if (found := wide(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("bases", "count", "is_wide"),
    [
        ("Protocol", 12, False),
        ("Frame", 13, False),
        ("Protocol", 13, True),
        ("Reader, typing.Protocol", 13, True),
        ("Protocol[T]", 13, True),
    ],
)
def test_a_wide_protocol_is_found(bases: str, count: int, is_wide: bool) -> None:
    found = ["line 1: Protocol Wide adds 13 methods; at most 12"] if is_wide else []
    assert wide(with_methods(bases, count)) == found
