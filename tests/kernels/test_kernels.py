"""The table of kernels: fast forms are called like their torch forms and have users; no compiler is loaded."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvcheck"
KERNEL_FOLDER = PACKAGE / "kernels"
# The torch form: the function that chooses the fastest form.
KERNELS = {
    "kvcheck.kernels.content:differing_torch": "kvcheck.kernels.content_rows:differing",
    "kvcheck.kernels.digest:digest_torch": "kvcheck.kernels.digest:digest",
    "kvcheck.kernels.digest_rows:digest_rows_torch": "kvcheck.kernels.digest_rows:digest_rows",
    "kvcheck.kernels.hold:hold_torch": "kvcheck.kernels.hold:hold",
    "kvcheck.kernels.page_copy:copy_rows_torch": "kvcheck.kernels.page_copy:copy_rows",
    "kvcheck.kernels.page_copy:gather_rows_torch": "kvcheck.kernels.page_copy:gather_rows",
    "kvcheck.kernels.page_copy:scatter_rows_torch": "kvcheck.kernels.page_copy:scatter_rows",
}


def loaded(name: str) -> object:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(("meaning", "form"), KERNELS.items())
def test_a_form_is_called_like_its_meaning(meaning: str, form: str) -> None:
    one, other = loaded(meaning), loaded(form)
    assert callable(one) and callable(other) and one is not other
    assert meaning.endswith("_torch") and not form.endswith("_torch")
    assert inspect.signature(one) == inspect.signature(other)


def test_every_form_has_a_user() -> None:
    texts = [text for path in PACKAGE.rglob("*.py") if "kvcheck.kernels." in (text := path.read_text(encoding="utf-8"))]
    imports = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    used = {f"{node.module}:{alias.name}" for node in imports for alias in node.names}
    assert {*KERNELS.values()} <= used


def test_every_module_of_triton_kernels_has_a_form_in_the_table() -> None:
    named = {form.partition(":")[0] for form in KERNELS.values()}
    for path in KERNEL_FOLDER.glob("*_triton.py"):
        assert f"kvcheck.kernels.{path.stem.removesuffix('_triton')}" in named


@pytest.mark.processes
def test_the_package_loads_no_compiler() -> None:
    modules = sorted(path.stem for path in KERNEL_FOLDER.glob("*.py") if not path.stem.endswith(("_triton", "_numba")))
    script = f"import sys; from kvcheck.kernels import {', '.join(modules[1:])}"
    script += "; print({'triton', 'numba'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert modules[0] == "__init__" and run.stdout.strip() == "set()"
