"""The table of kernels: every fast form takes what its torch meaning takes, and loading the package loads no compiler.

Invariants:
- What forms compute is compared in the test of each kernel; here it is the table that is held to its word.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from kvcheck.kernels import KERNELS

KERNEL_FOLDER = Path(__file__).parents[2] / "kvcheck" / "kernels"


def loaded(name: str) -> object:
    """What "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(("meaning", "form"), KERNELS.items())
def test_a_form_is_called_like_its_meaning(meaning: str, form: str) -> None:
    one, other = loaded(meaning), loaded(form)
    assert callable(one) and callable(other) and one is not other
    assert meaning.endswith("_torch") and not form.endswith("_torch")
    assert inspect.signature(one) == inspect.signature(other)


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
