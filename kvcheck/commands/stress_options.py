"""Options of `kvcheck stress`: what each means, in the words of its help.

Invariants:
- A default that is a number has one name, which the help and the command both use.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvcheck.commands.options import SEARCH, SUBJECT, WHERE
from kvcheck.commands.run_cells import DEFAULT_CPU_S, DEFAULT_SCHEDULES
from kvcheck.core.stress.mooncake_cell import SCHEDULES as OVER_MOONCAKE

Names = Annotated[
    list[str] | None, typer.Argument(metavar="SCENARIO", help="See kvcheck list scenarios. Default: all of them.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        help="See kvcheck list shapes; repeatable. Default: micro and tiny ones; for answers "
        "micro ones alone, for a trace, processes or a device tiny ones.",
        rich_help_panel=SUBJECT,
    ),
]
Target = Annotated[
    str,
    typer.Option(metavar="MODULE:NAME", help="Code of your own, in place of kvcheck's cache.", rich_help_panel=SUBJECT),
]
Mutant = Annotated[
    str | None, typer.Option(help="Put a known bug back; see kvcheck list mutants.", rich_help_panel=SUBJECT)
]
Trace = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Requests in Mooncake's JSONL format; sample: invented ones.", rich_help_panel=SUBJECT
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(help="Number of requests in a schedule, or to read from the trace.", rich_help_panel=SUBJECT),
]
Decoder = Annotated[
    str | None,
    typer.Option(
        help="See kvcheck list decoders. Default: words, or the one that shows the mutant.",
        rich_help_panel=SUBJECT,
        hidden=True,
    ),
]

Schedules = Annotated[
    int | None,
    typer.Option(
        help=f"Schedules of each cell (scenario and shape). Default: {DEFAULT_SCHEDULES}; 1 for a trace and for ranks "
        f"that are processes; {OVER_MOONCAKE} for the cell over mooncake.",
        rich_help_panel=SEARCH,
    ),
]
MaxTime = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which the whole run stops. Default: "
        f"{DEFAULT_CPU_S:g} CPU seconds for each process, and more where a cell needs them for a pass.",
        rich_help_panel=SEARCH,
    ),
]
Strategy = Annotated[
    str,
    typer.Option(help="Order of operations: portfolio, eager, lazy, delay, random or answers.", rich_help_panel=SEARCH),
]
AnswersWithin = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Run every schedule whose answers to the process differ from the eager order's in at most K places. "
        "--schedules is then the number of workloads. Default: one of each variant.",
        rich_help_panel=SEARCH,
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="A-B", help="Run all seeds from A to B, for hours; go on with --resume.", rich_help_panel=SEARCH
    ),
]

Device = Annotated[str, typer.Option(help="cpu, threads, cuda or cuda:N.", rich_help_panel=WHERE)]
Transport = Annotated[
    str | None,
    typer.Option(
        help="loopback: one process. tcp, mooncake, ipc: one for each rank; with ipc they share memory, of this host "
        "or of --device cuda. Default: loopback, and one cell over mooncake where it can be used.",
        rich_help_panel=WHERE,
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        metavar="PxD",
        help="Prefill and decode ranks, such as 2x2. Default: schedules alternate.",
        rich_help_panel=WHERE,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(help="Processes. Default: one for each core, at most one for each cell.", rich_help_panel=WHERE),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N", help="With --seeds: the I-th of N shares of them; see kvcheck merge.", rich_help_panel=WHERE
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="With --seeds: run as tasks of Ray; local, auto or HOST:PORT.", rich_help_panel=WHERE
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        help="simulated, eager, threads, cuda. Default: by device and transport.", rich_help_panel=WHERE, hidden=True
    ),
]
