"""Launches of Triton kernels, in classes: two launches of one class run the same compiled kernel.

Interpreted tests note the class of each launch. What they launch is listed in tests/kernels/launches.json, and
tests/kernels/test_ahead_of_time.py compiles that list for real GPUs on a machine that has none.

    *int64:16     a tensor of int64 whose address is a multiple of 16; without ":16", another address
    i32:16  i32   an integer that fits into 32 bits and is a multiple of 16, or is not; i64 does not fit
    1             the integer 1, which Triton compiles in
    none          no value
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

LISTED = Path(__file__).parents[1] / "kernels" / "launches.json"
ALIGNED = 16
INTEGERS = {"1": 1, "i32:16": 32, "i32": 3, "i64:16": 1 << 40, "i64": (1 << 40) + 1}
"""A value of each class of integers."""
WORDS = 64
"""Elements of a tensor that stands for one of its class. Compiling reads none of them."""

Launch = tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]]
"""Kernel as "module:function", classes of its arguments, and its constants and options by name."""


def argument_class(value: object) -> str:
    """The class of one argument. Raises TypeError for what no kernel of this tree takes."""
    if isinstance(value, torch.Tensor):
        return f"*{str(value.dtype).removeprefix('torch.')}{'' if value.data_ptr() % ALIGNED else ':16'}"
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer, a tensor or None, got {value!r}")
    wide = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return "1" if value == 1 else wide if value % ALIGNED else f"{wide}:16"


def argument_of(kind: str) -> object:
    if kind.startswith("*"):
        name, _, aligned = kind[1:].partition(":")
        memory = torch.empty(WORDS, dtype=getattr(torch, name))
        assert memory.data_ptr() % ALIGNED == 0, "torch aligns what it allocates"
        return memory if aligned else memory[1:]
    return {"none": None, **INTEGERS}[kind]


def launch_of(function: Callable[..., object], given: Sequence[object], named: Mapping[str, object]) -> Launch:
    """The class of a launch of the function that a kernel is made from."""
    return f"{function.__module__}:{function.__name__}", tuple(map(argument_class, given)), tuple(sorted(named.items()))


def as_rows(launches: Iterable[Launch]) -> list[list[Any]]:
    return [[kernel, [*kinds], dict(constants)] for kernel, kinds, constants in sorted(launches, key=repr)]


def from_rows(rows: Iterable[Sequence[Any]]) -> set[Launch]:
    """The inverse."""
    return {(kernel, tuple(kinds), tuple(sorted(constants.items()))) for kernel, kinds, constants in rows}


def listed() -> set[Launch]:
    return from_rows(json.loads(LISTED.read_text(encoding="utf-8")))


def kernel_of(name: str) -> Any:
    """The compiled kernel of "module:function", in a process where Triton compiles."""
    module, _, function = name.partition(":")
    found = [
        each for each in vars(importlib.import_module(module)).values() if getattr(each, "__name__", "") == function
    ]
    return next(each for each in found if hasattr(each, "warmup"))


def note_launches(seen: set[Launch]) -> None:
    """From now on, each launch of this process, in which Triton interprets, adds its class."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def noting(executor: Any, *given: object, **named: object) -> object:
        seen.add(launch_of(executor.fn, given, {name: value for name, value in named.items() if name != "warmup"}))
        return run(executor, *given, **named)

    GridExecutor.__call__ = noting
