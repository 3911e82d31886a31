"""ServeBench: one load on two arms, in turn, until it is precise or time is up; verdicts and prices.

Two servers get the same load. One server gets two loads, with and without reuse: `shared` and `fresh`.

Invariants:
- Passes never overlap, on one server or on two.
- The first pass of each arm is judged and not timed: it pays for a server's one-time work.
- Rounds end for precision, time or a finding, never because of a ratio. An incomplete round is left out.
- A price is a measurement only if every answer of the run was right and complete.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow, Evidence, Finding, ScenarioResult
from kvcheck.core.base.rounds import LEAST_ROUNDS
from kvcheck.core.base.server_facts import SERVE_CASES, THROUGHPUT, TOKEN
from kvcheck.core.live.conclusion import missing
from kvcheck.core.live.prices.load import ServingLoad
from kvcheck.core.live.prices.rounds import CONTROL, Compared, TimedRounds, order_of_passes
from kvcheck.core.live.prices.side import PassResult, Side
from kvcheck.core.run.cell import decided

INTEGRITY = "integrity"
NAMES_APART = 1_000_003
MOST_FRESH = 0.1
"""Largest cached share of the prompts of a load without reuse."""
MOST_BUSY = 0.7
"""Largest share of a core for this process while it waits; above, it may distort the measurement."""
MOST_REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedServer:
    name: str
    side: Side
    load: ServingLoad

    @property
    def cell(self) -> str:
        return f"{INTEGRITY}/{self.name}"


@dataclass(slots=True)
class ArmTally:
    arm: LoadedServer
    evidence: Evidence = field(default_factory=lambda: Evidence(observed={TOKEN: 0}))
    findings: int = 0
    wrong_tokens: int = 0
    duration_s: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def add(self, result: PassResult) -> None:
        self.evidence = self.evidence.plus(result.evidence)
        self.findings += len(result.findings)
        self.wrong_tokens += result.wrong_tokens
        self.duration_s += result.duration_s
        self.reasons += [reason for reason in result.reasons if reason not in self.reasons]

    def result(self) -> ScenarioResult:
        reasons = [] if self.findings else [*self.reasons]
        if not (self.findings or self.evidence.observed[TOKEN]):
            reasons.append("no token was judged")
        reason = "; ".join(reasons[:MOST_REASONS]) or None
        verdict, code = decided(is_failed=self.findings > 0, reason=reason)
        return ScenarioResult(
            id=self.arm.cell,
            shape=self.arm.name,
            verdict=verdict,
            code=code,
            reason=reason,
            schedules=self.evidence.schedules,
            duration_s=round(self.duration_s, 3),
            evidence=self.evidence,
        )


class ServeBench:
    """One comparison. names: selects the tokens of all requests. shape, device: as in Compared.

    is_reuse: both arms are one server; the arm has to hit the cache, and the baseline must not.
    """

    def __init__(
        self, *, baseline: LoadedServer, arm: LoadedServer, names: int, shape: str, device: str, is_reuse: bool
    ) -> None:
        self.arms = {baseline.name: baseline, arm.name: arm}
        self.tallies = {name: ArmTally(each) for name, each in self.arms.items()}
        self.rounds = TimedRounds(
            Compared(arm=arm.name, baseline=baseline.name, size=arm.load.name, shape=shape, device=device)
        )
        self.notes: list[str] = []
        self.findings: list[Finding] = []
        self._kept = 0
        self.is_over = False
        self._is_reuse = is_reuse
        self._names = names
        self._passes = 0
        self._number = 0
        self._busy: list[float] = []
        self._running: str | None = None

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(dict.fromkeys(arm.side for arm in self.arms.values()))

    @property
    def plan_names(self) -> list[str]:
        return [*SERVE_CASES, *(arm.cell for arm in self.arms.values())]

    def begin(self) -> None:
        for side in self.sides:
            self._passes += 1
            try:
                side.begin(names=self._drawn())
            except UsageError as error:
                if len(self.sides) == 1:
                    raise
                name = next(arm.name for arm in self.arms.values() if arm.side is side)
                raise UsageError(f"--{name}: {error}") from error

    def warm_up(self, *, until: float | None, told: Callable[[str, int], None]) -> bool:
        return all(self._pass(name, until, told) is not None for name in self.arms) and not self.is_over

    def add_round(self, *, until: float | None, told: Callable[[str, int], None]) -> bool:
        """Return whether it was complete. After KeyboardInterrupt, `interrupted` judges the current pass."""
        self._number += 1
        passes: dict[str, list[PassResult]] = {name: [] for name in self.rounds.names}
        seed = self.arms[self.rounds.compared.arm].load.seed
        for name in order_of_passes(self.rounds.names, seed=seed, number=self._number):
            result = self._pass(name, until, told)
            if result is None:
                return False
            passes[name].append(result)
        times = {name: [each.times for each in made if each.times is not None] for name, made in passes.items()}
        if self.is_over or not all(len(times[name]) == len(made) for name, made in passes.items()):
            return False
        self._busy += [each.busy for made in passes.values() for each in made]
        self.rounds.add(times)
        return True

    def interrupted(self) -> None:
        if self._running is not None:
            self._keep(self._running, self.arms[self._running].side.taken())

    def end(self) -> None:
        for side in self.sides:
            counts, sources = side.moved()
            users = [tally for tally in self.tallies.values() if tally.arm.side is side]
            for tally in users:
                known = tally.evidence.observed
                new = {kind: count for kind, count in counts.items() if kind not in known}
                if len(users) == 1:
                    tally.evidence = dataclasses.replace(tally.evidence, observed=known | new)
            if len(users) > 1 and (new := {kind: counts[kind] for kind in counts if kind in sources and counts[kind]}):
                both = " and ".join(tally.arm.name for tally in users)
                told = ", ".join(f"{kind} {count:,}" for kind, count in new.items())
                self._note(f"the server's own counters, of {both} together: {told}")
        if self._busy and (busy := statistics.median(self._busy)) > MOST_BUSY:
            self._note(
                f"kvcheck itself took {busy:.0%} of a core while it waited for answers, and may be what was measured: "
                "use a smaller --concurrency, or ask from another machine"
            )

    def why_no_measurement(self) -> str | None:
        wrong = sum(tally.wrong_tokens for tally in self.tallies.values())
        if self.findings:
            codes = ", ".join(dict.fromkeys(finding.code for finding in self.findings))
            return f"not a measurement: {counted(wrong, 'wrong token')}" if wrong else f"not a measurement: {codes}"
        reasons = [f"{name}: {reason}" for name, tally in self.tallies.items() for reason in tally.reasons]
        if reasons:
            return f"not a measurement: {'; '.join(reasons[:MOST_REASONS])}"
        return self._no_reuse() if self._is_reuse and self.rounds.times else None

    def take_findings(self) -> list[Finding]:
        new, self._kept = self.findings[self._kept :], len(self.findings)
        return new

    def rows(self) -> list[BenchRow]:
        return self.rounds.rows(self.why_no_measurement())

    def results(self, why_few: str) -> list[ScenarioResult]:
        why_none = self.why_no_measurement()
        by_case = {row.case: row for row in self.rounds.rows(why_none)}
        ran = len(self.rounds.times)
        made = []
        for case in SERVE_CASES:
            reason = why_none
            if reason is None and ran < LEAST_ROUNDS:
                reason = f"expected {LEAST_ROUNDS} rounds or more, got {ran}: {why_few}"
            elif reason is None and case not in by_case:
                reason = _UNSEEN[case == THROUGHPUT]
            verdict, code = decided(is_failed=False, reason=reason)
            shape = self.rounds.compared.shape
            made.append(ScenarioResult(id=case, shape=shape, verdict=verdict, code=code, reason=reason, schedules=ran))
        return [*made, *(tally.result() for tally in self.tallies.values())]

    def _pass(self, name: str, until: float | None, told: Callable[[str, int], None]) -> PassResult | None:
        """Run one pass of an arm or of the control; None if no pass may follow it."""
        if self.is_over or self.findings:
            return None
        arm = self.arms[self.rounds.compared.baseline if name == CONTROL else name]
        self._passes += 1
        self._running = arm.name
        result = arm.side.send(
            arm.load, self._number, names=self._drawn(), until=until, told=lambda answered: told(name, answered)
        )
        self._running = None
        self._keep(arm.name, result)
        return None if result.findings or result.reasons or result.times is None else result

    def _keep(self, name: str, result: PassResult) -> None:
        self.tallies[name].add(result)
        self.findings += [dataclasses.replace(each, scenario=INTEGRITY, shape=name) for each in result.findings]
        self.is_over = self.is_over or result.is_over
        for note in result.notes:
            self._note(note)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _drawn(self) -> int:
        return self._names * NAMES_APART + self._passes

    def _no_reuse(self) -> str | None:
        arm, baseline = self.rounds.compared.arm, self.rounds.compared.baseline
        tally = self.tallies[arm]
        lack = missing("hit", tally.evidence.observed, least=1, flags=tally.arm.side.client.flags)
        if lack is not None:
            return f"not a measurement of reuse: {lack}"
        share = self.rounds.cached_share(baseline)
        if share is not None and share > MOST_FRESH:
            return f"not a measurement of reuse: {share:.0%} of the prompts that share nothing was cached all the same"
        return None


_UNSEEN: Mapping[bool, str] = {
    True: "the clock of this machine saw no time pass",
    False: "a server sent whole answers in one piece, so its first token is not seen; let it stream each token",
}
