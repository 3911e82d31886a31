"""Triton kernels compiled for real GPUs on a machine that has none, and what is wrong with what came out.

problems(launch, 90)    what a launch of that class would meet on sm_90; nothing where all is well
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.launches import Launch, argument_of, kernel_of

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Most shared memory of one block, by compute capability: the table of the CUDA C++ Programming Guide."""
STACK_BYTES = 8
"""Stack that ptxas takes for some kernels beside their registers, with no spill: seen in 3.6 and 3.7."""
HOLD = "_wait_for_flag"
LOOKS = 3
"""Which argument of a hold says how often it looks. One look needs no loop."""
INNER_LOOP = "// =>This Inner Loop"


class NoDevice:
    """What Triton's JIT asks of a driver before it compiles. Nothing is loaded, and nothing is launched."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> object:
        """One cache of specialisations for each target."""
        return self.target.arch

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compiled(kernel: Any, capability: int, given: Sequence[object], constants: dict[str, Any]) -> Any:
    from triton.runtime import driver

    with pytest.MonkeyPatch.context() as patch:  # driver.set_active() would ask for a real one to go back to
        patch.setattr(driver, "_active", NoDevice(capability))
        return kernel.warmup(*given, grid=(1,), **constants)


def problems(launch: Launch, capability: int, folder: Path) -> list[str]:
    """What is wrong with a class of launches on such a device. folder: for a file that goes again."""
    name, kinds, constants = launch
    return problems_of(kernel_of(name), capability, [*map(argument_of, kinds)], dict(constants), folder)


def problems_of(
    kernel: Any, capability: int, given: Sequence[object], constants: dict[str, Any], folder: Path
) -> list[str]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        made = compiled(kernel, capability, given, constants)
    except (CompilationError, OutOfResources, PTXASError) as error:
        return [f"does not compile: {str(error).strip().splitlines()[-1]}"]
    used = resources(made.asm["cubin"], folder)
    found = []
    if used["LOCAL"] or used["STACK"] > STACK_BYTES:
        found.append(f"spills: {used['LOCAL']} bytes of local memory, {used['STACK']} of stack")
    if made.metadata.shared > SHARED_BYTES[capability]:
        found.append(f"takes {made.metadata.shared} bytes of shared memory of {SHARED_BYTES[capability]}")
    if made.name == HOLD and given[LOOKS] != 1:
        found += problems_of_hold(made.asm["ptx"], has_clock=constants["HAS_CLOCK"])
    return found


def problems_of_hold(ptx: str, *, has_clock: bool) -> list[str]:
    """What keeps a hold from seeing the flag, or its clock, at each look: neither may be read once for all looks."""
    _, is_loop, behind = ptx.partition(INNER_LOOP)
    if not is_loop:
        return ["has no loop"]
    loop = re.split(r"\bbra\b", behind)[0]
    found = [] if "ld.volatile.global.b64" in loop else ["does not read the flag anew at each look"]
    if has_clock and "%globaltimer" not in loop:
        found.append("does not read the clock anew at each look")
    return found


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, and bytes of stack, shared and local memory, of a compiled kernel."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run([_tool(), "-res-usage", file], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout)}
    assert found.keys() == {"REG", "STACK", "SHARED", "LOCAL"}, done.stdout
    return found


@cache
def _tool() -> Path:
    """cuobjdump, which Triton's wheel brings."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
