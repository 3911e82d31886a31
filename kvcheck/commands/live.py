"""`kvcheck live URL`: a running server, judged by known answers or by its own.

Invariants:
- Options that the server cannot meet are one line and exit 2, before the folder of the run exists.
- With --reference the server is compared with the folder's answers before its own scenarios run.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands import server as of_server
from kvcheck.commands.elsewhere import check_subject
from kvcheck.commands.live_rounds import LiveRun, begin, end_rounds, plan_scenarios, run_rounds
from kvcheck.commands.options import (
    DEFAULT_OUT,
    Format,
    Out,
    Outputs,
    Reports,
    Seed,
    Verbose,
    draw_seed,
    identity,
    search,
)
from kvcheck.commands.reference import compare_with
from kvcheck.commands.server import DEFAULT_OWN_REQUESTS, DEFAULT_REQUESTS, Server, facts_of, known_answers
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.clients.connection import check_address
from kvcheck.core.live.counting import parse_requirements
from kvcheck.core.live.line import LivePlan, check_sizes
from kvcheck.core.live.own.reference import check_alike, read_reference
from kvcheck.core.live.own.runner import OwnRunner
from kvcheck.core.live.runner import LiveRunner
from kvcheck.core.model.alphabet import Alphabet

DEFAULT_ROUNDS = 4
DEFAULT_OWN_ROUNDS = 1


Scenarios = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCENARIO", help="See kvcheck list server-scenarios. Default: those it can do."),
]
Known = Annotated[Path | None, of_server.KNOWN_ANSWERS]
OwnModel = Annotated[
    bool,
    of_server.answers("--own-model", help="Judge the model that it serves, whatever it is, by its own cold answers."),
]
Reference = Annotated[
    Path | None,
    of_server.answers(
        metavar="DIR", help="With --own-model: compare with answers that kvcheck model reference has kept."
    ),
]
Rounds = Annotated[
    int | None,
    search(help=f"Rounds of each scenario. Default: {DEFAULT_ROUNDS}; {DEFAULT_OWN_ROUNDS} with --own-model."),
]
Requests = Annotated[
    int | None,
    of_server.sent(help=f"Requests of a round. Default: {DEFAULT_REQUESTS}; {DEFAULT_OWN_REQUESTS} with --own-model."),
]
MaxTime = Annotated[float | None, search(help="Seconds after which the run stops.")]
Require = Annotated[
    list[str] | None,
    of_server.sent(
        metavar="KIND=N", help="Evidence that the run needs, such as retract=10,hit=100; kvcheck list evidence."
    ),
]


def live(
    ctx: typer.Context,
    url: of_server.Url,
    scenarios: Scenarios = None,
    known: Known = None,
    own_model: OwnModel = False,
    reference: Reference = None,
    schedules: Rounds = None,
    requests: Requests = None,
    concurrency: of_server.Concurrency = of_server.DEFAULT_CONCURRENCY,
    vocabulary: of_server.Vocabulary = None,
    seed: Seed = None,
    max_time: MaxTime = None,
    require: Require = None,
    decode: of_server.Decode = None,
    api: of_server.Api = None,
    metrics: of_server.Metrics = None,
    timeout: of_server.Timeout = of_server.DEFAULT_TIMEOUT_S,
    key_env: of_server.KeyEnv = None,
    admin: of_server.Admin = False,
    allow_remote: of_server.AllowRemote = False,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
    verbose: Verbose = False,
) -> int:
    check_subject("live", (url, *(scenarios or ())))
    check_address("URL", url)
    server = Server(
        url=url,
        decode=decode,
        api=api,
        metrics=tuple(metrics or ()),
        timeout_s=timeout,
        key_env=key_env,
        admin=admin,
        allow_remote=allow_remote,
    )
    required = parse_requirements(require or [])
    asked = LiveRun.of(ctx, server=server, scenarios=tuple(scenarios or ()), required=required)
    if own_model and known is not None:
        raise UsageError(
            "--own-model and --known-answers: expected one of both; a known-answer model needs no comparison with noise"
        )
    for name, value in (("--vocabulary", vocabulary), ("--reference", reference)):
        if value is not None and not own_model:
            raise UsageError(f"{name} is for a model whose answers are not known: expected --own-model beside it")
    return _judge_own_model(asked, vocabulary, reference) if own_model else _judge_known_answers(asked, known)


def _judge_known_answers(asked: LiveRun, folder: Path | None) -> int:
    if folder is None:
        raise UsageError(
            "expected --known-answers DIR, the folder that the server serves; make one with kvcheck model make DIR "
            "and start the server with it. Or judge the model that it serves now, with --own-model"
        )
    known, server = known_answers(folder), asked.server
    sizes = {"requests": asked.requests or DEFAULT_REQUESTS, "concurrency": asked.concurrency}
    check_sizes(**sizes)
    client = server.client(known)
    served = server.describe(client)
    base = LivePlan(
        scenario="",
        target=server.url,
        known_answers=str(folder),
        decode=server.decode,
        engine=served.engine,
        seed=draw_seed() if asked.seed is None else asked.seed,
        names=secrets.randbelow(1 << 32),
        **sizes,
        longest=min(served.longest or known.parameters.length, known.parameters.length),
        pool=served.pool,
        admin=int(server.admin),
    )
    progress, untried = plan_scenarios(
        asked, lambda name: replace(base, scenario=name), client, served, rounds=DEFAULT_ROUNDS
    )
    alphabet = Alphabet(known.parameters)
    runner = LiveRunner(client, alphabet, timeout_s=server.timeout_s, is_balanced=bool(server.metrics))
    runner.begin(served, names=base.names)
    runner.check_positions()
    session = begin(asked, base.seed, served, progress, untried, rounds=DEFAULT_ROUNDS)
    facts = facts_of(
        served,
        address=server.url,
        decode=server.decode,
        known_answers=known.digest,
        parameters=known.parameters.to_json(),
    )
    session.facts, session.identity = {"server": facts}, replace(identity(), target=known.digest)
    interrupted = run_rounds(session, runner, progress, asked.until)
    end_rounds(session, progress, asked.required, client, untried)
    return asked.close(session, interrupted=interrupted)


def _judge_own_model(asked: LiveRun, vocabulary: int | None, reference: Path | None) -> int:
    kept, server = None if reference is None else read_reference(reference), asked.server
    client, served, base = server.connected(
        requests=asked.requests, concurrency=asked.concurrency, vocabulary=vocabulary, seed=asked.seed
    )
    untold = [] if kept is None else check_alike(kept, served)
    progress, untried = plan_scenarios(
        asked, lambda name: replace(base, situation=name), client, served, rounds=DEFAULT_OWN_ROUNDS
    )
    rounds = sum(each.wanted for each in progress) + (kept is not None)
    runner = OwnRunner(
        client, vocabulary=base.vocabulary, rounds=rounds, requests=base.requests, timeout_s=server.timeout_s
    )
    runner.begin(served, names=base.names)
    session = begin(asked, base.seed, served, progress, untried, rounds=DEFAULT_OWN_ROUNDS, model=served.model)
    facts = facts_of(served, address=server.url, decode=server.decode, vocabulary=base.vocabulary)
    session.facts = {"server": facts}
    if untold:
        session.warnings.append(f"neither the reference nor this server says: {', '.join(untold)}")
    interrupted = kept is not None and compare_with(session, kept, client, base, rounds=rounds, until=asked.until)
    if not interrupted:
        interrupted = run_rounds(session, runner, progress, asked.until)
    for each in progress:
        session.warnings += runner.notes(each.plan)
    end_rounds(session, progress, asked.required, client, untried)
    return asked.close(session, interrupted=interrupted)
