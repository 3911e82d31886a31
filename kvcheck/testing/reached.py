"""reached: every tensor below an object, with its path.

Attributes, slots, lists, tuples, queues and mappings are followed, whatever their classes.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from threading import Thread

import numpy as np
import torch

from kvcheck.testing.failures import NotJudged

__tracebackhide__ = True

MAX_DEPTH = 40
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, range, type(None), torch.dtype, torch.device, torch.layout)
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A reached tensor. path: such as "layers[3].k". stem: the path without indices. keys: the integer indices."""

    path: str
    tensor: torch.Tensor
    stem: str
    keys: tuple[int, ...]

    def is_named(self, names: Collection[str]) -> bool:
        return is_named(self.path, self.stem, names)


def is_named(path: str, stem: str, names: Collection[str]) -> bool:
    """Whether a name or pattern, such as "scratch*", matches the path, its stem or the start of the path."""
    return any(
        fnmatchcase(path, _literal(name))
        or fnmatchcase(stem, _literal(name))
        or path.startswith((f"{name}.", f"{name}["))
        for name in names
    )


@dataclass(slots=True)
class Passed:
    """Objects that are not entered. paths: of those that are no tensors. again: tensors reached a second time. threads:
    paths of threads, and of executors other than pools of threads, whose work can be held."""

    names: Collection[str]
    paths: list[str] = field(default_factory=list)
    again: list[HeldTensor] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)


def reached(
    thing: object, *, root: str = "", but: Collection[object] = (), passed: Passed | None = None
) -> tuple[HeldTensor, ...]:
    """Return the tensors below an object. passed: names to skip, except tensors. Raise NotJudged if it is too deep."""
    return tuple(_walk(thing, root, root, (), 0, {id(each) for each in but}, passed or Passed(())))


def _walk(
    thing: object, path: str, stem: str, keys: tuple[int, ...], depth: int, seen: set[int], passed: Passed
) -> Iterator[HeldTensor]:
    if path and not isinstance(thing, (torch.Tensor, np.ndarray)) and is_named(path, stem, passed.names):
        passed.paths.append(path)
        return
    if isinstance(thing, torch.Tensor) and id(thing) in seen:
        passed.again.append(HeldTensor(path or "pool", thing, stem or "pool", keys))
    if isinstance(thing, (*_PLAIN, *_CODE)) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, (Thread, Executor)) and not isinstance(thing, ThreadPoolExecutor):
        passed.threads.append(path)
    if isinstance(thing, np.ndarray):
        try:
            thing = torch.from_numpy(thing)
        except (TypeError, ValueError):
            return  # strings and objects: no tensor could hold them
    if isinstance(thing, torch.Tensor):
        yield HeldTensor(path or "pool", thing, stem or "pool", keys)
        return
    if depth == MAX_DEPTH:
        raise NotJudged(
            f"{path} lies more than {MAX_DEPTH} objects deep; pass the object that holds the buffers themselves, or "
            "leave out what leads there with exclude="
        )
    for step, plain, key, member in _members(thing):
        below, bare = (f"{path}{step}", f"{stem}{plain}") if path or step[0] == "[" else (step[1:], plain[1:])
        numbered = keys if key is None else (*keys, key)
        yield from _walk(member, below, bare, numbered, depth + 1, seen, passed)


def _members(thing: object) -> Iterator[tuple[str, str, int | None, object]]:
    """Yield (path step, the step without its index, index, member)."""
    if isinstance(thing, Mapping):
        for key, member in thing.items():
            if isinstance(key, int):
                yield f"[{key}]", "", key, member
            else:
                name = f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
                yield name, name, None, member
    elif isinstance(thing, (list, tuple, deque)) and not _is_named_tuple(thing):
        for at, member in enumerate(thing):
            yield f"[{at}]", "", at, member
    else:
        for name, member in _attributes(thing):
            yield f".{name}", f".{name}", None, member


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    if _is_named_tuple(thing):
        yield from ((name, getattr(thing, name)) for name in getattr(type(thing), "_fields", ()))
        return
    yield from vars(thing).items() if hasattr(thing, "__dict__") else ()
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(thing, name):
                yield name, getattr(thing, name)


def _is_named_tuple(thing: object) -> bool:
    return isinstance(thing, tuple) and hasattr(type(thing), "_fields")


def _literal(name: str) -> str:
    return name.replace("[", "[[]")
