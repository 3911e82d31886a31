"""`kvcheck model reference URL DIR`: keep a server's cold answers, and compare another build with them.

Invariants:
- One missing answer and nothing is kept: holes would pass unseen.
- An existing reference is not replaced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands import server as of_server
from kvcheck.commands.options import Format, check_positive
from kvcheck.commands.server import DEFAULT_OWN_REQUESTS, Server
from kvcheck.commands.terminal import cell_lines, complain, print_json, say
from kvcheck.core.base.cells import OWN_MODEL
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, ScenarioResult, Verdict
from kvcheck.core.live.clients.client import Client
from kvcheck.core.live.clients.connection import check_address
from kvcheck.core.live.exchange import Answer, End, Question
from kvcheck.core.live.line import OwnPlan
from kvcheck.core.live.own.arms import ArmResult, Cold, alone, together
from kvcheck.core.live.own.reference import FILE, Kept, Reference, draw_questions
from kvcheck.core.live.own.runner import OwnRunner
from kvcheck.core.live.own.verdict import ORACLE, BuildComparison, compare_builds
from kvcheck.core.live.scenarios.scenario import Round
from kvcheck.core.live.sending import Delivery, RequestSender
from kvcheck.core.run.cell import decided
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import make_folder, write_text


def reference(
    url: of_server.Url,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the reference.")],
    requests: Annotated[int, of_server.sent(help="Requests to keep.")] = DEFAULT_OWN_REQUESTS,
    concurrency: of_server.Concurrency = of_server.DEFAULT_CONCURRENCY,
    vocabulary: of_server.Vocabulary = None,
    seed: Annotated[int | None, of_server.sent(help="Integer seed. Default: one is drawn.")] = None,
    decode: of_server.Decode = None,
    api: of_server.Api = None,
    timeout: of_server.Timeout = of_server.DEFAULT_TIMEOUT_S,
    key_env: of_server.KeyEnv = None,
    allow_remote: of_server.AllowRemote = False,
    format_name: Format = "text",
) -> None:
    """Keep what a server answers without reuse, with its noise, to compare other builds with."""
    check_address("URL", url)
    check_positive("--requests", requests)
    server = Server(url=url, decode=decode, api=api, timeout_s=timeout, key_env=key_env, allow_remote=allow_remote)
    _refuse_kept(folder)
    client, served, plan = server.connected(
        requests=requests, concurrency=concurrency, vocabulary=vocabulary, seed=seed
    )
    runner = OwnRunner(client, vocabulary=plan.vocabulary, rounds=1, requests=plan.requests, timeout_s=timeout)
    runner.begin(served, names=plan.names)
    with _writable(folder):
        kept, again, control = _record(client, plan)
        made = Reference(
            engine=served.engine,
            version=served.version,
            model=served.model,
            facts=served.facts,
            kept=kept,
            again=tuple(again.largest),
            control=tuple(control.largest),
        )
        _refuse_kept(folder)  # another run may have written one meanwhile
        write_text(folder / FILE, made.to_json())
    tokens = sum(len(each.answer.tokens) for each in kept)
    noise = max([*again.largest, *control.largest], default=0.0)
    if format_name == "json":
        of = {"engine": served.engine, "version": served.version, "requests": len(kept), "tokens": tokens}
        print_json({"folder": str(folder), "digest": made.digest, **of, "noise": noise})
        return
    say(f"kept {counted(len(kept), 'request')}, {counted(tokens, 'token')}, of {served.engine} {served.version or ''}")
    say(f"noise  {'none: equal bit for bit' if noise == 0.0 else f'at most {noise:.3g} nats'}")
    say(f"folder {folder}  digest {made.digest}")


def _refuse_kept(folder: Path) -> None:
    if (folder / FILE).exists():
        raise UsageError(f"{folder / FILE} exists; expected a folder without a reference. Name another, or remove it")


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Make the folder before any request, and remove a new one if nothing is kept. Raises UsageError."""
    is_new = not folder.exists()
    make_folder(folder, elsewhere="name another DIR")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {folder}: it is read-only; name another DIR")
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty where the reference, or somebody else's file, is in it
                folder.rmdir()


def _record(client: Client, plan: OwnPlan) -> tuple[tuple[Kept, ...], ArmResult, ArmResult]:
    questions = draw_questions(plan)
    answers = _answers(_send(client, alone(questions), None), questions)
    again, control = ArmResult(name="again"), ArmResult(name="control")
    for arm, round_ in ((again, alone(questions)), (control, together(questions, concurrency=plan.concurrency))):
        arm.add(_send(client, round_, None).exchanges, answers)
        if len(arm.values) < len(questions):
            raise UnknownVerdict(f"{len(questions) - len(arm.values)} of {len(questions)} controls were not answered")
    return tuple(Kept(question, answers[question.number]) for question in questions), again, control


def _send(client: Client, round_: Round, until: float | None, told: Callable[[int], None] | None = None) -> Delivery:
    sender = RequestSender(Cold(client), gap_s=0.0, may_force=False, until=until)
    return sender.send(round_) if told is None else sender.send(round_, told)


def _answers(sent: Delivery, questions: Sequence[Question]) -> dict[int, Answer]:
    """Return cold answers by request. Raise UnknownVerdict for one without log-probabilities, or not cold."""
    found = {}
    for each in sent.exchanges:
        answer, number = each.answer, each.sending.question.number
        if answer.end is not End.DONE or answer.logprobs is None:
            raise UnknownVerdict(
                f"request {number} was not answered with log-probabilities ({answer.end.value}): {answer.reason}"
            )
        if answer.cached:
            raise UnknownVerdict(f"request {number} was not cold: {answer.cached} of its tokens were cached")
        found[number] = answer
    if len(found) < len(questions):
        raise UnknownVerdict(f"{len(questions) - len(found)} of {len(questions)} requests were not answered")
    return found


def compare_with(
    session: Session, kept: Reference, client: Client, plan: OwnPlan, *, rounds: int, until: float | None
) -> bool:
    """Send the reference's requests to this build and add a row; True when interrupted. rounds: as in
    compare_builds."""
    began = time.monotonic()
    cell = f"{OWN_MODEL}/reference/{plan.engine}"
    questions = [each.question for each in kept.kept]
    cold, again = ArmResult(name="cold"), ArmResult(name="again")
    answers = {each.question.number: each.answer for each in kept.kept}
    interrupted, is_whole = False, True
    try:
        for arm in (cold, again):
            told = partial(_progress, session, f"{cell} {arm.name}")
            sent = _send(client, alone(questions), until, told)
            arm.add(sent.exchanges, answers)
            is_whole = is_whole and sent.is_whole
    except KeyboardInterrupt:
        complain("interrupted: what was judged is kept")
        interrupted, is_whole = True, False
    compared = compare_builds(kept, cold, again, is_whole=is_whole, rounds=rounds)
    _add(session, cell, compared, cold, duration_s=time.monotonic() - began)
    return interrupted


def _progress(session: Session, head: str, answered: int) -> None:
    session.progress(f"{head}: {answered} answers")


def _add(session: Session, cell: str, compared: BuildComparison, cold: ArmResult, *, duration_s: float) -> None:
    scenario, _, shape = cell.rpartition("/")
    verdict, code = decided(is_failed=bool(compared.message), reason=compared.reason)
    tokens = sum(value.tokens for value in cold.values.values())
    row = ScenarioResult(
        id=cell,
        shape=shape,
        verdict=verdict,
        code=compared.code if verdict is Verdict.FAIL else code,
        reason=compared.reason if verdict is Verdict.UNKNOWN else None,
        schedules=1,
        duration_s=round(duration_s, 3),
        evidence=Evidence(
            schedules=1, events=len(cold.exchanges), requests=len(cold.values), observed={"token": tokens}
        ),
    )
    if compared.message is not None:
        session.keep((compared.finding(oracle=ORACLE, scenario=scenario, shape=shape),))
    session.results.append(row)
    session.warnings += [f"{cell}: {note}" for note in compared.notes]
    session.save(complete=False)
    for line in cell_lines(row):
        session.say(line)
