"""Options of `kvcheck stress`: what each means, in the words of its help.

Invariants:
- A default that is a number has one name here, which the help and the command both use.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvcheck.core.stress.mooncake_cell import SCHEDULES as MOST

DEFAULT_SCHEDULES = 24
DEFAULT_CPU_S = 55.0
"""CPU seconds of each process: on an idle machine, a run of everything takes a minute and a half. A busy one takes
longer, and tries as much."""

Names = Annotated[
    list[str] | None, typer.Argument(help="See kvcheck list scenarios, or server-scenarios. Default: all of them.")
]

TRANSPORT_HELP = (
    "loopback: one process. tcp, mooncake, ipc: one for each rank; with ipc they share memory, of this host or of "
    "--device cuda. "
    "Default: loopback, and for pd-transfer with llama-3-tiny also a cell over mooncake, where it can be used."
)
Transport = Annotated[str | None, typer.Option(help=TRANSPORT_HELP)]
Ranks = Annotated[
    str | None, typer.Option(metavar="PxD", help="Prefill and decode ranks, such as 2x2. Default: schedules alternate.")
]

Target = Annotated[
    str,
    typer.Option(
        metavar="NAME[:VENV]|MODULE:NAME|URL",
        help="What to test: builtin, an installed engine (kvcheck list targets), MODULE:NAME of your own, or a running "
        "server's address.",
    ),
]

SCHEDULES_HELP = (
    f"Schedules of each cell (scenario and shape). Default: {DEFAULT_SCHEDULES}; "
    f"1 for a trace, and for ranks that are processes. The cell over mooncake that a run has by default: {MOST}."
)
MAX_TIME_HELP = (
    "Seconds after which the whole run stops. Default: "
    f"{DEFAULT_CPU_S:g} CPU seconds for each process, and more where a cell needs them for a pass."
)

EngineEnv = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A variable of the installed engine, such as MC_LOG_LEVEL; repeatable."),
]
NUMBERS = ("schedules", "max_time", "requests", "jobs", "min_schedules")
"""Options that are numbers from 1, for times above 0."""
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        help="See kvcheck list shapes; repeatable. Default: all micro and tiny ones; for answers "
        "the micro ones alone, for a trace, processes or a device the tiny ones."
    ),
]
Backend = Annotated[str | None, typer.Option(help="simulated, eager, threads, cuda. Default: by device and transport.")]
Strategy = Annotated[str, typer.Option(help="Order of operations: portfolio, eager, lazy, delay, random or answers.")]
AnswersWithin = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Run every schedule whose answers to the process differ from the eager order's in at most K places, of "
        "each variant. --schedules is then the number of workloads. Default: one of each variant.",
    ),
]
Decoder = Annotated[
    str | None, typer.Option(help="See kvcheck list decoders. Default: words, or the one that shows the mutant.")
]
Trace = Annotated[
    str | None, typer.Option(metavar="FILE", help="Requests in Mooncake's JSONL format; sample: invented ones.")
]
Requests = Annotated[int | None, typer.Option(help="Number of requests in a schedule, or to read from the trace.")]
Jobs = Annotated[int | None, typer.Option(help="Processes. Default: one for each core, at most one for each cell.")]
