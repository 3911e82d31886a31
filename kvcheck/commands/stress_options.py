"""Options of `kvcheck stress`, with their help.

Invariants:
- A numeric default has one name, for the help and the command.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvcheck.commands.options import search, subject, where
from kvcheck.commands.run_cells import DEFAULT_CPU_S, DEFAULT_SCHEDULES
from kvcheck.core.stress.mooncake_cell import SCHEDULES as OVER_MOONCAKE

Names = Annotated[
    list[str] | None, typer.Argument(metavar="SCENARIO", help="See kvcheck list scenarios. Default: all of them.")
]
Shapes = Annotated[
    list[str] | None,
    subject(
        help="See kvcheck list shapes; repeatable. Default: micro and tiny ones; for answers "
        "micro ones alone, for a trace, processes or a device tiny ones."
    ),
]
Target = Annotated[str, subject(metavar="MODULE:NAME", help="Code of your own, in place of kvcheck's cache.")]
Mutant = Annotated[str | None, subject(help="Put a known bug back; see kvcheck list mutants.")]
Trace = Annotated[
    str | None, subject(metavar="FILE", help="Requests in Mooncake's JSONL format; sample: invented ones.")
]
Requests = Annotated[int | None, subject(help="Number of requests in a schedule, or to read from the trace.")]
Decoder = Annotated[
    str | None,
    subject(help="See kvcheck list decoders. Default: words, or the one that shows the mutant.", hidden=True),
]

Schedules = Annotated[
    int | None,
    search(
        help=f"Schedules of each cell (scenario and shape). Default: {DEFAULT_SCHEDULES}; 1 for a trace and for ranks "
        f"that are processes; {OVER_MOONCAKE} for the cell over mooncake."
    ),
]
MaxTime = Annotated[
    float | None,
    search(
        help="Seconds after which the whole run stops. Default: "
        f"{DEFAULT_CPU_S:g} CPU seconds for each process, and more where a cell needs them for a pass."
    ),
]
Strategy = Annotated[str, search(help="Order of operations: portfolio, eager, lazy, delay, random or answers.")]
AnswersWithin = Annotated[
    int | None,
    search(
        metavar="K",
        help="Run every schedule whose answers to the process differ from the eager order's in at most K places. "
        "--schedules is then the number of workloads. Default: one of each variant.",
    ),
]
Seeds = Annotated[
    str | None,
    search(metavar="A-B", help="Run all seeds from A to B, for hours; go on with --resume."),
]

Device = Annotated[str, where(help="cpu, threads, cuda or cuda:N.")]
Transport = Annotated[
    str | None,
    where(
        help="loopback: one process. tcp, mooncake, ipc: one for each rank; with ipc they share memory, of this host "
        "or of --device cuda. Default: loopback, and one cell over mooncake where it can be used."
    ),
]
Ranks = Annotated[
    str | None, where(metavar="PxD", help="Prefill and decode ranks, such as 2x2. Default: schedules alternate.")
]
Jobs = Annotated[int | None, where(help="Processes. Default: one for each core, at most one for each cell.")]
Shard = Annotated[
    str | None, where(metavar="I/N", help="With --seeds: the I-th of N shares of them; see kvcheck merge.")
]
Ray = Annotated[
    str | None, where(metavar="ADDRESS", help="With --seeds: run as tasks of Ray; local, auto or HOST:PORT.")
]
Backend = Annotated[
    str | None, where(help="simulated, eager, threads, cuda. Default: by device and transport.", hidden=True)
]
