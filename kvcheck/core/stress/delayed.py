"""Delayed runs: delays found on a CPU are imposed on a device, and runs with wrong bytes are counted.

Invariants:
- Every run with delays is paired with one without. Both find a missing wait, so only wrong bytes show a bug on the
  device.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.cache.backend.backend import Submitted
from kvcheck.core.cache.backend.delays import Delay, DelayReport, DelaySite
from kvcheck.core.run.outcome import Outcome, Runner
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.delay_lines import delays_of, delays_text
from kvcheck.core.stress.flip import pair_of, wrong_bytes
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.strategies import LANE_GROUPS, Pair

TRIES_MOST = 5
"""Plans of delays that are tried before a finding counts as not reproduced on a device."""
UNREAD = ("receive.mark", "seal.clear")
"""Operations whose writes are not read as content. A delay until one of them is tried last."""


def check_operations(runner: ScheduleRunner, plan: Plan) -> None:
    """Raise UsageError if a plan names operations that its schedule, run on a CPU, does not submit."""
    if plan.choices is None or not delays_of(plan):
        return
    _, submitted = _on_cpu(runner, plan)
    has = Counter(each.name for each in submitted)
    for delay in delays_of(plan):
        for site in (delay.held, delay.until):
            if site is not None and site.operation is not None and has[site.operation] < (site.nth or 1):
                raise UsageError(
                    f"strategy=delay: this schedule has no operation {site}; on a CPU it submits "
                    + ", ".join(f"{name} ({count})" for name, count in sorted(has.items()))
                )


def device_plans(runner: ScheduleRunner, plan: Plan, device: str) -> tuple[Plan, ...]:
    """Device plans for a schedule that fails on a CPU, the narrowest delay first; none if no pair is known.

    First come the two unordered operations; then all operations of the earlier one's name, since a device may number
    them differently; then its group of lanes; then the next pairs. If the eager run finds no pair that may show, the
    plan's own order is run too: some waits are missing only if the process saw something late.
    """
    outcome, submitted = _on_cpu(runner, plan)
    found = _candidates(outcome.findings, submitted)
    if plan.backend == "simulated" and not any(map(_may_show, found)):
        submitted = []
        outcome = runner.run(plan, handlers=((Submitted, submitted.append),))
        late = _candidates(outcome.findings, submitted)
        found = [*late, *found] if any(map(_may_show, late)) else [*found, *late]
    return tuple(
        dataclasses.replace(
            plan, backend=kind_of(device), device=device, strategy="delay", choices=delays_text((delay,)), expect=None
        )
        for delay in found[:TRIES_MOST]
    )


def may_show(plan: Plan) -> bool:
    return any(map(_may_show, delays_of(plan)))


def whole_names(plans: Iterable[Plan]) -> list[Plan]:
    """Of these device plans, the first that delays all operations of each name."""
    found: dict[str | None, Plan] = {}
    for each in plans:
        delays = delays_of(each)
        if all(one.until is None and one.held.operation and one.held.nth is None for one in delays):
            found.setdefault(each.choices, each)
    return [*found.values()]


def _may_show(delay: Delay) -> bool:
    return delay.until is not None and delay.until.operation not in (None, *UNREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    free_runs: int = 0
    free_wrong: int = 0
    held_runs: int = 0
    held_wrong: int = 0
    report: DelayReport | None = None

    def plus(self, free: Outcome, held: Outcome | None) -> Rates:
        """held: None if the first run has lost the device."""
        report = None if held is None else report_of(held)
        if self.report is not None and report is not None:
            report = self.report.plus(report)
        return Rates(
            free_runs=self.free_runs + 1,
            free_wrong=self.free_wrong + (wrong_bytes(free) is not None),
            held_runs=self.held_runs + (held is not None),
            held_wrong=self.held_wrong + (held is not None and wrong_bytes(held) is not None),
            report=report or self.report,
        )

    @property
    def gap(self) -> str | None:
        return "not exercised: nothing was delayed" if self.report is None else self.report.gap

    def text(self) -> str:
        parts = [
            f"wrong bytes in {self.free_wrong} of {counted(self.free_runs, 'run')} without delays, "
            f"{self.held_wrong} of {self.held_runs} with"
        ]
        if self.report is not None and self.report.warning is not None:
            parts.append(self.report.warning)
        return "; ".join(parts)


def report_of(outcome: Outcome) -> DelayReport | None:
    assert outcome.delays is None or isinstance(outcome.delays, DelayReport), "a backend counts delays"
    return outcome.delays


def run_both(runner: Runner, plan: Plan) -> tuple[Outcome, Outcome | None]:
    """Run a plan without its delays, then with them. The first run also loads kernels, which cannot be loaded during a
    hold. After a hold ended by a watchdog, the second is repeated. It is skipped if the first has lost the device."""
    free = runner.run(dataclasses.replace(plan, strategy="eager", choices=None, expect=None))
    if free.is_device_lost:
        return free, None
    held = runner.run(plan)
    report = report_of(held)
    if report is not None and report.fired and not held.findings:
        held = runner.run(plan)
    return free, held


class DelayRunner:
    """Raises UsageError if the plan names operations that its schedule does not submit."""

    cpu_s = 0.0

    def __init__(self, runner: ScheduleRunner, plan: Plan) -> None:
        self._runner, self._cell, self._rates = runner, plan.cell, Rates()
        check_operations(runner, plan)

    def run(self, plan: Plan) -> Outcome:
        free, held = run_both(self._runner, plan)
        self._rates = self._rates.plus(free, held)
        if held is None:
            return free
        return dataclasses.replace(
            held, findings=held.findings or free.findings, broken_oracles=(*free.broken_oracles, *held.broken_oracles)
        )

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return (self._rates.gap or self._runner.gap(plan, total)) if total.schedules else None

    def closing(self) -> str | None:
        return f"{self._cell}: {self._rates.text()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    plan: Plan
    rates: Rates
    wrong: Outcome | None
    lost: Outcome | None = None

    @property
    def shown(self) -> bool:
        return self.wrong is not None

    @property
    def message(self) -> str:
        found = None if self.wrong is None else wrong_bytes(self.wrong)
        if found is None and self.lost is not None:
            return next(each.message for each in self.lost.findings)
        return self.rates.gap or "what was read was right" if found is None else f"{found.code} {found.message}"


def tries(runner: Runner, plans: Sequence[Plan], times: int = 1) -> Iterator[Try]:
    """Run each plan so many times, until one has served wrong bytes or lost the device."""
    for plan in plans:
        rates, wrong, lost = Rates(), None, None
        for _ in range(times):
            free, held = run_both(runner, plan)
            rates = rates.plus(free, held)
            last = held or free
            wrong = wrong or (held if held is not None and wrong_bytes(held) is not None else None)
            if last.is_device_lost:
                lost = last
                break
        made = Try(plan=plan, rates=rates, wrong=wrong, lost=lost)
        yield made
        if made.shown or lost is not None:
            return


def rates_of(made: Sequence[Try]) -> Rates:
    reports = [each.rates.report for each in made if each.rates.report is not None]
    return Rates(
        free_runs=sum(each.rates.free_runs for each in made),
        free_wrong=sum(each.rates.free_wrong for each in made),
        held_runs=sum(each.rates.held_runs for each in made),
        held_wrong=sum(each.rates.held_wrong for each in made),
        report=reduce(DelayReport.plus, reports) if reports else None,
    )


def why_not(made: Sequence[Try]) -> str:
    if not made:
        return "no operation is known that could be delayed: on a CPU no two of this schedule are unordered"
    if made[-1].lost is not None:
        return made[-1].message
    gaps = [each.rates.gap for each in made]
    if all(gaps):
        return str(gaps[-1])
    return "lanes were held, and what was read was right all the same"


def _on_cpu(runner: ScheduleRunner, plan: Plan) -> tuple[Outcome, list[Submitted]]:
    submitted: list[Submitted] = []
    on_cpu = dataclasses.replace(plan, backend="eager", device="cpu", strategy="eager", choices=None, expect=None)
    return runner.run(on_cpu, handlers=((Submitted, submitted.append),)), submitted


def _candidates(findings: Sequence[Finding], submitted: Sequence[Submitted]) -> list[Delay]:
    pairs = list(dict.fromkeys(pair for finding in findings if (pair := pair_of(finding)) is not None))
    pairs.sort(key=lambda pair: pair.until_name in UNREAD)
    exact = [_exact(pair, submitted) for pair in pairs]
    if not exact:
        return []
    first = submitted[pairs[0].held - 1]
    wider = [Delay(held=DelaySite(operation=pairs[0].held_name))]
    lane = first.lane.rpartition(":")[2]
    groups = [starts for starts in LANE_GROUPS.values() if lane.startswith(starts)]
    wider += [Delay(held=DelaySite(lanes=starts)) for starts in groups[:1]]
    return [exact[0], *wider, *exact[1:]]


def _exact(pair: Pair, submitted: Sequence[Submitted]) -> Delay:
    """Numbered among operations of the same name: total numbers differ on a device."""
    held, until = (
        DelaySite(operation=name, nth=sum(each.name == name for each in submitted[:ordinal]))
        for ordinal, name in ((pair.held, pair.held_name), (pair.until, pair.until_name))
    )
    return Delay(held=held, until=until)
