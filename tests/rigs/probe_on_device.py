"""Answers one probe of the stand-in SGLang over a device that is a stand-in: a program of its own, as the engine is.

    python -m rigs.probe_on_device ENVIRONMENT HOW PROBE.SUBJECT SCHEDULES FAULT...    prints a reply a line

Invariants:
- The probe's pools lie in the memory of the device. The engine's other tensors lie on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fakes.cuda import Machine, installed
from fakes.cuda_tensors import Memory, memory
from fakes.engine import FAKES, put_fault

from kvcheck.core.base import cuda_hold
from kvcheck.core.probes.frame import probe_server
from kvcheck.core.probes.frame.cuda_streams import CudaMachine
from kvcheck.core.probes.frame.probe_server import ProbeServer
from kvcheck.core.probes.frame.wire import Ask, Hello, encode
from kvcheck.core.probes.sglang import SGLANG, layer_wait
from kvcheck.core.probes.sglang.rig.pools import SmallPool, small_pool

FLAG, SPIN = "flag", "spin"
"""How work is held: by a flag, or, where there is no triton, for a fixed time."""


class Prompt(CudaMachine):
    """Streams of a device that runs at once what is let go: who looks at memory later sees the load."""

    def taken(self, read: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        copies = super().taken(read)
        torch.cuda.synchronize()
        return copies


def spin(machine: Machine) -> None:
    """torch.cuda._sleep, for longer than all that can run beside it."""

    def entry() -> bool:
        is_over, machine.has_stalled = machine.has_stalled, False
        return is_over

    assert machine.current is not None
    machine.current.queue.append(entry)


def main(environment: str, how: str, shape: str, schedules: str, *faults: str) -> None:
    """Print the replies, fault by fault."""
    sys.path += [*map(str, Path(environment).glob("lib/python*/site-packages")), *FAKES]
    probe, _, subject = shape.partition(".")
    with installed(1) as machine, memory(machine) as made:
        torch.cuda._sleep = lambda cycles: spin(machine)
        if how == SPIN:
            cuda_hold.why_not = lambda outcome: "there is none"
        else:
            probe_server.CudaMachine = Prompt
        layer_wait.small_pool = lambda *args: on_device(made, *args)
        server: Any = ProbeServer(SGLANG, "cuda")
        server._device = "cpu"  # where torch puts the memory of the stand-in
        assert isinstance(server.start(), Hello)
        for fault in faults:
            put_fault(Path(environment), fault)
            for schedule in range(int(schedules)):
                reply = server.answer(Ask(probe=probe, subject=subject, seed=1, schedule=schedule))
                sys.stdout.write(encode(reply) + "\n")


def on_device(device: Memory, *args: Any) -> SmallPool:
    """A small pool in the memory of the device."""
    made = small_pool(*args)
    for held in made.writer.found.buffers:
        device.put(held.rows)
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
