"""A run against a server: its options, its rounds by scenario, and its last lines.

Invariants:
- Each round is saved before the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvcheck.commands.asked import Asked
from kvcheck.commands.options import check_positive
from kvcheck.commands.server import Server
from kvcheck.commands.terminal import cell_lines, columns, complain
from kvcheck.core.base.record import Verdict
from kvcheck.core.base.server_facts import OWN_MODEL
from kvcheck.core.live.clients.client import Client
from kvcheck.core.live.conclusion import RoundCell, RoundPlan, common_place, requirements, unseen
from kvcheck.core.live.exchange import Served
from kvcheck.core.live.runner import RoundResult
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.live.scenarios.scenario import ServerScenario
from kvcheck.core.report.screen import in_fields
from kvcheck.core.run.session import Session

INTERRUPTED = "the run was interrupted before it"

P = TypeVar("P", bound=RoundPlan)
Q = TypeVar("Q", bound=RoundPlan, contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun(Asked):
    """schedules: rounds of each scenario. required: evidence by kind."""

    server: Server
    scenarios: tuple[str, ...]
    schedules: int | None
    requests: int | None
    concurrency: int
    required: Mapping[str, int]

    def __post_init__(self) -> None:
        Asked.__post_init__(self)
        check_positive("--schedules", self.schedules)
        check_positive("--requests", self.requests)
        for name in self.scenarios:
            LIVE_SCENARIOS.require(name)


def plan_scenarios(
    asked: LiveRun, plan_of: Callable[[str], P], client: Client, served: Served, *, rounds: int
) -> tuple[list[RoundCell[P]], list[str]]:
    """Return the scenarios of a run, and a line for each unnamed one that this server cannot exercise."""
    progress, untried = [], []
    for name in asked.scenarios or LIVE_SCENARIOS.names():
        scenario = LIVE_SCENARIOS.load(name)
        why_not = scenario.why_not(served)
        if not asked.scenarios and (why := why_not or scenario.unlikely(served)) is not None:
            untried.append(f"not tried: {name}: {why}; {_advice(client, scenario)}")
            continue
        progress.append(
            RoundCell(
                plan=plan_of(name),
                scenario=scenario,
                flags=client.flags,
                wanted=asked.schedules or rounds,
                why_not=None if why_not is None else f"{why_not}; {_advice(client, scenario)}",
            )
        )
    return progress, untried


def _advice(client: Client, scenario: ServerScenario) -> str:
    kind = next(iter((*scenario.needs, *scenario.any_of)))
    return client.flags.get(kind, "this engine has no way that kvcheck knows")


def begin(
    asked: LiveRun,
    seed: int,
    served: Served,
    progress: Sequence[RoundCell[P]],
    untried: list[str],
    *,
    rounds: int,
    model: str | None = None,
) -> Session:
    """Start the session and print its first line. Raises UsageError."""
    asked.check_places()
    plan = {
        "cells": [each.plan.line() for each in progress],
        "scenarios": [each.plan.cell for each in progress],
        "schedules": asked.schedules or rounds,
        "max_time_s": asked.max_time,
        "require": dict(asked.required),
        "not_tried": untried,
    }
    session = asked.session(drawn=seed, plan=plan)
    place = f"{model} on " if model else ""
    place += f"{served.engine} {served.version or ''}".strip()
    parts = f"kvcheck {session.version}", f"{place} at {asked.server.url}", f"seed {seed}", f"run {session.run_id}"
    for line in in_fields(parts, columns()):
        session.say(line)
    asked.draw(session)
    return session


class RoundSource(Protocol[Q]):
    def run(
        self, plan: Q, *, is_last: bool = True, until: float | None = None, told: Callable[[int], None] = ...
    ) -> RoundResult:
        """Run one round. Raises KeyboardInterrupt."""

    def taken(self, plan: Q) -> RoundResult:
        """Judge a round that was interrupted."""


def run_rounds(session: Session, runner: RoundSource[P], progress: Sequence[RoundCell[P]], until: float | None) -> bool:
    before = [*session.results]
    for each in progress:
        ends = None
        while not each.is_done and ends is None:
            ends = _round(session, runner, each, until)
            session.results = [*before, *(other.result() for other in progress if other.ran or other.is_done)]
            session.save(complete=False)
        _tell(session, each)
        if ends is not None:
            for left in progress[progress.index(each) + 1 :]:
                left.why_not = ends
            return ends == INTERRUPTED
    return False


def _round(session: Session, runner: RoundSource[P], each: RoundCell[P], until: float | None) -> str | None:
    if until is not None and time.monotonic() >= until:
        each.stop("its time was up; use a larger --max-time")
        return None
    plan = each.plan.at(each.ran)
    head = f"{plan.cell} round {each.ran + 1} of {each.wanted}"
    ends = None
    try:
        result = runner.run(
            plan,
            is_last=each.ran + 1 == each.wanted,
            until=until,
            told=lambda answered: session.progress(f"{head}: {answered} answers"),
        )
    except KeyboardInterrupt:
        complain("interrupted: what was judged is kept")
        result, ends = runner.taken(plan), INTERRUPTED
    each.add(result)
    session.keep(result.findings)
    session.warnings += [note for note in dict.fromkeys(result.notes) if note not in session.warnings]
    facts = session.facts["server"]
    assert isinstance(facts, dict)
    facts["evidence"] = {**result.sources, **facts.get("evidence", {})}
    if result.facts:
        facts[OWN_MODEL] = {**facts.get(OWN_MODEL, {}), plan.cell: dict(result.facts)}
    return "the server answers no more" if result.is_over else ends


def _tell(session: Session, each: RoundCell[P]) -> None:
    for line in cell_lines(each.result()):
        session.detail(line)
    place = common_place(each.found)
    if place is not None and place[2] > 1:
        layer, page, requests = place
        wrong = len({finding.request for finding in each.found})
        at = "" if layer is None else f"layer {layer}, "
        told = f"{requests} of {wrong} wrong requests point to {at}page {page} of the request"
        session.say(f" {each.plan.cell}: {told}")


def end_rounds(
    session: Session, progress: Sequence[RoundCell[P]], required: Mapping[str, int], client: Client, untried: list[str]
) -> None:
    total: dict[str, int] = {}
    for each in progress:
        for kind, count in each.observed.items():
            total[kind] = total.get(kind, 0) + count
    refuted = next((each.refuted for each in progress if each.refuted), None)
    flags = progress[0].advice if progress and total.get("hit") == 0 else client.flags
    rows = requirements(required, total, flags, refuted)
    for row in rows:
        for line in cell_lines(row):
            session.detail(line)
    cells = {each.plan.cell for each in progress}
    before = [row for row in session.results if row.id not in cells]
    session.results = [*before, *(each.result() for each in progress), *rows]
    if session.results and all(row.verdict is Verdict.PASS for row in session.results) and (kinds := unseen(total)):
        session.warnings.append(f"not seen in this run, and not tried by it: {', '.join(kinds)}")
    session.warnings += untried
    session.untried = session.warnings
