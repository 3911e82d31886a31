"""Options that several commands share, and their checks.

Invariants:
- The environment is read here and nowhere below.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcheck.core.base.cells import CONNECTIONS, STREAMED, kind_of, number_of
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import code_digest, file_digest
from kvcheck.core.base.record import Identity
from kvcheck.core.run.plan import MAX_DIGITS, MOST_SCHEDULES, Plan, parse_ranks

if TYPE_CHECKING:
    from kvcheck.core.probes.runner import ProbeRunner

DEFAULT_OUT = Path("reports/runs")
FORMATS = ("text", "json")
PLAIN = re.compile(r"[\w@%+=:,./-]+(#\d+)?")
"""Words that a shell takes as they are, RUN#N among them."""


def heading(text: str) -> Callable[..., Any]:
    return partial(typer.Option, rich_help_panel=text)


def _known_format(value: str) -> str:
    check_choice("--format", value, FORMATS)
    return value


subject, search = heading("What is run"), heading("How much is run")
where, results = heading("Where it runs"), heading("Results")


Seed = Annotated[int | None, search(help="Integer seed. Default: one is drawn and printed.")]
MinSchedules = Annotated[
    int | None, search(help="Schedules that a cell needs for a pass; its own minimum holds as well.")
]
Out = Annotated[Path, results(help="Folder where the run is stored.")]
StoredIn = Annotated[Path, typer.Option("--out", help="Folder where runs are stored.")]
Outputs = Annotated[
    list[str] | None,
    results("--output", "-o", metavar="FORMAT=PATH", help="Another report, see kvcheck list formats; repeatable."),
]
Format = Annotated[str, results("--format", help="What to print: text or json.", callback=_known_format)]
Reports = Annotated[bool, results(help="Write report.html and CSV tables beside run.json.")]
Verbose = Annotated[
    bool, results("--verbose", "-v", help="Print a line for each cell as it ends, notes, and all situations.")
]
Resume = Annotated[bool, results("--resume", help="Continue the newest interrupted run of the same plan.")]
ConditionalFails = Annotated[
    bool,
    results(
        "--fail-on-conditional",
        help="Also fail on conditional findings: those under an assumption that the engine does not promise.",
    ),
]


def command_line(*words: str, out: Path = DEFAULT_OUT) -> str:
    """Return a command to copy, with --out where runs are not stored in the usual folder."""
    more = () if out == DEFAULT_OUT else ("--out", str(out))
    return " ".join(word if PLAIN.fullmatch(word) else shlex.quote(word) for word in ("kvcheck", *words, *more))


def draw_seed() -> int:
    return secrets.randbelow(1_000_000)


def identity(trace: str | None = None, engine: ProbeRunner | None = None, own: str | None = None) -> Identity:
    """Return digests of the judged inputs. trace: of `--trace`. own: MODULE:NAME."""
    from kvcheck.core.stress.workload.synthetic import SAMPLE

    target = None if engine is None else engine.start().identity
    if own is not None:
        from kvcheck.commands.own_target import identity as own_identity

        target = own_identity(own)
    if trace is not None:
        trace = code_digest() if trace == SAMPLE else file_digest(Path(trace))  # the sample is made by the code
    return Identity(code=code_digest(), trace=trace, target=target)


def check_positive(name: str, value: float | None) -> None:
    """Raise UsageError unless the value is absent, or finite and at least 1 (for times: above 0)."""
    least = 0.001 if name == "--max-time" else 1
    if value is not None and not value >= least:  # written so that nan is refused
        raise UsageError(f"{name}: expected at least {least}, got {value}")
    if value == math.inf:
        raise UsageError(f"{name}: expected a number, got {value}; leave it out for no limit")


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def _check_target(plan: Plan) -> None:
    from kvcheck.core.stress.targets import TARGETS
    from kvcheck.core.stress.targets.own import is_own

    if plan.own_target is None or plan.own_target in TARGETS.names():
        return
    if not is_own(plan.target):
        known = ", ".join(TARGETS.names())
        raise UsageError(f"unknown target {plan.target!r}; a target of your own is MODULE:NAME; known: {known}")
    if plan.mutant is not None:
        raise UsageError(f"--mutant {plan.mutant}: it is put into kvcheck's own target; leave --target out")
    if plan.has_rank_processes:
        raise UsageError(f"--transport {plan.transport}: its processes run kvcheck's own target; leave --target out")


def check_plan(plan: Plan) -> None:
    """Raise UsageError or UnknownVerdict if this machine or version lacks something in the plan."""
    from kvcheck.core.cache.backend import BACKENDS
    from kvcheck.core.cache.transfer import TRANSPORTS
    from kvcheck.core.run.runners import row_of
    from kvcheck.core.stress.plan_scenario import check_bounds, check_decoder
    from kvcheck.core.stress.strategies import STRATEGIES
    from kvcheck.core.stress.targets.mutants import mutant
    from kvcheck.core.stress.workload.synthetic import trace_rows
    from kvcheck.core.stress.workload.traces import MAX_REQUESTS

    kind = kind_of(plan.device)
    BACKENDS.require(plan.backend)
    is_astray = plan.on_device != (kind in STREAMED) or (plan.on_device and plan.backend != kind)
    if not plan.has_rank_processes and is_astray:
        raise UsageError(f"--backend {plan.backend} does not run on --device {plan.device}")
    STRATEGIES.require(plan.strategy)
    TRANSPORTS.require(plan.transport)
    if plan.ranks is not None:
        parse_ranks(plan.ranks)
    if plan.engine_env is not None and plan.probe is None:
        raise UsageError("engine_env: expected a line of an installed engine beside it")
    check_decoder(plan)
    check_bounds(plan)
    row = row_of(plan)
    row.check(plan)
    if plan.mutant is not None:
        mutant(plan.mutant)
    _check_target(plan)
    check_positive("requests", plan.requests)
    if plan.requests is not None and plan.requests > MAX_REQUESTS:
        raise UsageError(f"requests: expected at most {MAX_REQUESTS}, got {plan.requests}")
    if plan.schedule > MOST_SCHEDULES:
        raise UsageError(f"schedule: expected at most {MOST_SCHEDULES}, got {plan.schedule}")
    if len(str(abs(plan.seed))) > MAX_DIGITS:
        raise UsageError(f"--seed: expected an integer of at most {MAX_DIGITS} digits, got {plan.seed}")
    if plan.expect is not None and plan.expect not in CODES:
        raise UsageError(f"expect: expected a finding code, got {plan.expect!r}; see kvcheck list codes")
    if plan.trace is not None:
        trace_rows(plan.trace, plan.requests)
    if kind == "cuda" and row.opens_device:
        from kvcheck.core.cache.backend.cuda import CudaBackend

        os.environ |= {name: os.environ.get(name, most) for name, most in CONNECTIONS.items()}
        CudaBackend(number_of(plan.device))
