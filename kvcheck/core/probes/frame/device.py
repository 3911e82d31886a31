"""A stand-in device: its tensors report that they lie on it, and their values lie in this machine's memory.

The device is `torch.device("meta")`, which every machine has and no engine uses.

Invariants:
- A tensor that is made on the device or copied there inside `present()` keeps its values. A copy to the host is new.
- Tensors of both sides in one operation raise WrongSide, except where a device allows it: copies, indices, scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kvcheck.core.probes.frame.guard import StandInRefusal, under_way
from kvcheck.core.probes.frame.stubs import replaced

DEVICE: Final = "meta"
HOST: Final = "cpu"
_COPIES = ("aten::_to_copy", "aten::copy_")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class WrongSide(StandInRefusal):
    pass


class OnDevice(torch.Tensor):
    """A tensor on the stand-in device. held: its values, in host memory."""

    held: torch.Tensor
    is_cuda = True

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(DEVICE),
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def record_stream(self, _: object) -> None:
        """Do nothing: memory is never freed early here."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held})"


@contextmanager
def present(package: str) -> Iterator[None]:
    """package: of the engine. Copies that it makes have its functions as `made_by`."""
    with replaced(torch, {DEVICE: torch.cpu}), pinning(), _Factories(package), _Calls():
        yield


@contextmanager
def pinning() -> Iterator[None]:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    with replaced(torch.cuda, {"cudart": lambda: runtime}):
        yield


def on_host(value: torch.Tensor) -> torch.Tensor:
    return (value.held if isinstance(value, OnDevice) else value).clone()


def side(value: torch.Tensor) -> str:
    return "the device" if value.device.type == DEVICE else "the host"


class _Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations that may make a device tensor without having one as an argument."""

    def __init__(self, package: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._package = package

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: with True, torch imports its compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = _run(func, args, dict(kwargs or {}))
        if func._schema.name in _COPIES and (call := under_way(self._package)):
            made.made_by = call
        return made


class _Calls(TorchFunctionMode):
    """Runs torch.tensor and torch.as_tensor, which would drop the values of a meta tensor."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_device(named.get("device")):
            return func(*args, **{**named, "device": HOST}).to(DEVICE)
        return func(*args, **named)


def _is_device(named: object) -> bool:
    return named is not None and torch.device(named).type == DEVICE  # type: ignore[call-overload]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results lie on the side of the real operation's results."""
    name = func._schema.name
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    makes = any(isinstance(each, OnDevice) for each in given)
    if makes and name not in _COPIES:
        _refuse(name, args, given)
    held_args, held_kwargs = tree_map_only(OnDevice, lambda each: each.held, (args, kwargs))
    if kwargs.get("device") is not None:
        makes = _is_device(kwargs["device"])
        held_kwargs["device"] = HOST
        held_kwargs.pop("pin_memory", None)
    made = func(*held_args, **held_kwargs)
    if name == "aten::_to_copy" and any(made is each for each in tree_leaves(held_args)):
        made = made.clone()
    if func._schema.is_mutable:  # in place, or into `out`: return the given tensors
        back = {id(now): was for was, now in zip(given, _tensors(held_args, held_kwargs), strict=True)}
        return tree_map_only(torch.Tensor, lambda each: back.get(id(each), each), made)
    return tree_map_only(torch.Tensor, OnDevice, made) if makes else made


def _tensors(args: object, kwargs: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]


def _refuse(name: str, args: tuple[Any, ...], given: list[torch.Tensor]) -> None:
    if name in _INDEXED and isinstance(args[0], OnDevice):
        chosen = tree_leaves(args[1])
        given = [each for each in given if not any(each is at for at in chosen)]
    if any(not isinstance(each, OnDevice) and each.dim() for each in given):
        raise WrongSide(
            f"{name}: expected all tensors on the same device, found some on the device and some on the host"
        )
