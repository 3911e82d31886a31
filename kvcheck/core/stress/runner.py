"""ScheduleRunner: runs a plan in this process, one plan in, one judged outcome out.

Invariants:
- An error of the code under test is a finding, also its sys.exit, and in the reference run too. A broken oracle makes
  the outcome UNKNOWN.
- The same plan gives the same findings and the same digest.
"""

from __future__ import annotations

import dataclasses
import zlib
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvcheck.core.base.causes import in_causal_order
from kvcheck.core.base.cells import number_of
from kvcheck.core.base.deadline import Interrupted, Stuck, TimeUp, progress_watch
from kvcheck.core.base.errors import (
    DoubleFree,
    ForeignAccess,
    FreeInFlight,
    Hang,
    InternalError,
    LayoutMismatch,
    LengthMismatch,
    UnknownVerdict,
    UsageError,
    machine_trouble,
)
from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.cache.backend import BACKENDS
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.backend.cuda import CudaBackend
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.backend.threads import ThreadsBackend
from kvcheck.core.cache.events import Emit
from kvcheck.core.run.outcome import Outcome, complete
from kvcheck.core.run.plan import ANSWERS, Plan, workload_seed
from kvcheck.core.run.turns import answers_text
from kvcheck.core.stress.answers import AnswersStrategy
from kvcheck.core.stress.audit import AUDITED_EVERY, AuditBackend, is_audited
from kvcheck.core.stress.delay_lines import delays_of
from kvcheck.core.stress.device_end import CRASH, DeviceEnd, broke_by, is_of_user
from kvcheck.core.stress.evidence import EvidenceCount
from kvcheck.core.stress.history import Handler, History, HostTrace
from kvcheck.core.stress.named_memory import naming
from kvcheck.core.stress.oracles import ORACLES
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.orders import chooser_of
from kvcheck.core.stress.plan_scenario import bounded, decoded, faults_of, scenario_of, variant_of
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.scenario import Load, Scenario
from kvcheck.core.stress.scenarios.serving import STUCK_CPU_S, reference_outputs
from kvcheck.core.stress.strategies import Recorder, encode_choices
from kvcheck.core.stress.targets.own import NoEngine
from kvcheck.core.stress.targets.target import Target
from kvcheck.core.stress.workload.events import Broke, Expected, Forward, Verified
from kvcheck.core.stress.workload.shapes import shape as shape_named

TargetOf = Callable[[Plan], Target]
KEPT_WORKLOADS = 32
"""Enough for the schedules of a mutant and of the fixed build, which have equal workloads in turn."""
MAX_LINE_CHOICES = 3000
"""Characters of recorded choices that a schedule line may carry; longer runs replay from their seed."""

CRASHES = (Exception, SystemExit, GeneratorExit, CancelledError)
"""Errors of kvcheck's own cache, without limits of time and an interrupt."""
_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (DoubleFree, "KV402"),
    (FreeInFlight, "KV202"),
    (ForeignAccess, "KV403"),
    (LengthMismatch, "KV301"),
    (LayoutMismatch, "KV301"),
    (Hang, "KV901"),
)


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    outputs: Mapping[int, tuple[int, ...]]
    broke: Broke | None = None


class Workloads:
    """known: outputs of an earlier run; None for a plan: computed here."""

    def __init__(self, known: Callable[[Plan], Mapping[int, tuple[int, ...]] | None] = lambda plan: None) -> None:
        self._known = known
        self._kept: dict[object, tuple[Load, ReferenceRun]] = {}

    def of(self, plan: Plan) -> tuple[Load, ReferenceRun]:
        seed = workload_seed(plan)
        variant = variant_of(plan) if plan.trace is None else None
        key = (
            plan.scenario,
            plan.shape,
            seed,
            plan.requests,
            plan.pages,
            plan.trace,
            plan.ranks,
            plan.decoder,
            variant,
        )
        if key not in self._kept:
            scenario, shape = scenario_of(plan), shape_named(plan.shape)
            load = scenario.load(
                shape,
                seed=seed,
                requests=plan.requests,
                trace=plan.trace,
                variant=variant_of(plan),
                is_short=plan.pages is not None,
            )
            load = bounded(decoded(load, plan, shape), plan, shape)
            known = self._known(plan)
            self._kept[key] = load, reference_run(plan, load) if known is None else ReferenceRun(known)
            if len(self._kept) > KEPT_WORKLOADS:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]


class ScheduleRunner:
    """audit: on a CPU backend, audit every operation's footprints; slow. Else some, in the schedules of `is_audited`.
    workloads: may be shared with other targets. stuck_cpu_s: CPU seconds without progress that count as a hang."""

    cpu_s = 0.0

    def __init__(
        self,
        target: Target,
        *,
        audit: bool = False,
        workloads: Workloads | None = None,
        stuck_cpu_s: float = STUCK_CPU_S,
    ) -> None:
        self._target = target
        self._audit = audit
        self._stuck_cpu_s = stuck_cpu_s
        self.workloads = workloads or Workloads()
        self._lost: list[DeviceEnd] = []
        torch.set_num_threads(1)

    def run(
        self,
        plan: Plan,
        *,
        handlers: Iterable[tuple[type, Handler]] = (),
        around: Callable[[Backend], Backend] = lambda backend: backend,
    ) -> Outcome:
        scenario = scenario_of(plan)
        shape = shape_named(plan.shape)
        if missing := scenario.needs - self._target.capabilities:
            raise UnknownVerdict(
                f"target {self._target.name} does not declare {', '.join(sorted(missing))}, which {plan.scenario} "
                "needs; next: declare it, or name the scenarios that it is for"
            )
        load, reference = self.workloads.of(plan)
        if plan.faults is not None:
            load = dataclasses.replace(load, faults=faults_of(plan.faults))
        history = History()
        oracles = [ORACLES.load(name)() for name in ORACLES.names()]
        count = EvidenceCount()
        trace = HostTrace()
        history.listen((*count.handlers(), *trace.handlers()))
        history.listen(handlers)
        for oracle in oracles:
            history.listen(oracle.handlers())
        for request, tokens in sorted(reference.outputs.items()):
            history.emit(Expected(request, tokens, by=load.decoder))
        backend, recorder = _backend(plan, history.emit)
        audit = None
        if self._audit or is_audited(plan):
            audit = AuditBackend(backend, naming(shape), every=1 if self._audit else AUDITED_EVERY)
        ending = DeviceEnd(plan.device, backend, history)
        try:
            if reference.broke is None:
                evictions = self._driven(plan, scenario, load, around(audit or backend), history, ending)
            else:
                evictions = 0
                history.emit(reference.broke)
        finally:
            if ending.is_lost:
                self._lost.append(ending)  # it keeps objects alive that must not be freed
        broken = _finish(oracles)
        answers = recorder.inner if recorder is not None and isinstance(recorder.inner, AnswersStrategy) else None
        final = _exact(plan, recorder) if reference.broke is None else plan
        found = [finding for oracle in oracles for finding in oracle.findings]
        judged = {oracle.name: oracle.judged for oracle in oracles}
        if audit is not None:
            found += audit.findings()
            judged["audit"] = audit.judged
        findings = in_causal_order(complete(finding, final) for finding in found)
        return Outcome(
            plan=plan,
            findings=findings,
            evidence=count.total(events=history.count, evictions=evictions, orderings=judged["ordering"]),
            broken_oracles=broken,
            digest=_digest(history, recorder, findings),
            judged=judged,
            divergence=None if recorder is None else recorder.divergence(),
            asked=() if answers is None else tuple(answers.asked),
            refused=_refused(backend, answers),
            trace=trace.number,
            delays=ending.delays,
            is_device_lost=ending.is_lost,
            note=_note(plan, load, oracles),
        )

    def _driven(
        self, plan: Plan, scenario: Scenario, load: Load, backend: Backend, history: History, ending: DeviceEnd
    ) -> int:
        """Drive the target and wait for the device. Return device evictions.

        On the simulated backend, a loop that computes and reads nothing ends as a hang. Others wait for a device.
        """
        moves: Counter[type] = Counter()
        history.listen((kind, lambda event: moves.update((type(event),))) for kind in (Forward, Verified))
        is_watched = plan.backend == "simulated"
        watch = progress_watch(self._stuck_cpu_s, moves.total) if is_watched else nullcontext()
        try:
            with watch:
                evictions = scenario.run(
                    self._target,
                    shape_named(plan.shape),
                    load,
                    backend=backend,
                    emit=history.emit,
                    variant=variant_of(plan),
                )
        except Stuck:
            why = f"an endless loop: no position was computed and no word was read in {self._stuck_cpu_s:g} CPU seconds"
            history.emit(Broke("KV901", "Hang", why))
            evictions = 0
        except BaseException as error:  # errors of the target are findings
            if not _is_of_target(error, plan):
                raise
            ending.settle(error, _code_of(error, plan))
            return 0
        ending.settle()
        return evictions

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return evidence_gap(plan, total)

    def closing(self) -> str | None:
        return None


def schedules(first: Plan, count: int) -> Iterator[Plan]:
    for number in range(count):
        yield dataclasses.replace(first, schedule=first.schedule + number)


def evidence_gap(plan: Plan, evidence: Evidence) -> str | None:
    return SCENARIOS.load(plan.scenario)().missing(evidence, shape_named(plan.shape))


def _backend(plan: Plan, emit: Emit) -> tuple[Backend, Recorder | None]:
    BACKENDS.require(plan.backend)
    if plan.backend == "eager":
        return EagerBackend(emit), None
    if plan.backend == "cuda":
        return CudaBackend(number_of(plan.device), emit, delays_of(plan)), None
    if plan.backend == "threads":
        return ThreadsBackend(emit, delays_of(plan)), None
    recorder = Recorder(chooser_of(plan))
    return SimulatedBackend(recorder, emit), recorder


def _finish(oracles: list[Oracle]) -> tuple[str, ...]:
    broken = []
    for oracle in oracles:
        try:
            oracle.finish()
        except Exception as error:  # a broken oracle must not look like a pass
            broken.append(f"{oracle.name}: {type(error).__name__}: {error}")
    return tuple(broken)


def _note(plan: Plan, load: Load, oracles: list[Oracle]) -> str | None:
    notes = [load.note] if plan.trace is not None else []
    notes += [f"{plan.cell}, schedule {plan.schedule}: {each.note}" for each in oracles if each.note is not None]
    return "; ".join(notes) or None


def reference_run(plan: Plan, load: Load) -> ReferenceRun:
    """The reference run of a workload, with kvcheck's own classes for every target."""
    try:
        return ReferenceRun(MappingProxyType(dict(reference_outputs(shape_named(plan.shape), load))))
    except Stuck:
        broke = Broke(
            "KV901", "Hang", f"in the reference run, an endless loop: no event in {STUCK_CPU_S:g} CPU seconds"
        )
    except CRASHES as error:
        broke = broke_by(error, _code_of(error, plan), "in the reference run, where every request has room")
    if plan.own_target is not None:
        raise InternalError(
            f"the reference run, which kvcheck's own cache makes, failed: {broke.error}: {broke.message}"
        )
    return ReferenceRun({}, broke)


def _is_of_target(error: BaseException, plan: Plan) -> bool:
    """The user's own code may raise anything."""
    if plan.own_target is None:
        return isinstance(error, CRASHES)
    return not isinstance(error, TimeUp | Interrupted)


def _code_of(error: BaseException, plan: Plan) -> str:
    """The finding code of an error of the code under test. Raises all other errors."""
    is_own = plan.own_target is not None and is_of_user(error)
    if trouble := machine_trouble(error, is_of_user=is_own):
        raise UnknownVerdict(trouble) from error
    is_folder = isinstance(error, UsageError) and isinstance(error.__cause__, OSError)
    if not is_own and (is_folder or isinstance(error, NoEngine | InternalError | UnknownVerdict)):
        raise error
    return next((code for kind, code in _CODES if isinstance(error, kind)), CRASH)


def _exact(plan: Plan, recorder: Recorder | None) -> Plan:
    if recorder is not None and isinstance(recorder.inner, AnswersStrategy):
        return dataclasses.replace(plan, strategy=ANSWERS, choices=answers_text(recorder.inner.refused))
    if recorder is None or not recorder.is_whole or plan.strategy in ("replay", "flip"):
        return plan
    text = encode_choices(bytes(recorder.choices))
    return dataclasses.replace(plan, strategy="replay", choices=text) if len(text) <= MAX_LINE_CHOICES else plan


def _refused(backend: Backend, answers: AnswersStrategy | None) -> tuple[str, ...]:
    if answers is not None:
        return tuple(answers.refused)
    return tuple(map(str, backend.refused)) if isinstance(backend, SimulatedBackend) else ()


def _digest(history: History, recorder: Recorder | None, findings: tuple[Finding, ...]) -> int:
    told = [
        (f.code, f.oracle, f.buffer, f.layer, f.page, f.row, f.request, f.seen_request, f.message) for f in findings
    ]
    choices = b"" if recorder is None else bytes(recorder.choices)
    return zlib.crc32(choices, zlib.crc32(repr((history.count, told)).encode()))
