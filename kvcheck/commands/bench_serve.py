"""`kvcheck bench serve URL --known-answers DIR`: prices of running servers, and a verdict on their answers.

Invariants:
- Each finished round is saved before the next one.
- A wrong answer is exit 1, and makes all prices of the run invalid.
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

from kvcheck.commands import server as of_server
from kvcheck.commands.asked import Asked
from kvcheck.commands.bench import (
    DEFAULT_MAX_TIME_S,
    DEFAULT_ROUNDS,
    ROUNDS_LEAST,
    MaxTime,
    Precision,
    PriceTable,
    Rounds,
)
from kvcheck.commands.options import (
    DEFAULT_OUT,
    Format,
    Out,
    Outputs,
    Reports,
    Seed,
    check_positive,
    draw_seed,
    identity,
)
from kvcheck.commands.server import DEFAULT_REQUESTS, Server, facts_of, known_answers
from kvcheck.commands.terminal import cell_lines, columns, complain
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.clients.connection import check_address
from kvcheck.core.live.exchange import Served
from kvcheck.core.live.line import check_sizes
from kvcheck.core.live.prices.bench import LoadedServer, ServeBench
from kvcheck.core.live.prices.load import FRESH, LOADS, RETURNING, SHARED, ServingLoad
from kvcheck.core.live.prices.side import Side
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.run.session import Session

if TYPE_CHECKING:
    from kvcheck.core.model.folder import KnownAnswers

DEFAULT_PROMPT = 384
DEFAULT_ANSWER = 64
TARGET, VERSUS, REUSE = "target", "versus", "reuse"
TIME_UP = "its time was up; use a larger --max-time"
INTERRUPTED = "the run was interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    address: str
    side: Side
    served: Served


Versus = Annotated[
    str | None,
    of_server.reached(metavar="URL", help="The server to compare it with. Default: itself, with and without reuse."),
]
LoadKind = Annotated[
    str | None,
    of_server.sent("--load", help=f"With --versus: {', '.join(LOADS)}. Default: {SHARED} beginnings of prompts."),
]
Requests = Annotated[int, of_server.sent(help="Requests of a pass.")]
Prompt = Annotated[int, of_server.sent(help="Tokens of a prompt.")]
AnswerTokens = Annotated[int, of_server.sent(help="Tokens of an answer.")]
Admin = Annotated[bool, of_server.reached("--admin", help="Empty the prefix cache before each pass.")]


def bench_serve(
    ctx: typer.Context,
    url: of_server.Url,
    known: Annotated[Path, of_server.KNOWN_ANSWERS],
    versus: Versus = None,
    load_kind: LoadKind = None,
    requests: Requests = DEFAULT_REQUESTS,
    prompt: Prompt = DEFAULT_PROMPT,
    answer: AnswerTokens = DEFAULT_ANSWER,
    concurrency: of_server.Concurrency = of_server.DEFAULT_CONCURRENCY,
    seed: Seed = None,
    precision: Precision = 0.03,
    max_time: MaxTime = DEFAULT_MAX_TIME_S,
    rounds: Rounds = DEFAULT_ROUNDS,
    api: of_server.Api = None,
    timeout: of_server.Timeout = of_server.DEFAULT_TIMEOUT_S,
    key_env: of_server.KeyEnv = None,
    admin: Admin = False,
    allow_remote: of_server.AllowRemote = False,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
) -> int:
    server = Server(url=url, api=api, timeout_s=timeout, key_env=key_env, admin=admin, allow_remote=allow_remote)
    asked = Asked.of(ctx)
    _check(url, versus, load_kind, precision=precision, rounds=rounds)
    model = known_answers(known)
    drawn = draw_seed() if seed is None else seed
    check_sizes(requests=requests, concurrency=concurrency)
    load = ServingLoad(
        kind=load_kind if load_kind and load_kind != RETURNING else SHARED,  # returning needs the servers' pools
        requests=requests,
        concurrency=concurrency,
        prompt=prompt,
        answer=answer,
        seed=drawn,
    )
    servers = _servers(server, [url] if versus is None else [url, versus], model)
    names = secrets.randbelow(1 << 32)
    bench = _bench(load, servers, model, names=names, is_returning=load_kind == RETURNING)
    bench.begin()
    asked.check_places()
    plan = {
        "cases": bench.plan_names,
        "target": url,
        "versus": versus,
        "load": {arm.name: dataclasses.asdict(arm.load) for arm in bench.arms.values()},
        "admin": admin,
        "precision": precision,
        "rounds": rounds,
        "known_answers": str(known),
        "names": names,
        "max_time_s": max_time,
    }
    session = asked.session(drawn=drawn, plan=plan)
    _describe_run(session, bench, servers, model)
    interrupted = _measure(session, bench, precision=precision, rounds=rounds, until=asked.began + max_time)
    return asked.close(session, interrupted=interrupted)


def _check(url: str, versus: str | None, load_kind: str | None, *, precision: float, rounds: int) -> None:
    check_positive("--rounds", rounds)
    if not 0 < precision < math.inf:
        raise UsageError(f"--precision: expected a number above 0, such as 0.03, got {precision}")
    check_address("URL", url)
    if versus is not None:
        check_address("--versus", versus)
    elif load_kind is not None:
        raise UsageError(
            f"--load {load_kind}: it is for two servers; without --versus, {SHARED} and {FRESH} are compared"
        )


def _servers(server: Server, addresses: list[str], known: KnownAnswers) -> list[Described]:
    """Describe the servers. An address named twice is one server."""
    alphabet, found = Alphabet(known.parameters), dict[str, Described]()
    for address in dict.fromkeys(addresses):
        server = dataclasses.replace(server, url=address)
        client = server.client(known)
        served = server.describe(client)
        longest = min(served.longest or known.parameters.length, known.parameters.length)
        side = Side(client, served, alphabet, longest=longest, timeout_s=server.timeout_s, admin=server.admin)
        found[address] = Described(address=address, side=side, served=served)
    return [found[address] for address in addresses]


def _bench(
    load: ServingLoad, servers: list[Described], known: KnownAnswers, *, names: int, is_returning: bool
) -> ServeBench:
    parameters = known.parameters
    if is_returning:
        pools = [each.served.pool for each in servers]
        known_pools = [pool for pool in pools if pool is not None]
        if len(known_pools) < len(pools):
            raise UsageError(f"--load {RETURNING}: a server does not say how many tokens its pool holds")
        load = dataclasses.replace(load, kind=RETURNING, pool=max(known_pools))
    load.check(parameters, min(each.side.longest for each in servers))
    engines = dict.fromkeys(each.served.engine for each in servers)
    shape = f"{parameters.family}-{parameters.layers}x{parameters.kv_heads}x{parameters.head_dim}"
    if len(servers) == 1:
        (server,) = servers
        baseline = LoadedServer(name=FRESH, side=server.side, load=dataclasses.replace(load, kind=FRESH))
        arm = LoadedServer(name=REUSE, side=server.side, load=load)
    else:
        baseline, arm = (
            LoadedServer(name=name, side=each.side, load=load)
            for name, each in zip((TARGET, VERSUS), servers, strict=True)
        )
    return ServeBench(
        baseline=baseline, arm=arm, names=names, shape=shape, device=", ".join(engines), is_reuse=len(servers) == 1
    )


def _describe_run(session: Session, bench: ServeBench, servers: list[Described], known: KnownAnswers) -> None:
    from kvcheck.core.bench.measure import machine, noise

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


def _facts(server: Described, known: KnownAnswers) -> dict[str, object]:
    parameters = known.parameters.to_json()
    return facts_of(server.served, address=server.address, known_answers=known.digest, parameters=parameters)


def _measure(session: Session, bench: ServeBench, *, precision: float, rounds: int, until: float) -> bool:
    from kvcheck.core.bench.measure import noise

    why_few, interrupted = f"more were not asked for; use --rounds {ROUNDS_LEAST}", False
    try:
        why_few = _rounds(session, bench, precision, rounds, until) or why_few
    except KeyboardInterrupt:
        complain("interrupted: the finished rounds are kept")
        bench.interrupted()
        why_few, interrupted = INTERRUPTED, True
    if not interrupted:
        bench.end()
    _keep(session, bench, why_few)
    session.facts["noise_after"] = noise()
    session.warnings += bench.notes
    table = PriceTable(columns())
    for row in session.bench:
        for line in table.lines(row):
            session.say(line)
    for result in session.results:
        for line in cell_lines(result):
            session.detail(line)
    session.untried += bench.notes
    return interrupted


def _rounds(session: Session, bench: ServeBench, precision: float, most: int, until: float) -> str | None:
    head = "warm-up"

    def told(name: str, answered: int) -> None:
        session.progress(f"{head}: {name}, {answered} answers")

    goes_on = bench.warm_up(until=until, told=told)
    while goes_on and len(bench.rounds.times) < most:
        if time.monotonic() >= until:
            return TIME_UP
        head = f"round {len(bench.rounds.times) + 1} of {most} at most"
        goes_on = bench.add_round(until=until, told=told)
        _keep(session, bench, "more were not made yet")
        if len(bench.rounds.times) >= min(ROUNDS_LEAST, most) and bench.rounds.is_precise(precision):
            return None
    if goes_on:
        return None
    return TIME_UP if time.monotonic() >= until else "a round was not answered whole"


def _keep(session: Session, bench: ServeBench, why_few: str) -> None:
    session.bench = bench.rows()
    session.results = bench.results(why_few)
    session.keep(tuple(bench.take_findings()))
    session.save(complete=False)
