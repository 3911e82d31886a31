"""reached: every tensor below an object, with its path.

Attributes, slots, lists, tuples, queues and mappings are followed, whatever their classes.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
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

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def is_readable(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return is_plain and (tensor.element_size() in BITS or tensor.is_complex())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host copy of a tensor's bytes, flat uint8."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    bits = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
    return bits.view(torch.uint8).cpu().clone()


class ByteMap:
    """A number for each byte of some tensors, initially 0."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._runs: list[tuple[torch.device, int, int]] = []
        for device, start, end in sorted((_extent(each) for each in tensors), key=lambda run: (str(run[0]), *run[1:])):
            if self._runs and self._runs[-1][0] == device and start < self._runs[-1][2]:
                self._runs[-1] = (device, self._runs[-1][1], max(end, self._runs[-1][2]))
            else:
                self._runs.append((device, start, end))
        self._maps = [torch.zeros(end - start, dtype=torch.int16) for _, start, end in self._runs]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a tensor's bytes as a view: [*shape, bytes of an element]."""
        device, start, _ = _extent(tensor)
        at = next(at for at, run in enumerate(self._runs) if run[0] == device and run[1] <= start < run[2])
        size = tensor.element_size()
        strides = (*(stride * size for stride in tensor.stride()), 1)
        return self._maps[at].as_strided((*tensor.shape, size), strides, start - self._runs[at][1])


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (is_readable(one) and is_readable(other) and one.numel() and other.numel()):
        return False
    (device, start, end), (where, first, last) = _extent(one), _extent(other)
    if device != where or end <= first or last <= start:
        return False
    taken = ByteMap((one, other))
    taken.of(one).fill_(1)
    return bool(taken.of(other).any())


def has_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not overlap(one, other):
        return False
    taken = ByteMap((one, other))
    taken.of(one).fill_(1)
    return not bool(taken.of(other).all())


def rows_touched(tensor: torch.Tensor, rows: torch.Tensor, dims: int) -> frozenset[int]:
    """Return the rows that share a byte with a tensor. dims: leading dimensions of `rows` that number them."""
    if not overlap(tensor, rows):
        return frozenset()
    taken = ByteMap((tensor, rows))
    taken.of(tensor).fill_(1)
    return frozenset(torch.nonzero(taken.of(rows).flatten(0, dims - 1).flatten(1).any(1)).view(-1).tolist())


def _extent(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    start = tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, start, start + (steps + 1) * tensor.element_size()
