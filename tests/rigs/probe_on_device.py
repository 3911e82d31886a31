"""Answers one probe of the stand-in SGLang over a device that is a stand-in: a program of its own, as the engine is.

python -m rigs.probe_on_device ENVIRONMENT HOW PROBE.SUBJECT SCHEDULES FAULT...    prints a reply a line
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from fakes.cuda import Machine, installed
from fakes.cuda_tensors import Memory, memory
from fakes.engine import FAKES, put_fault

from kvcheck.core.base import cuda_hold
from kvcheck.core.probes.frame import probe_server
from kvcheck.core.probes.frame.cuda_streams import CudaMachine
from kvcheck.core.probes.frame.probe_server import ProbeServer
from kvcheck.core.probes.frame.wire import Ask, Hello, Reply, decode, encode
from kvcheck.core.probes.sglang import SGLANG, layer_wait, retract
from kvcheck.core.probes.sglang.rig import host_tier
from kvcheck.core.probes.sglang.rig.byte_copies import CopyRefused
from kvcheck.core.probes.sglang.rig.kernels_aot import AOT_KERNELS
from kvcheck.core.probes.sglang.rig.pools import SmallPool, small_pool

TESTS = Path(__file__).parents[1]
FLAG, SPIN, NO_KERNELS = "flag", "spin", "no-kernels"
"""How work is held: by a flag, or, where there is no triton, for a fixed time; or without the compiled copies."""


def replies(environment: Path, how: str, shape: str, schedules: int, faults: Sequence[str]) -> dict[str, list[Reply]]:
    """What schedules of a probe say in a process of their own, by fault."""
    done = subprocess.run(
        [sys.executable, "-m", "rigs.probe_on_device", environment, how, shape, str(schedules), *faults],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},  # one thread each, as tests have: conftest.py
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = iter(done.stdout.splitlines())
    found: dict[str, list[Reply]] = {}
    for fault in faults:
        for _ in range(schedules):
            reply = decode(next(said))
            assert isinstance(reply, Reply)
            found.setdefault(fault, []).append(reply)
    return found


class Prompt(CudaMachine):
    """Streams of a device that runs at once what is let go: who looks at memory later sees the load."""

    def taken(self, read: Sequence[torch.Tensor], *, rest_stays: bool = False) -> Sequence[torch.Tensor]:
        copies = super().taken(read, rest_stays=rest_stays)
        if not rest_stays:
            torch.cuda.synchronize()
        return copies


def spin(machine: Machine) -> None:
    """torch.cuda._sleep, for longer than all that can run beside it."""

    def entry() -> bool:
        is_over, machine.has_stalled = machine.has_stalled, False
        return is_over

    assert machine.current is not None
    machine.current.queue.append(entry)


def compiled(machine: Machine) -> ModuleType:
    """sgl_kernel.kvcacheio: each function queues a copy, which reads its index lists when it runs."""

    def queued(name: str) -> Callable[..., None]:
        def run(named: dict[str, Any]) -> None:
            for moves in AOT_KERNELS[name](**named):
                for move in moves:
                    ctypes.memmove(move.target, move.source, move.size)

        def ask(**named: Any) -> None:
            try:
                AOT_KERNELS[name](**named)
            except CopyRefused as error:
                raise RuntimeError(str(error)) from error
            (machine.current or machine.ordinary).call(partial(run, named))

        return ask

    made = ModuleType("sgl_kernel.kvcacheio")
    vars(made).update({name: queued(name) for name in AOT_KERNELS})
    return made


def main(environment: str, how: str, shape: str, schedules: str, *faults: str) -> None:
    sys.path += [*map(str, Path(environment).glob("lib/python*/site-packages")), *FAKES]
    probe, _, subject = shape.partition(".")
    with installed(1) as machine, memory(machine) as made:
        torch.cuda._sleep = lambda cycles: spin(machine)
        if how == SPIN:
            cuda_hold.why_not = lambda outcome: "there is none"
        else:
            probe_server.CudaMachine = Prompt
        for probe_module in (layer_wait, host_tier, retract):
            probe_module.small_pool = partial(on_device, made)  # type: ignore[attr-defined]
        if how != NO_KERNELS:
            sys.modules |= {"sgl_kernel": ModuleType("sgl_kernel"), "sgl_kernel.kvcacheio": compiled(machine)}
        torch.cuda.get_device_capability = lambda: (9, 0)
        server: Any = ProbeServer(SGLANG, "cuda")
        server._device = "cpu"  # where torch puts the memory of the stand-in
        assert isinstance(server.start(), Hello)
        for fault in faults:
            put_fault(Path(environment), fault)
            for schedule in range(int(schedules)):
                reply = server.answer(Ask(probe=probe, subject=subject, seed=1, schedule=schedule))
                sys.stdout.write(encode(reply) + "\n")


def on_device(device: Memory, *args: Any, **named: Any) -> SmallPool:
    """A small pool in the memory of the device."""
    made = small_pool(*args, **named)
    for held in made.writer.found.buffers:
        device.put(held.rows)
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
