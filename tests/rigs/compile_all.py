"""Compile every kernel that the tests launch for the device of this machine, in as many processes as it has cores.

    python tests/rigs/compile_all.py

What is compiled lies in Triton's cache, where launches find it: so later jobs spend their time on what they measure. A
machine without a device compiles for an H100. Exit 1 where a class of launches does not compile.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # kvcheck need not be installed
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rigs.ahead_of_time import compiled
from rigs.large_launches import LARGE
from rigs.launches import Launch, argument_of, kernel_of, listed

WITHOUT_A_DEVICE = 90


def compile_one(launch: Launch, capability: int) -> str | None:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    name, kinds, constants = launch
    try:
        compiled(kernel_of(name), capability, [*map(argument_of, kinds)], dict(constants))
    except (CompilationError, OutOfResources, PTXASError) as error:
        return f"{name} {kinds}: {str(error).strip().splitlines()[-1]}"
    return None


def compile_all(launches: Sequence[Launch], capability: int, processes: int) -> list[str]:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        made = pool.map(compile_one, launches, [capability] * len(launches), chunksize=4)
        return [each for each in made if each is not None]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    began = time.monotonic()
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else divmod(WITHOUT_A_DEVICE, 10)
    capability = 10 * found[0] + found[1]
    launches = sorted({*listed(), *LARGE.values()}, key=repr)
    processes = min(len(os.sched_getaffinity(0)), 16)
    refused = compile_all(launches, capability, processes)
    for line in refused:
        sys.stdout.write(f"does not compile for sm_{capability}: {line}\n")
    done = f"{len(launches) - len(refused)} of {len(launches)} classes of launches"
    took = time.monotonic() - began
    sys.stdout.write(f"{done} compiled for sm_{capability} by {processes} processes in {took:.1f} s\n")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
