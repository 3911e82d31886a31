"""Flips: runs two unordered operations in the other order, and looks for wrong bytes.

Invariants:
- The result stands beside the finding that it confirms. It is no finding, no evidence and no verdict.
- A flip without wrong bytes clears nothing: the edge is still missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Finding
from kvcheck.core.run.outcome import Outcome, Runner
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.orders import chooser_of
from kvcheck.core.stress.strategies import EagerStrategy, Pair, parse_pair

MAX_FLIPS = 2
"""Pairs of one schedule that are tried before the missing edge stays unconfirmed."""
WRONG_BYTES = ("content", "output")
"""The oracles of wrong bytes; the first one is the more precise."""


def confirm(runner: Runner, plan: Plan, finding: Finding) -> Outcome | None:
    """Run the plan with the pair of an ordering finding, of an eager run, in the other order. Return the outcome if it
    ran that pair and read wrong bytes."""
    pair = pair_of(finding)
    if pair is None or plan.on_device:
        return None
    outcome = runner.run(_simulated(plan, "flip", pair.text()))
    return outcome if outcome.divergence is None and wrong_bytes(outcome) is not None else None


def pair_of(finding: Finding) -> Pair | None:
    """The two operations of an ordering finding; None for others, and for names too long for a line."""
    if finding.oracle != "ordering" or finding.minimal is None:
        return None
    earlier, later = (finding.minimal.get(which) for which in ("earlier", "later"))
    if not isinstance(earlier, dict) or not isinstance(later, dict):
        return None
    try:
        return parse_pair(f"{earlier['ordinal']}.{earlier['operation']}~{later['ordinal']}.{later['operation']}")
    except UsageError:
        return None


def wrong_bytes(outcome: Outcome, near: Finding | None = None) -> Finding | None:
    found = [each for each in outcome.findings if each.oracle in WRONG_BYTES]
    if near is not None:
        found.sort(key=lambda each: _distance(each, near))
    return min(found, key=lambda each: WRONG_BYTES.index(each.oracle), default=None)


def confirmed(runner: Runner, outcome: Outcome, may_go_on: Callable[[], bool] = lambda: True) -> tuple[Finding, ...]:
    """The findings of an outcome; the first ordering finding that can be confirmed carries its confirmation.

    This takes at most one eager run and MAX_FLIPS flipped ones, and none if wrong bytes were seen already.
    """
    plan, findings = outcome.plan, outcome.findings
    if plan.on_device or wrong_bytes(outcome) is not None or not any(map(pair_of, findings)):
        return findings
    eager = outcome
    if not _is_eager(plan):
        if not may_go_on():
            return findings
        eager = runner.run(_simulated(plan, "eager", None))
    if wrong_bytes(eager) is not None:
        return findings
    for finding in _one_a_pair(eager.findings)[:MAX_FLIPS]:
        at = next((at for at, each in enumerate(findings) if _edge(each) == _edge(finding)), None)
        if at is None or not may_go_on():
            continue
        if (other := confirm(runner, plan, finding)) is not None:
            return (*findings[:at], _told(findings[at], finding, other), *findings[at + 1 :])
    return findings


def _simulated(plan: Plan, strategy: str, choices: str | None) -> Plan:
    return dataclasses.replace(plan, backend="simulated", strategy=strategy, choices=choices, expect=None)


def _is_eager(plan: Plan) -> bool:
    if plan.backend == "eager":
        return True
    return isinstance(chooser_of(plan), EagerStrategy)


def _one_a_pair(findings: tuple[Finding, ...]) -> list[Finding]:
    pairs: dict[Pair, Finding] = {}
    for finding in findings:
        if (pair := pair_of(finding)) is not None:
            pairs.setdefault(pair, finding)
    return list(pairs.values())


def _edge(finding: Finding) -> tuple[object, ...]:
    pair = pair_of(finding)
    names = None if pair is None else (pair.held_name, pair.until_name)
    return finding.oracle, finding.code, finding.lane, finding.buffer, names


def _distance(finding: Finding, near: Finding) -> int:
    names = ("tier", "buffer", "layer", "page", "request")
    return sum(getattr(finding, name) != getattr(near, name) for name in names)


def _told(finding: Finding, turned: Finding, other: Outcome) -> Finding:
    wrong = wrong_bytes(other, near=turned)
    assert wrong is not None and finding.minimal is not None
    more = {"confirmed": f"in the other order {wrong.message}", "replay": wrong.replay}
    return dataclasses.replace(finding, minimal={**finding.minimal, **more})
