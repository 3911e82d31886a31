"""Compiled copies: the engine's own copies between the tiers, on a device, each behind a hold of its stream.

The copies are replaced in the modules of the engine's host pools by the same functions behind a hold: those of
`sgl_kernel.kvcacheio`, and those that newer releases compile at run time.

Invariants:
- Arguments are passed on unchanged and not kept: index lists that the engine frees too early are lost, as in a server.
- A call that the compiled function refuses goes to `complain`. An error of the device or of a compiler is no finding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import torch

from kvcheck.core.probes.frame.cuda_streams import CudaMachine
from kvcheck.core.probes.frame.guard import Call, CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.stubs import StubModule, replaced
from kvcheck.core.probes.sglang.rig.kernels_aot import AOT_KERNELS
from kvcheck.core.probes.sglang.rig.kernels_jit import JIT_KERNELS

MODULE = "sgl_kernel.kvcacheio"
PACKAGES = ("sglang-kernel", "sgl-kernel")
"""Distributions that contain it: the newer name first."""
TRIAL = "transfer_kv_per_layer_mla"
ROWS, WORDS = 8, 16
OF_THE_MACHINE = ("cuda error", "cuda driver error", "device-side assert", "nvcc", "ninja", "compil")
"""In error texts of a device or compiler that fails."""


@dataclass(slots=True)
class CompiledCopies:
    """complain: called with the text of a refusal. asked: calls by name."""

    machine: CudaMachine
    complain: Callable[[str], None]
    asked: dict[str, int] = field(default_factory=dict)

    @property
    def has_copied(self) -> bool:
        return bool(self.asked)

    @contextmanager
    def lent_to(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in dict.fromkeys(modules):
                own = {name: vars(module)[name] for name in (*AOT_KERNELS, *JIT_KERNELS) if name in vars(module)}
                table = {name: partial(self._asked, name, copy) for name, copy in own.items()}
                stack.enter_context(replaced(module, table))
            yield

    def asker(self, start: int, size: int) -> Call:
        """Return no functions: the device knows the addresses of a copy, and the process does not."""
        return ()

    def _asked(self, name: str, copy: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self.asked[name] = self.asked.get(name, 0) + 1
        self.machine.delay()
        try:
            copy(*arguments, **named)
        except RuntimeError as error:
            text = _first_line(error)
            if any(each in str(error).lower() for each in OF_THE_MACHINE):
                raise CannotDrive(f"{name} cannot run here: {text}") from error
            self.complain(f"{name} refuses: {text}")


def require_compiled(device: str) -> str:
    """Describe the copies. Raises CannotDrive unless they are installed and a trial copy arrives on this device."""
    found = attempt(lambda: import_module(MODULE))
    if isinstance(found, StubModule):
        raise CannotDrive(f"{MODULE} is not in this environment; {_next()}")
    if isinstance(found, Fault):
        raise CannotDrive(f"{MODULE} cannot be imported: {found.text}; {_next()}")
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    what = f"{_distribution()}, compute capability {capability}"
    trial = getattr(found, TRIAL, None)
    if trial is None:
        raise CannotDrive(f"{what}: {MODULE} has no {TRIAL}; {_next()}")
    arrived = attempt(lambda: _trial_arrives(trial, torch.device(device)))
    if isinstance(arrived, Fault):
        raise CannotDrive(f"{what}: {TRIAL} does not run on this device: {arrived.text}; {_next()}")
    if not arrived:
        raise CannotDrive(f"{what}: {TRIAL} moved other bytes than it was asked to; {_next()}")
    lacking = [name for name in AOT_KERNELS if not hasattr(found, name)]
    return what + (f"; without {', '.join(lacking)}" if lacking else "")


def _trial_arrives(copy: Callable[..., Any], device: torch.device) -> bool:
    source = torch.arange(1, ROWS * WORDS + 1, device=device).view(ROWS, WORDS)
    target, wanted = torch.zeros_like(source), torch.zeros_like(source)
    one, other = torch.tensor([1, 4], device=device), torch.tensor([6, 2], device=device)
    wanted[other] = source[one]
    copy(src=source, dst=target, src_indices=one, dst_indices=other, item_size=WORDS * source.element_size())
    torch.cuda.synchronize()
    return torch.equal(target, wanted)


def _distribution() -> str:
    for name in PACKAGES:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return f"{MODULE} of no distribution"


def _next() -> str:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        version = "VERSION"
    return (
        f"next: kvcheck env sglang=={version} VENV --device cuda, then kvcheck probe sglang:VENV "
        f"(this is {sys.executable})"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
