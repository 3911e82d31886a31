"""ProbeRunner: runs plans of probes on an installed engine in a child process, and makes outcomes of its answers.

A plan's probe is "NAME.SUBJECT", such as retract.nsa.

Invariants:
- If the child is lost, the schedule is UNKNOWN, and the next schedule gets a new child.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvcheck.core.base.cells import SCENARIO_NAMES, kind_of
from kvcheck.core.base.child import inherited
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.record import Evidence
from kvcheck.core.base.registry import did_you_mean
from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.frame.lines_run import from_ranges
from kvcheck.core.probes.frame.tables import ProbeRow
from kvcheck.core.probes.frame.wire import Ask, Hello
from kvcheck.core.probes.installed import parse_target
from kvcheck.core.run.outcome import Outcome, TargetOf, complete
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.runners import RunnerRow

PROBE_FLOOR = 12
"""prefixes.swa of SGLang 0.5.10.post1 failed in the sixth schedule of a seed, and passed with two."""
COMPILING_S = 600.0
"""For an answer on a device, as an engine may first compile its copies."""
UNREAD = ("mutant", "backend", "device", "transport", "ranks", "strategy", "requests", "trace", "choices")
"""Keys of a plan that no probe reads: they must have their defaults."""


def probe_plans(base: Plan, names: Sequence[str]) -> Iterator[Plan]:
    """names, of scenarios, of probes or as "PROBE.SUBJECT", limit the probes; without names all have a plan."""
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


def engine_env(given: Sequence[str]) -> str | None:
    """Join "NAME=VALUE" texts for a plan. Raises UsageError for characters that a line cannot hold."""
    names = [each.partition("=")[0] for each in given]
    for name, each in zip(names, given, strict=True):
        if not each.isprintable() or "=" not in each:
            raise UsageError(f"--env {each!r}: expected NAME=VALUE of printable characters in one line")
        if names.count(name) > 1:
            raise UsageError(f"--env {name}: expected each name once, got it {names.count(name)} times")
    return "\n".join(given) or None


def check_variables(plan: Plan) -> None:
    """Raise UsageError for variables that are not the engine's own, or may hold a secret: records show them."""
    spec = parse_target(plan.target).spec
    for line in (plan.engine_env or "").splitlines():
        name, equals, value = line.partition("=")
        is_own = bool(re.fullmatch("[A-Z][A-Z0-9_]*", name)) and name.startswith(spec.variables or ("\n",))
        if not equals or not is_own:
            begins = " or ".join(f"{each}*" for each in spec.variables)
            raise UsageError(f"--env {line!r}: expected NAME=VALUE with a name of {spec.name}'s own: {begins}")
        if inherited({name: value}, is_engine=True) != {name: value}:
            raise UsageError(f"--env {name}: its name or value looks like a secret, and a record shows it")


@dataclass(slots=True)
class ProbeRunner:
    """traced: as in Ask, in the first schedule of each cell, in more while `misses` is true of `ran`, and in a second
    run of a schedule that fails. ran: lines run so far, by cell and file."""

    target: str
    patience: Patience | None = None
    device: str = "cpu"
    variables: Mapping[str, str] = field(default_factory=dict)
    traced: tuple[str, ...] = ()
    ran: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    misses: Callable[[Mapping[str, Mapping[str, Collection[int]]]], bool] = lambda ran: False
    _child: EngineProcess | None = None
    _spent_s: float = 0.0

    def start(self) -> Hello:
        """Start the engine. Raises UnknownVerdict if it cannot be used."""
        if self._child is None:
            patience = self.patience or (Patience() if self.device == "cpu" else Patience(answer_s=COMPILING_S))
            self._child = parse_target(self.target).start(patience, self.device, self.variables)
        return self._child.hello

    def run(self, plan: Plan) -> Outcome:
        row, subject = probe_of(plan)
        traced = self.traced if plan.cell not in self.ran or self.misses(self.ran) else ()
        try:
            self.start()
            assert self._child is not None
            ask = Ask(probe=row.name, subject=subject, seed=plan.seed, schedule=plan.schedule, traced=traced)
            reply = self._child.ask(ask)
        except UnknownVerdict as error:
            self.close()
            return Outcome(
                plan=plan, findings=(), evidence=Evidence(schedules=1), digest=0, unknown=str(error), is_lost=True
            )
        ran = reply.lines
        if self.traced and not traced and any(each.condition is None for each in reply.findings):
            try:
                ran = self._child.ask(replace(ask, traced=self.traced)).lines
            except UnknownVerdict:  # the finding counts without its lines
                self.close()
        of_cell = self.ran.setdefault(plan.cell, {})
        for name, lines in ran.items():
            of_cell.setdefault(name, set()).update(from_ranges(lines))
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
        return self._spent_s + (0.0 if self._child is None else self._child.cpu_s)

    def close(self) -> None:
        if self._child is not None:
            self._spent_s = self.cpu_s
            self._child.close()
            self._child = None


class ProbeRunnerRow(RunnerRow):
    floor = PROBE_FLOOR
    is_alone = True

    def takes(self, plan: Plan) -> bool:
        return plan.probe is not None

    def make(self, plan: Plan, target_of: TargetOf) -> ProbeRunner:
        return ProbeRunner(plan.target, device=plan.device, variables=plan.engine_variables)

    def check_names(self, plan: Plan) -> None:
        probe_of(plan)

    def check(self, plan: Plan) -> None:
        """Refuse options that an engine's probes do not read, and a device that none of them runs on."""
        check_variables(plan)
        able = dict.fromkeys(kind for row in parse_target(plan.target).spec.probes for kind in row.devices)
        if (kind := kind_of(plan.device)) not in able:
            raise UsageError(
                f"--device {plan.device}: no probe of {plan.target} runs on {kind}; expected {' or '.join(able)}; "
                f"next: kvcheck probe {plan.target}, without --device"
            )
        default = Plan(scenario=plan.scenario, probe=plan.probe)
        if plan.device != "cpu":
            default = replace(default, device=plan.device, backend="cuda")
        for key in UNREAD:
            if (value := getattr(plan, key)) != getattr(default, key):
                raise UsageError(f"a probe of {plan.target} takes no {key}, got {value!r}; leave it out")

    def cells(self, base: Plan, scenarios: Sequence[str], shapes: Sequence[str]) -> list[Plan]:
        """Both kinds of names pick probes: by their scenario, by their own name, or as "PROBE.SUBJECT"."""
        names, rows = [*scenarios, *shapes], parse_target(base.target).spec.probes
        every = list(probe_plans(base, []))
        known = [row.name for row in rows] + [name for plan in every for name in (plan.scenario, str(plan.probe))]
        for name in names:
            if name not in known:
                listed = ", ".join(row.name for row in rows)
                raise UsageError(f"{base.target} has no probe {name!r}{did_you_mean(name, known)}; known: {listed}")
        return list(probe_plans(base, names))

    def cost(self, plan: Plan) -> str:
        return "the engine had not answered"

    def shows(self, plan: Plan) -> str | None:
        return probe_of(plan)[0].shows

    def untried(self, base: Plan, plans: Sequence[Plan]) -> list[str]:
        every = list(probe_plans(base, []))
        tried, ran = {plan.scenario for plan in every}, {plan.cell for plan in plans}
        lacking = [name for name in SCENARIO_NAMES if name not in tried]
        left = [plan.cell for plan in every if plan.cell not in ran]
        lines = [f"not exercised: {', '.join(lacking)}: no probe of {base.target} tries them"] if lacking else []
        if untried := parse_target(base.target).spec.untried:
            lines.append(f"not tried of {base.target}: {untried}")
        return lines + ([f"not exercised: left out by what was named: {', '.join(left)}"] if left else [])


PROBE = ProbeRunnerRow()
