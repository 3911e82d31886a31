"""Engines under stress: plans of probes on installed engines, run in their children, answers made into outcomes.

A plan's shape is "PROBE.SUBJECT", such as retract.nsa: what is tried, and on what.

Invariants:
- A child that was lost makes the schedule UNKNOWN, and the next one gets a new child.
- The same plan gives the same findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.record import Evidence
from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.frame.probe import ProbeRow
from kvcheck.core.probes.frame.wire import Ask, Hello, Reply
from kvcheck.core.probes.installed import parse_target
from kvcheck.core.stress.runner import complete
from kvcheck.core.stress.schedule import Plan


def probe_plans(base: Plan, scenarios: list[str], shapes: list[str]) -> Iterator[Plan]:
    """The plans of the target's probes for the base's kind of device.

    Of all, or of the scenarios and "PROBE.SUBJECT" or PROBE that were named.
    """
    kind = base.device.partition(":")[0]
    rows = [row for row in parse_target(base.target).spec.probes if kind in row.devices]
    for row in rows:
        for subject in row.subjects:
            shape = f"{row.name}.{subject}"
            if (not scenarios or row.scenario in scenarios) and (not shapes or {shape, row.name} & {*shapes}):
                yield replace(base, scenario=row.scenario, shape=shape)


def probe_of(plan: Plan) -> tuple[ProbeRow, str]:
    """The probe and subject of a plan. Raises UsageError for what the engine has no probe for."""
    name, _, subject = plan.shape.partition(".")
    spec = parse_target(plan.target).spec
    row = spec.probe(name)
    kind = plan.device.partition(":")[0]
    if row is not None and kind not in row.devices:
        raise UsageError(f"probe {name} of {spec.name} runs on {', '.join(row.devices)}, not on {plan.device}")
    if row is None or subject not in row.subjects or row.scenario != plan.scenario:
        known = ", ".join(f"{each.scenario}:shape={each.name}.{sub}" for each in spec.probes for sub in each.subjects)
        raise UsageError(f"{spec.name} has no probe {plan.scenario}:shape={plan.shape}; known: {known}")
    return row, subject


@dataclass(slots=True)
class EngineRunner:
    """Runs plans of one target, in one child as long as that lives. lost: children that did not answer."""

    target: str
    patience: Patience = field(default_factory=Patience)
    device: str = "cpu"
    lost: int = 0
    _child: EngineProcess | None = None
    _spent_s: float = 0.0

    def start(self) -> Hello:
        """The engine, ready. Raises UnknownVerdict."""
        if self._child is None:
            self._child = parse_target(self.target).start(self.patience, self.device)
        return self._child.hello

    def run(self, plan: Plan) -> Reply:
        """One schedule; its findings carry the plan's line."""
        row, subject = probe_of(plan)
        try:
            self.start()
            assert self._child is not None
            reply = self._child.ask(Ask(probe=row.name, subject=subject, seed=plan.seed, schedule=plan.schedule))
        except UnknownVerdict as error:
            self.lost += 1
            self.close()
            return Reply(evidence=Evidence(schedules=1), unknown=str(error))
        return replace(reply, findings=tuple(complete(finding, plan) for finding in reply.findings))

    @property
    def cpu_s(self) -> float:
        """CPU seconds that its children have taken."""
        return self._spent_s + (0.0 if self._child is None else self._child.cpu_s)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._spent_s = self.cpu_s
            self._child.close()
            self._child = None
