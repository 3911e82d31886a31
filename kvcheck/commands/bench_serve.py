"""`kvcheck bench serve --target URL --known-answers DIR`: prices of running servers, and a verdict on their answers.

Invariants:
- What cannot be asked as it was asked is one line and exit 2, before a run has a folder.
- Each finished round is saved before the next one; an interrupt keeps them.
- A wrong answer is exit 1, and no price of the run is a measurement then.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands.closing import close
from kvcheck.commands.live import (
    DEFAULT_CONCURRENCY,
    DEFAULT_REQUESTS,
    SERVED,
    ServerOptions,
    check_timeout,
    client_of,
    describe,
    is_given,
    known_answers,
    option_named,
    read_options,
)
from kvcheck.commands.options import draw_seed, identity, repro
from kvcheck.commands.price_lines import case_heading, price_line
from kvcheck.commands.report import check_outputs, parse_outputs
from kvcheck.commands.terminal import Terminal, cell_lines, complain
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.server_facts import SERVE
from kvcheck.core.live.clients.connection import check_scheme, is_address
from kvcheck.core.live.exchange import Served
from kvcheck.core.live.line import check_sizes
from kvcheck.core.live.prices.bench import Arm, ServeBench
from kvcheck.core.live.prices.load import FRESH, LOADS, RETURNING, SHARED, Load
from kvcheck.core.live.prices.side import Side
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import make_folder

if TYPE_CHECKING:
    from kvcheck.core.model.folder import KnownAnswers

DEFAULT_PROMPT = 384
DEFAULT_ANSWER = 64
ROUNDS_LEAST = 15
TARGET, VERSUS, REUSE = "target", "versus", "reuse"
TIME_UP = "its time was up; use a larger --max-time"
INTERRUPTED = "the run was interrupted"

Target = Annotated[str | None, typer.Option(metavar="URL", help="With serve: the running server.")]
Versus = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="With serve: the server to compare it with. Default: itself, with and without reuse."
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="With serve: the model that the servers serve, by kvcheck model make."),
]
LoadKind = Annotated[
    str | None,
    typer.Option("--load", help=f"With --versus: {', '.join(LOADS)}. Default: {SHARED} beginnings of prompts."),
]
Requests = Annotated[int | None, typer.Option(help=f"With serve: requests of a pass. Default: {DEFAULT_REQUESTS}.")]
Prompt = Annotated[int | None, typer.Option(help=f"With serve: tokens of a prompt. Default: {DEFAULT_PROMPT}.")]
AnswerTokens = Annotated[
    int | None, typer.Option("--answer", help=f"With serve: tokens of an answer. Default: {DEFAULT_ANSWER}.")
]
Admin = Annotated[bool, typer.Option("--admin", help="With serve: empty the prefix cache before each pass.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `bench serve` alone reads, by the names of the options; None and False are what nobody gave."""

    target: str | None
    versus: str | None
    known_answers: Path | None
    load: str | None
    requests: int | None
    prompt: int | None
    answer: int | None
    concurrency: int | None
    engine_name: str | None
    timeout: float | None
    key_env: str | None
    admin: bool
    allow_remote: bool

    @property
    def server(self) -> ServerOptions:
        """How a server is reached."""
        names = ("known_answers", "engine_name", "concurrency", "timeout", "key_env", "admin", "allow_remote")
        return ServerOptions(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What it reads of the options that other benchmarks have too."""

    cases: list[str] | None
    seed: int | None
    precision: float
    max_time: float
    rounds: int
    out: Path
    output: list[str] | None
    format_name: str
    reports: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A server that has been asked what it is."""

    address: str
    side: Side
    served: Served


def refuse_options_of_serve(ctx: typer.Context) -> None:
    """Raise UsageError if an option of `bench serve` was given without it."""
    for field in dataclasses.fields(ServeOptions):
        if is_given(ctx, field.name):
            raise UsageError(f"{option_named(ctx, field.name)} is for running servers: expected kvcheck bench {SERVE}")


def bench_serve(ctx: typer.Context) -> int:
    """Measure one server, or two, and judge what they answer."""
    began = time.monotonic()
    _refuse_others(ctx)
    run, asked = read_options(RunOptions, ctx), read_options(ServeOptions, ctx)
    outputs = parse_outputs(run.output, run.format_name)
    _check(run, asked)
    if asked.known_answers is None:
        raise UsageError(
            f"bench {SERVE}: expected --known-answers DIR, the folder that the servers serve; make one with kvcheck "
            "model make --out DIR and start them with it"
        )
    known = known_answers(asked.known_answers)
    drawn = draw_seed() if run.seed is None else run.seed
    load = _load(asked, seed=drawn, pool=None)
    servers = _servers(asked, known)
    names = secrets.randbelow(1 << 32)
    bench = _bench(asked, load, servers, known, names=names)
    bench.begin()
    check_outputs(outputs)
    make_folder(run.out)
    session = Session(
        argv=[*ctx.obj],
        repro=repro(ctx.obj, seed=run.seed, drawn=drawn),
        seed=drawn,
        plan={
            "cases": bench.plan_names,
            "target": asked.target,
            "versus": asked.versus,
            "known_answers": str(asked.known_answers),
            "load": {arm.name: dataclasses.asdict(arm.load) for arm in bench.arms.values()},
            "names": names,
            "admin": asked.admin,
            **{name: getattr(run, name) for name in ("precision", "rounds")},
            "max_time_s": run.max_time,
        },
        out=run.out,
        teller=Terminal(is_quiet=run.format_name == "json"),
    )
    _describe_run(session, bench, servers, known)
    interrupted = _measure(session, bench, run, until=began + run.max_time)
    return close(session, outputs, reports=run.reports, interrupted=interrupted)


def _refuse_others(ctx: typer.Context) -> None:
    """Raise UsageError if an option was given that `bench serve` does not read."""
    read = {field.name for kind in (ServeOptions, RunOptions) for field in dataclasses.fields(kind)}
    for name in ctx.params:
        if name not in read and is_given(ctx, name):
            raise UsageError(f"{option_named(ctx, name)}: not for running servers; leave it out with bench {SERVE}")


def _check(run: RunOptions, asked: ServeOptions) -> None:
    """Raise UsageError for what no server has to be asked about."""
    if run.cases != [SERVE]:
        raise UsageError(f"bench {SERVE}: expected no other case beside it, got {' '.join(run.cases or ())}")
    if not 0 < run.precision < math.inf:
        raise UsageError(f"--precision: expected a number above 0, such as 0.03, got {run.precision}")
    if asked.target is None:
        raise UsageError(f"bench {SERVE}: expected --target http://HOST:PORT, the server to measure")
    for name, address in (("--target", asked.target), ("--versus", asked.versus)):
        if address is not None and not is_address(address):
            check_scheme(name, address)
            raise UsageError(f"{name}: expected http://HOST:PORT, got {address!r}")
    if asked.load is not None and asked.versus is None:
        raise UsageError(
            f"--load {asked.load}: it is for two servers; without --versus, {SHARED} and {FRESH} are compared"
        )
    check_timeout(asked.timeout)


def _load(asked: ServeOptions, *, seed: int, pool: int | None) -> Load:
    """The load that was asked for. Raises UsageError. pool: None before the servers said theirs."""
    sizes = {
        "requests": DEFAULT_REQUESTS if asked.requests is None else asked.requests,
        "concurrency": DEFAULT_CONCURRENCY if asked.concurrency is None else asked.concurrency,
    }
    check_sizes(**sizes)
    kind = asked.load or SHARED
    return Load(
        kind=SHARED if kind == RETURNING and pool is None else kind,
        prompt=DEFAULT_PROMPT if asked.prompt is None else asked.prompt,
        answer=DEFAULT_ANSWER if asked.answer is None else asked.answer,
        seed=seed,
        pool=pool,
        **sizes,
    )


def _servers(asked: ServeOptions, known: KnownAnswers) -> list[Asked]:
    """The servers that were named, each asked what it is. An address that is named twice is one server."""
    alphabet, options = Alphabet(known.parameters), asked.server
    found: dict[str, Asked] = {}
    for address in (asked.target, asked.versus):
        if address is None or address in found:
            continue
        client = client_of(address, options, known)
        served = describe(client, options)
        longest = min(served.longest or known.parameters.length, known.parameters.length)
        side = Side(client, served, alphabet, longest=longest, timeout_s=options.timeout_s, admin=asked.admin)
        found[address] = Asked(address=address, side=side, served=served)
    return [found[address] for address in (asked.target, asked.versus) if address is not None]


def _bench(asked: ServeOptions, load: Load, servers: list[Asked], known: KnownAnswers, *, names: int) -> ServeBench:
    parameters = known.parameters
    if asked.load == RETURNING:
        pools = [each.served.pool for each in servers]
        known_pools = [pool for pool in pools if pool is not None]
        if len(known_pools) < len(pools):
            raise UsageError(f"--load {RETURNING}: a server does not say how many tokens its pool holds")
        load = _load(asked, seed=load.seed, pool=max(known_pools))
    load.check(parameters, min(each.side.longest for each in servers))
    engines = dict.fromkeys(each.served.engine for each in servers)
    shape = f"{parameters.family}-{parameters.layers}x{parameters.kv_heads}x{parameters.head_dim}"
    if asked.versus is None:
        (server,) = servers
        baseline = Arm(name=FRESH, side=server.side, load=dataclasses.replace(load, kind=FRESH))
        arm = Arm(name=REUSE, side=server.side, load=load)
    else:
        baseline, arm = (
            Arm(name=name, side=each.side, load=load) for name, each in zip((TARGET, VERSUS), servers, strict=True)
        )
    return ServeBench(
        baseline=baseline, arm=arm, names=names, shape=shape, device=", ".join(engines), is_reuse=asked.versus is None
    )


def _describe_run(session: Session, bench: ServeBench, servers: list[Asked], known: KnownAnswers) -> None:
    """Facts of the record, and the first line."""
    from kvcheck.core.bench.noise import machine, noise

    facts = _facts(servers[0], known)
    for each in servers[1:]:
        facts |= {f"{VERSUS}.{name}": fact for name, fact in _facts(each, known).items()}
    device = bench.rounds.compared.device
    session.facts = {"server": facts, "device": device, "hardware": machine(), "noise_before": noise()}
    session.identity = dataclasses.replace(identity(), target=known.digest)
    places = [f"{each.served.engine} {each.served.version or ''}".strip() + f" at {each.address}" for each in servers]
    session.say(f"kvcheck {session.version}  seed {session.record(complete=False).seed}  run {session.run_id}")
    session.say(f" {' versus '.join(places)}")
    session.say()


def _facts(server: Asked, known: KnownAnswers) -> dict[str, object]:
    """What the record says of a server."""
    return {
        "address": server.address,
        "known_answers": known.digest,
        "parameters": known.parameters.to_json(),
        **{name: getattr(server.served, name) for name in SERVED},
        "said": dict(server.served.facts),
    }


def _measure(session: Session, bench: ServeBench, run: RunOptions, *, until: float) -> bool:
    """All rounds; True when interrupted."""
    from kvcheck.core.bench.noise import noise

    why_few, interrupted = f"more were not asked for; use --rounds {ROUNDS_LEAST}", False
    try:
        why_few = _rounds(session, bench, run, until) or why_few
    except KeyboardInterrupt:
        complain("interrupted: the finished rounds are kept")
        bench.interrupted()
        why_few, interrupted = INTERRUPTED, True
    if not interrupted:
        bench.end()
    _keep(session, bench, why_few)
    session.facts["noise_after"] = noise()
    session.warnings += bench.notes
    for row in session.bench:
        session.say(case_heading(row))
        session.say(price_line(row))
    session.say()
    for result in session.results:
        for line in cell_lines(result):
            session.say(line)
    for line in bench.notes:
        session.say(f" ----  {line}")
    return interrupted


def _rounds(session: Session, bench: ServeBench, run: RunOptions, until: float) -> str | None:
    """Send rounds until there is a reason to end, and give it; None where all that were asked for have been sent."""
    head = "warm-up"

    def told(name: str, answered: int) -> None:
        session.progress(f"{head}: {name}, {answered} answers")

    goes_on = bench.warm_up(until=until, told=told)
    while goes_on and len(bench.rounds.times) < run.rounds:
        if time.monotonic() >= until:
            return TIME_UP
        head = f"round {len(bench.rounds.times) + 1} of {run.rounds} at most"
        goes_on = bench.add_round(until=until, told=told)
        _keep(session, bench, "more were not made yet")
        if len(bench.rounds.times) >= min(ROUNDS_LEAST, run.rounds) and bench.rounds.is_precise(run.precision):
            return None
    if goes_on:
        return None
    return TIME_UP if time.monotonic() >= until else "a round was not answered whole"


def _keep(session: Session, bench: ServeBench, why_few: str) -> None:
    """Put what is known so far into the record, and save it."""
    session.bench = bench.rows()
    session.results = bench.results(why_few)
    session.keep(tuple(bench.take_findings()))
    session.save(complete=False)
