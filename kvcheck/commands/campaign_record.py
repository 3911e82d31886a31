"""The record of a campaign: made from its results, and taken up again from those that an earlier one has kept.

Invariants:
- The rows, findings and verdict follow from the results alone: a campaign in shards, or in several goes, has the same.
- An earlier campaign is gone on with if it is of the same plan and the same code. Limits of time and number are no part
  of the plan.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcheck.commands.options import identity
from kvcheck.commands.probes import plan_facts
from kvcheck.commands.terminal import Terminal, cell_lines, warn
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import RunRecord, read_record
from kvcheck.core.report.gate.builds import changes
from kvcheck.core.report.gate.contradictions import contradictions
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import RUN_FILE, RunStore

if TYPE_CHECKING:
    from kvcheck.core.stress.campaign.batches import BatchResult, CampaignPlan
    from kvcheck.core.stress.campaign.tally import Tally

LIMITS = ("traces", "max_time_s")
FACTS = "campaign"
"""Where the record's environment says what a campaign has cost."""


def session_of(ctx: typer.Context, plan: CampaignPlan, limits: Mapping[str, object]) -> Session:
    """The session of a campaign."""
    given = ctx.params
    words = [word for word in ctx.obj if word != "--resume"]
    session = Session(
        argv=[*ctx.obj],
        repro=shlex.join(["kvcheck", *words]),
        seed=plan.seeds.first,
        plan={**limits, **plan.facts(), **plan_facts([*plan.cells])},
        out=given["out"],
        teller=Terminal(is_quiet=given["format_name"] == "json"),
        resumes=True,
    )
    session.identity = identity()
    return session


def update(session: Session, tally: Tally, *, complete: bool, missing: str | None = None) -> RunRecord:
    """Save the record of what has been counted; the record."""
    session.findings, session.left_out = [], 0
    found = tally.findings()
    for of_batch in found:
        session.keep(of_batch)
    session.results = [*tally.rows(itertools.chain.from_iterable(found), missing=missing)]
    session.facts[FACTS] = {"batches": tally.batches, "cpu_s": round(tally.cpu_s, 1)}
    return session.save(complete=complete)


def tell_rows(session: Session, record: RunRecord) -> None:
    """The lines of all cells."""
    for row in record.scenarios:
        for line in cell_lines(row, record.findings):
            session.say(line)


def goes_on_from(session: Session, plan: CampaignPlan, out: Path) -> list[BatchResult]:
    """The results of the newest campaign of the plan, which are written to the new one's ledger too. Those that could
    not be judged run again. Raises UsageError where there is none to go on with."""
    from kvcheck.core.stress.campaign.ledger import LEDGER, Ledger, read_ledger

    for run_id in reversed(RunStore(out).run_ids()):
        if run_id == session.run_id:
            continue
        try:
            record = read_record(out / run_id / RUN_FILE)
            if not is_of_plan(record, session.plan):
                continue
            if other := _other(record, session):
                raise UsageError(f"run {run_id}, which {other}")
            found, is_torn = read_ledger(out / run_id / LEDGER)
            check_results(found, plan, run_id)
        except UsageError as error:
            _note(session, f"--resume skips a run: {error}")
            continue
        if is_torn:
            _note(session, f"run {run_id}: the last line of its batches was cut off; that batch runs again")
        kept = [each for each in found if each.reason is None]
        Ledger(session.folder / LEDGER).add(kept)
        session.say(f"resuming {run_id}: {counted(len(kept), 'batch')} done")
        return kept
    session.withdraw()
    raise UsageError(f"--resume: no campaign with this plan under {out}; leave --resume out to begin one")


def is_of_plan(record: RunRecord, plan: Mapping[str, object], but: Sequence[str] = LIMITS) -> bool:
    """Whether a record is of a plan, but for some of its keys."""
    return _without(record.plan, but) == _without(plan, but)


def check_results(found: Sequence[BatchResult], plan: CampaignPlan, run_id: str) -> None:
    """Raise UsageError for a result that is none of the plan's."""
    for each in found:
        if not plan.has(each):
            raise UsageError(f"run {run_id} has a batch that is not of its plan: {each.line}")


def _without(plan: Mapping[str, object], but: Sequence[str]) -> dict[str, object]:
    return {key: value for key, value in plan.items() if key not in but}


def _other(record: RunRecord, session: Session) -> str | None:
    """Why the session cannot go on with an earlier campaign, or None."""
    if wrong := contradictions(record):
        return f"contradicts itself: {'; '.join(wrong)}"
    changed = changes(record.identity, session.identity)
    return f"is about something else: {'; '.join(changed)}" if changed else None


def _note(session: Session, text: str) -> None:
    session.warnings.append(text)
    warn(text)
