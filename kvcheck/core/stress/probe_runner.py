"""ProbeRunner: runs plans of probes on an installed engine in a child process, and makes outcomes of its answers.

A plan's probe is "NAME.SUBJECT", such as retract.nsa: the probe and what it is tried on.

Invariants:
- If the child is lost, the schedule is UNKNOWN, and the next schedule gets a new child.
- The same plan gives the same findings.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvcheck.core.base.child import inherited
from kvcheck.core.base.devices import kind_of
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.misspelt import did_you_mean
from kvcheck.core.base.record import Evidence
from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.frame.tables import ProbeRow
from kvcheck.core.probes.frame.wire import Ask, Hello
from kvcheck.core.probes.installed import parse_target
from kvcheck.core.stress.runner import Outcome, complete
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.schedule import Plan

COMPILING_S = 600.0
"""For an answer on a device, where an engine may first compile its copies."""
UNREAD = ("mutant", "backend", "device", "transport", "ranks", "strategy", "requests", "trace", "choices")
"""Keys of a plan that no probe reads: they have to be what they are by default."""


def probe_plans(base: Plan, names: Sequence[str]) -> Iterator[Plan]:
    """The plans of the target's probes for the base's kind of device.

    names: of scenarios, of probes or as "PROBE.SUBJECT"; without names all probes have a plan.
    """
    kind = kind_of(base.device)
    for row in parse_target(base.target).spec.probes:
        for subject in row.subjects if kind in row.devices else ():
            probe = f"{row.name}.{subject}"
            if not names or {row.scenario, row.name, probe} & {*names}:
                yield replace(base, scenario=row.scenario, probe=probe)


def probe_of(plan: Plan) -> tuple[ProbeRow, str]:
    """The probe and subject of a plan. Raises UsageError if the engine has no such probe."""
    name, _, subject = (plan.probe or "").partition(".")
    spec = parse_target(plan.target).spec
    row = spec.probe(name)
    kind = kind_of(plan.device)
    if row is not None and kind not in row.devices:
        raise UsageError(f"probe {name} of {spec.name} runs on {', '.join(row.devices)}, not on {plan.device}")
    if row is None or subject not in row.subjects or row.scenario != plan.scenario:
        known = ", ".join(f"{each.scenario}:shape={each.name}.{sub}" for each in spec.probes for sub in each.subjects)
        raise UsageError(f"{spec.name} has no probe {plan.scenario}:shape={plan.probe}; known: {known}")
    return row, subject


def check_probe_plan(plan: Plan) -> None:
    """Raise UsageError for options that an engine's probes do not read, and for a device that none of them runs on."""
    check_variables(plan)
    able = dict.fromkeys(kind for row in parse_target(plan.target).spec.probes for kind in row.devices)
    if (kind := kind_of(plan.device)) not in able:
        raise UsageError(
            f"--device {plan.device}: no probe of {plan.target} runs on {kind}; expected {' or '.join(able)}; next: "
            f"kvcheck probe {plan.target}, without --device"
        )
    default = Plan(scenario=plan.scenario, probe=plan.probe)
    if plan.device != "cpu":
        default = replace(default, device=plan.device, backend="cuda")
    for key in UNREAD:
        if (value := getattr(plan, key)) != getattr(default, key):
            raise UsageError(f"a probe of {plan.target} takes no {key}, got {value!r}; leave it out")


def engine_env(given: Sequence[str]) -> str | None:
    """Variables as a plan has them, from "NAME=VALUE" each. Raises UsageError for what a line cannot hold."""
    names = [each.partition("=")[0] for each in given]
    for name, each in zip(names, given, strict=True):
        if not each.isprintable() or "=" not in each:
            raise UsageError(f"--env {each!r}: expected NAME=VALUE of printable characters in one line")
        if names.count(name) > 1:
            raise UsageError(f"--env {name}: expected each name once, got it {names.count(name)} times")
    return "\n".join(given) or None


def check_variables(plan: Plan) -> None:
    """Raise UsageError for variables that are not the engine's own, or that may hold a secret: records show them."""
    spec = parse_target(plan.target).spec
    for line in (plan.engine_env or "").splitlines():
        name, equals, value = line.partition("=")
        is_own = bool(re.fullmatch("[A-Z][A-Z0-9_]*", name)) and name.startswith(spec.variables or ("\n",))
        if not equals or not is_own:
            begins = " or ".join(f"{each}*" for each in spec.variables)
            raise UsageError(f"--env {line!r}: expected NAME=VALUE with a name of {spec.name}'s own: {begins}")
        if inherited({name: value}, is_engine=True) != {name: value}:
            raise UsageError(f"--env {name}: its name or value looks like a secret, and a record shows it")


def probe_cells(base: Plan, scenarios: Sequence[str], names: Sequence[str]) -> list[Plan]:
    """The plans of a run. Raises UsageError for a name that no probe of the engine has."""
    every = list(probe_plans(base, []))
    known = {name: None for plan in every for name in (plan.scenario, _name(plan), str(plan.probe))}
    for name in (*scenarios, *names):
        if name not in known:
            names_of_rows = ", ".join(dict.fromkeys(map(_name, every)))
            raise UsageError(f"{base.target} has no probe {name!r}{did_you_mean(name, known)}; known: {names_of_rows}")
    return list(probe_plans(base, [*scenarios, *names]))


def _name(plan: Plan) -> str:
    """The probe of a plan, without its subject."""
    return (plan.probe or "").partition(".")[0]


def untried_by_probes(base: Plan, plans: Sequence[Plan]) -> list[str]:
    """Scenarios that no probe of the engine tries, in one line, and probes that a run leaves out, in one line."""
    every = list(probe_plans(base, []))
    tried, ran = {plan.scenario for plan in every}, {plan.cell for plan in plans}
    lacking = [name for name in SCENARIOS.names() if name not in tried]
    left = [plan.cell for plan in every if plan.cell not in ran]
    lines = [f"not exercised: {', '.join(lacking)}: no probe of {base.target} tries them"] if lacking else []
    if untried := parse_target(base.target).spec.untried:
        lines.append(f"not tried of {base.target}: {untried}")
    return lines + ([f"not exercised: left out by what was named: {', '.join(left)}"] if left else [])


@dataclass(slots=True)
class ProbeRunner:
    """Runs plans of one target, all in one child while that lives. patience: None is that for the device."""

    target: str
    patience: Patience | None = None
    device: str = "cpu"
    variables: Mapping[str, str] = field(default_factory=dict)
    _child: EngineProcess | None = None
    _spent_s: float = 0.0

    def start(self) -> Hello:
        """Start the engine. Raises UnknownVerdict if it cannot be used."""
        if self._child is None:
            patience = self.patience or (Patience() if self.device == "cpu" else Patience(answer_s=COMPILING_S))
            self._child = parse_target(self.target).start(patience, self.device, self.variables)
        return self._child.hello

    def run(self, plan: Plan) -> Outcome:
        """Run one schedule. Its findings carry the plan's line."""
        row, subject = probe_of(plan)
        try:
            self.start()
            assert self._child is not None
            reply = self._child.ask(Ask(probe=row.name, subject=subject, seed=plan.seed, schedule=plan.schedule))
        except UnknownVerdict as error:
            self.close()
            return Outcome(
                plan=plan, findings=(), evidence=Evidence(schedules=1), digest=0, unknown=str(error), is_lost=True
            )
        findings = tuple(complete(finding, plan) for finding in reply.findings)
        return Outcome(
            plan=plan,
            findings=findings,
            evidence=reply.evidence,
            digest=zlib.crc32(repr(findings).encode()),
            unknown=reply.unknown,
            note="; ".join(f"{plan.cell}: {note}" for note in reply.notes) or None,
        )

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return None

    def closing(self) -> str | None:
        return None

    @property
    def cpu_s(self) -> float:
        """CPU seconds that its children have used."""
        return self._spent_s + (0.0 if self._child is None else self._child.cpu_s)

    def close(self) -> None:
        if self._child is not None:
            self._spent_s = self.cpu_s
            self._child.close()
            self._child = None
