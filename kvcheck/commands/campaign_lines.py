"""Lines that failed: a folder of small files, of which a campaign runs all first and adds those of new findings.

    OUT/lines/hicache.llama-3-micro-KV202-0f3a91c2b7d4.txt     one line, as kvcheck replay takes it

Invariants:
- A file is written whole, as soon as its finding is known, and never changed. Each finding of a cell has one.
- A bad file is a warning of one line. It stops nothing.
- Lines of another mutant or of cells that the campaign does not have are left out, and counted.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from kvcheck.commands.options import check_plan
from kvcheck.commands.terminal import warn
from kvcheck.core.base.errors import KvcheckError, UsageError, why_unread
from kvcheck.core.base.nouns import counted, plural
from kvcheck.core.base.record import Finding
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import write_text

if TYPE_CHECKING:
    from kvcheck.core.run.plan import Plan
    from kvcheck.core.stress.campaign.batches import Batch, BatchResult, CampaignPlan

LINES = "lines"
MOST_BYTES = 1 << 16
DIGITS = 12


class FailingLines:
    """The lines of a folder that a campaign runs again, and those that it adds. The folder is made when needed."""

    def __init__(self, folder: Path, plan: CampaignPlan) -> None:
        self._folder = folder
        self._mutant = plan.cells[0].mutant
        self._cells = {cell.cell for cell in plan.cells}
        self._found: dict[str, BatchResult] = {}
        self._others = 0
        self._written = 0
        self._told: set[tuple[object, ...]] = set()
        self._plans = self._read()

    def batches(self) -> list[Batch]:
        """A batch for each line."""
        from kvcheck.core.stress.campaign.batches import lines_again

        return lines_again(self._plans)

    def take(self, result: BatchResult) -> None:
        """Note what a line gave, or keep the lines of what a workload failed with."""
        from kvcheck.core.run.turns import reported_once

        if result.within is None:
            self._found[result.line] = result
        for finding in result.findings:
            key = finding.cell, *reported_once(finding)
            is_new = key not in self._told
            self._told.add(key)
            if is_new and result.within is not None and finding.cause is None and finding.condition is None:
                self._keep(finding)

    def tell(self, session: Session) -> None:
        """What became of the lines."""
        from kvcheck.commands.replay import judge
        from kvcheck.core.run.cell_task import Report

        for plan in self._plans:
            result = self._found.get(plan.line())
            if result is None:
                continue
            report = Report(findings=result.findings, reason=result.reason, divergence=result.divergence)
            _, told = judge(plan, [[report]], [result.findings])
            session.say(told[0])
            session.say(f"         {plan.line()}")
        if self._others:
            session.say(
                f"       not run: {counted(self._others, 'line')} in {self._folder} of other cells or another mutant"
            )
        if self._written:
            kept = plural(self._written, "line")
            session.say(f"       {self._written:,} new {kept} of findings in {self._folder}: they run first next time")

    def _keep(self, finding: Finding) -> None:
        digest = hashlib.sha256(finding.schedule.encode("utf-8", "surrogateescape")).hexdigest()[:DIGITS]
        path = self._folder / f"{finding.cell.replace('/', '.')}-{finding.code}-{digest}.txt"
        if not finding.schedule or path.exists():
            return
        try:
            write_text(path, f"{finding.schedule}\n")
        except UsageError as error:
            warn(f"a line that failed is not kept: {error}")
        else:
            self._written += 1

    def _read(self) -> list[Plan]:
        if not self._folder.is_dir():
            return []
        plans: dict[str, Plan] = {}
        for path in sorted(self._folder.glob("*.txt")):
            try:
                plan = _plan_in(path)
            except KvcheckError as error:
                warn(f"{path} is left out: {error}")
                continue
            if plan.mutant == self._mutant and plan.cell in self._cells:
                plans[plan.line()] = plan
            else:
                self._others += 1
        return [*plans.values()]


def _plan_in(path: Path) -> Plan:
    """The plan of the line in a file. Raises UsageError, or UnknownVerdict."""
    from kvcheck.core.run.plan import parse_line
    from kvcheck.core.run.runners import row_of
    from kvcheck.core.stress.campaign.batches import is_campaign_line

    try:
        with path.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        text = content.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"it cannot be read: {why_unread(error)}") from error
    if len(content) > MOST_BYTES or not text or len(text.splitlines()) != 1:
        raise UsageError(f"expected one line of at most {MOST_BYTES:,} bytes, as kvcheck replay takes it")
    plan = parse_line(text)
    if not is_campaign_line(plan):
        raise UsageError("expected a line of one process over a simulated machine; use kvcheck replay")
    row_of(plan).check_names(plan)
    check_plan(plan)
    return plan
