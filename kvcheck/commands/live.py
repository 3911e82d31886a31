"""`kvcheck stress --target http://HOST:PORT --known-answers DIR`: a running server, judged by answers known beforehand.

Invariants:
- What cannot be asked as it was asked is one line and exit 2, before a run has a folder. A server that does not serve
  the model is such a line.
- A key comes from the environment by name. It is in no record, no line and no message.
- Only --admin lets anything be flushed, paused or reset; only --allow-remote lets another machine be asked.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvcheck.commands.closing import close
from kvcheck.commands.live_rounds import end_rounds, run_rounds
from kvcheck.commands.options import check_positive, draw_seed, identity, repro
from kvcheck.commands.report import check_outputs, parse_outputs
from kvcheck.commands.terminal import Terminal
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.clients.client import Client, Trouble
from kvcheck.core.live.clients.connection import Connection, connect
from kvcheck.core.live.conclusion import RoundCell, RoundPlan
from kvcheck.core.live.counting import parse_requirements
from kvcheck.core.live.exchange import Served
from kvcheck.core.live.line import LivePlan, check_sizes
from kvcheck.core.live.runner import LiveRunner
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.live.scenarios.scenario import Scenario
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import make_folder

if TYPE_CHECKING:
    from kvcheck.core.model.folder import KnownAnswers

DEFAULT_ROUNDS = 4
DEFAULT_REQUESTS = 24
DEFAULT_CONCURRENCY = 8
DEFAULT_TIMEOUT_S = 120.0
MOST_TIMEOUT_S = 86400.0
MASK = "<key>"
SERVED = ("engine", "version", "model", "longest", "pool", "page", "mode")

T = TypeVar("T")
P = TypeVar("P", bound=RoundPlan)

Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="With --target http://...: the model that the server serves, by kvcheck model make."
    ),
]
OwnModel = Annotated[
    bool,
    typer.Option(
        "--own-model", help="With --target http://...: judge the model that the server serves, whatever it is."
    ),
]
Vocabulary = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="With --own-model: token ids below N are sent. Default: 1000, which every model has."
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="With --own-model: compare with answers that kvcheck reference record has kept."),
]
Decode = Annotated[
    str | None, typer.Option(metavar="URL", help="Decode server of a pair; --target is its prefill server.")
]
Engine = Annotated[
    str | None, typer.Option("--engine", help="sglang, vllm, llamacpp or openai. Default: by what the server answers.")
]
Metrics = Annotated[
    list[str] | None, typer.Option(metavar="URL", help="Metrics of the server, repeatable. Default: its own /metrics.")
]
Require = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND=N", help="Evidence that the run needs, such as retract=10,hit=100; kvcheck list evidence."
    ),
]
Concurrency = Annotated[
    int | None, typer.Option(help=f"Requests to a server at a time. Default: {DEFAULT_CONCURRENCY}.")
]
Timeout = Annotated[
    float | None,
    typer.Option(help=f"Seconds of silence after which a request is given up. Default: {DEFAULT_TIMEOUT_S:g}."),
]
KeyEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with the server's API key. It is not recorded.")
]
Admin = Annotated[bool, typer.Option("--admin", help="Allow calls that make the server retract all that runs.")]
AllowRemote = Annotated[bool, typer.Option("--allow-remote", help="Allow a server on another machine.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options that apply to running servers only. Unset options are None or False."""

    known_answers: Path | None = None
    own_model: bool = False
    vocabulary: int | None = None
    reference: Path | None = None
    decode: str | None = None
    engine_name: str | None = None
    metrics: list[str] | None = None
    require: list[str] | None = None
    concurrency: int | None = None
    timeout: float | None = None
    key_env: str | None = None
    admin: bool = False
    allow_remote: bool = False

    @property
    def timeout_s(self) -> float:
        """Seconds of silence after which a request is given up."""
        return self.timeout or DEFAULT_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run against a server reads of the options that other runs have too."""

    target: str
    scenarios: list[str] | None
    schedules: int | None
    requests: int | None
    max_time: float | None
    seed: int | None
    out: Path
    output: list[str] | None
    format_name: str
    reports: bool


def refuse_options_of_servers(ctx: typer.Context) -> None:
    """Raise UsageError if an option for servers was given with a target that is none."""
    for field in dataclasses.fields(ServerOptions):
        if is_given(ctx, field.name):
            raise UsageError(
                f"{option_named(ctx, field.name)} is for a running server: expected --target http://HOST:PORT"
            )


def _refuse_others(ctx: typer.Context) -> None:
    """Raise UsageError if an option was given that a run against a server does not read."""
    read = {field.name for kind in (ServerOptions, RunOptions) for field in dataclasses.fields(kind)}
    for name in ctx.params:
        if name not in read and is_given(ctx, name):
            raise UsageError(
                f"{option_named(ctx, name)}: not for a running server; leave it out with --target http://..."
            )


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was typed, or set in a place of settings."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def option_named(ctx: typer.Context, name: str) -> str:
    """The option of a parameter, as it is typed."""
    return next(each.opts[0] for each in ctx.command.params if each.name == name)


def read_options(kind: type[T], ctx: typer.Context) -> T:
    """The options of one kind, by the names of its fields."""
    return kind(**{field.name: ctx.params[field.name] for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


def options_of_servers(ctx: typer.Context) -> tuple[RunOptions, ServerOptions]:
    """What a run against a server reads. Raises UsageError where something else was given, or what it cannot take."""
    _refuse_others(ctx)
    run, server = read_options(RunOptions, ctx), read_options(ServerOptions, ctx)
    for name in run.scenarios or ():
        LIVE_SCENARIOS.require(name)
    check_timeout(server.timeout)
    return run, server


def stress_server(ctx: typer.Context) -> int:
    """Run the scenarios against one server, and judge them."""
    began = time.monotonic()
    run, server = options_of_servers(ctx)
    for name in ("vocabulary", "reference"):
        if getattr(server, name) is not None:
            raise UsageError(f"--{name} is for a model whose answers are not known: expected --own-model beside it")
    outputs = parse_outputs(run.output, run.format_name)
    required = parse_requirements(server.require or [])
    sizes = {
        "requests": run.requests or DEFAULT_REQUESTS,
        "concurrency": DEFAULT_CONCURRENCY if server.concurrency is None else server.concurrency,
    }
    check_sizes(**sizes)
    known = known_answers(server.known_answers)
    client = client_of(run.target, server, known)
    served = describe(client, server)
    runner = LiveRunner(
        client, Alphabet(known.parameters), timeout_s=server.timeout_s, is_balanced=bool(server.metrics)
    )
    names = secrets.randbelow(1 << 32)
    runner.begin(served, names=names)
    check_outputs(outputs)
    make_folder(run.out)
    drawn = draw_seed() if run.seed is None else run.seed
    base = LivePlan(
        scenario="",
        target=run.target,
        known_answers=str(server.known_answers),
        decode=server.decode,
        engine=served.engine,
        seed=drawn,
        names=names,
        **sizes,
        longest=min(served.longest or known.parameters.length, known.parameters.length),
        pool=served.pool,
        admin=int(server.admin),
    )
    progress, untried = plan_scenarios(run, lambda name: dataclasses.replace(base, scenario=name), client, served)
    session = _session(ctx.obj, run, base, progress, required, untried)
    session.facts = {"server": server_facts(served, known, base)}
    session.identity = dataclasses.replace(identity(), target=known.digest)
    place = f"{served.engine} {served.version or ''}".strip()
    session.say(f"kvcheck {session.version}  seed {drawn}  run {session.run_id}  {place} at {run.target}")
    session.say()
    interrupted = run_rounds(session, runner, progress, None if run.max_time is None else began + run.max_time)
    end_rounds(session, progress, required, client, untried)
    return close(session, outputs, reports=run.reports, interrupted=interrupted)


def _session(
    argv: list[str],
    run: RunOptions,
    base: LivePlan,
    progress: Sequence[RoundCell[LivePlan]],
    required: Mapping[str, int],
    untried: list[str],
) -> Session:
    return Session(
        argv=[*argv],
        repro=repro(argv, seed=run.seed, drawn=base.seed),
        seed=base.seed,
        plan={
            "cells": [each.plan.line() for each in progress],
            "scenarios": [each.plan.cell for each in progress],
            "schedules": run.schedules or DEFAULT_ROUNDS,
            "max_time_s": run.max_time,
            "require": dict(required),
            "not_tried": untried,
        },
        out=run.out,
        teller=Terminal(is_quiet=run.format_name == "json"),
    )


def check_timeout(timeout_s: float | None) -> None:
    """Raise UsageError unless sockets take the time limit."""
    check_positive("--timeout", timeout_s)
    if timeout_s is not None and timeout_s > MOST_TIMEOUT_S:
        raise UsageError(f"--timeout: expected at most {MOST_TIMEOUT_S:,.0f} seconds, got {timeout_s:g}")


def known_answers(folder: Path | None) -> KnownAnswers:
    """The model that the server is said to serve. Raises UsageError."""
    if folder is None:
        raise UsageError(
            "--target http://...: expected --known-answers DIR beside it, the folder that the server serves; make one "
            "with kvcheck model make --out DIR and start the server with it. Or judge the model that it serves now, "
            "with --own-model"
        )
    from kvcheck.core.model.folder import read_model  # it needs torch, which a command's help does not

    return read_model(folder)


def client_of(target: str, server: ServerOptions, known: KnownAnswers | None) -> Client:
    """The client of the server that answers at `target`. Raises UsageError where none does."""
    words = {} if known is None else {word: n for n, word in enumerate(Alphabet(known.parameters).words())}
    return connect(
        Connection(
            target=target,
            decode=server.decode,
            engine=server.engine_name,
            metrics=tuple(server.metrics or ()),
            key=_key(server),
            timeout_s=server.timeout_s,
            allow_remote=server.allow_remote,
            token_of=words.get,
        )
    )


def _key(server: ServerOptions) -> str | None:
    """The key that --key-env names. Raises UsageError where the environment has none of that name."""
    if server.key_env is None:
        return None
    key = os.environ.get(server.key_env)
    if not key:
        raise UsageError(f"--key-env {server.key_env}: expected an environment variable with a key, found none")
    return key


def describe(client: Client, server: ServerOptions) -> Served:
    """What the server says of itself, without its key if it says that too. Raises UsageError where it says nothing."""
    try:
        served = client.served()
    except Trouble as trouble:
        raise UsageError(f"the server does not say what it is: {trouble}") from trouble
    key = _key(server)
    if key is None:
        return served

    def masked(value: object) -> object:
        return value.replace(key, MASK) if isinstance(value, str) else value

    texts = {name: masked(getattr(served, name)) for name in ("version", "model")}
    facts = {str(masked(name)): masked(fact) for name, fact in served.facts.items()}
    return dataclasses.replace(served, facts=facts, **texts)  # type: ignore[arg-type]


def plan_scenarios(
    run: RunOptions, plan_of: Callable[[str], P], client: Client, served: Served, *, rounds: int = DEFAULT_ROUNDS
) -> tuple[list[RoundCell[P]], list[str]]:
    """The scenarios of a run. Those that nobody named and this server cannot get into are left out, with a line.

    plan_of: the plan of a scenario. rounds: of each, where nobody says how many.
    """
    progress, untried = [], []
    for name in run.scenarios or LIVE_SCENARIOS.names():
        scenario = LIVE_SCENARIOS.load(name)
        why_not = scenario.why_not(served)
        if not run.scenarios and (why := why_not or scenario.unlikely(served)) is not None:
            untried.append(f"not tried: {name}: {why}; {_advice(client, scenario)}")
            continue
        progress.append(
            RoundCell(
                plan=plan_of(name),
                scenario=scenario,
                flags=client.flags,
                wanted=run.schedules or rounds,
                why_not=None if why_not is None else f"{why_not}; {_advice(client, scenario)}",
            )
        )
    return progress, untried


def _advice(client: Client, scenario: Scenario) -> str:
    """What to change in the server for a scenario's own evidence."""
    kind = next(iter((*scenario.needs, *scenario.any_of)))
    return client.flags.get(kind, "this engine has no way that kvcheck knows")


def server_facts(served: Served, known: KnownAnswers, base: LivePlan) -> dict[str, object]:
    """What the record says of the server."""
    return {
        "address": base.target,
        "decode": base.decode,
        "known_answers": known.digest,
        "parameters": known.parameters.to_json(),
        **{name: getattr(served, name) for name in SERVED},
        "said": dict(served.facts),
    }
