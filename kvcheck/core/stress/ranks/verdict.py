"""Judges the reports of the ranks of a run: by bytes verified at the receivers, and counts made by other processes.

Invariants:
- A run is green only if every request has the reference's tokens on every decode rank, every receiver has verified
  exactly the bytes that this process had computed before the run, and every rank freed everything.
- A request fails only because of a fault or an abort of its own, with that reason. A request with a fault must fail.
- A rank that was killed or frozen on purpose excuses failed requests and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.oracles.protocol import code_of_unnoticed
from kvcheck.core.stress.ranks.supervisor import RankReport
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.workload.events import Faulted
from kvcheck.core.stress.workload.handover import bytes_for

MOST = 20
"""At most so many findings of one kind are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJudgement:
    """expected: bytes for all receivers, computed before the run. verified: bytes that they read."""

    findings: tuple[Finding, ...]
    expected: int
    verified: int
    evidence: Evidence


def judge(
    reports: Mapping[str, RankReport],
    shape: ModelShape,
    load: Load,
    reference: Mapping[int, tuple[int, ...]],
    *,
    silence: str = "",
    troubled: Collection[str] = (),
) -> RankJudgement:
    """silence: why the supervisor gave up. troubled: ranks that were killed or frozen on purpose."""
    decode = [report for name, report in reports.items() if name.startswith("decode")]
    found = [_finding("KV901", "liveness", silence)] if silence else []
    found += [
        _finding("KV902", "liveness", report.death)
        for report in reports.values()
        if report.death and report.name not in troubled
    ]
    alive = [report for report in decode if not report.death and not silence]
    done = _Done.of(reports)
    has_trouble = bool(troubled) or bool(found)
    for report in alive:
        found += _outputs(report, load, reference)
        found += _reasons(report, done, excuses=has_trouble)
    for report in reports.values():
        if report not in decode:
            found += _reasons(report, done, excuses=has_trouble)
    found += _agreement(reports, has_trouble=bool(troubled))
    for report in reports.values():
        if report.summary is not None:
            found += [_named(each, report.name) for each in report.summary.findings]
            found += _accounts(report)
    expected = verified = 0
    for report in alive:
        if report.summary is not None:
            found += _bytes(report, shape, load, ranks=len(decode))
            expected += sum(_expected(report, shape, load, ranks=len(decode)).values())
            verified += sum(size for request, size in _sealed(report).items() if request in report.finished)
    return RankJudgement(
        findings=tuple(found), expected=expected, verified=verified, evidence=_evidence(alive, load, reports)
    )


@dataclass(frozen=True, slots=True)
class _Done:
    aborted: frozenset[int]
    faulted: Mapping[int, Faulted]
    reasons: Mapping[int, str]

    @staticmethod
    def of(reports: Mapping[str, RankReport]) -> _Done:
        reasons: dict[int, str] = {}
        for report in reports.values():
            for request, reason in report.failed.items():
                reasons[request] = f"{reasons.get(request, '')}; {reason}".removeprefix("; ")
        return _Done(
            frozenset(request for report in reports.values() for request in report.aborted),
            {request: fault for report in reports.values() for request, fault in report.faulted.items()},
            reasons,
        )


def _outputs(report: RankReport, load: Load, reference: Mapping[int, tuple[int, ...]]) -> Sequence[Finding]:
    found = []
    for job in load.jobs:
        request = job.request
        if request in report.finished:
            if report.finished[request] != reference[request]:
                text = f"{report.name}: request {request} has other tokens than the reference run"
                found.append(_finding("KV501", "output", text, request))
        elif request not in report.failed and request not in report.aborted:
            text = f"{report.name}: request {request} neither finished nor failed"
            found.append(_finding("KV901", "liveness", text, request))
    return found[:MOST]


def _reasons(report: RankReport, done: _Done, *, excuses: bool) -> Sequence[Finding]:
    found = []
    for request, reason in report.failed.items():
        fault = done.faulted.get(request)
        if request in done.aborted or excuses:
            continue
        if fault is None:
            text = f"{report.name}: request {request} failed, and it had no fault: {reason}"
            found.append(_finding("KV604", "protocol", text, request))
        elif unsaid := [name for name in fault.names if name not in done.reasons[request]]:
            text = f"{report.name}: request {request} failed because {fault.why}, and its reason does not say"
            text = f"{text} {' and '.join(map(repr, unsaid))}: {reason}"
            found.append(_finding("KV603", "protocol", text, request))
    for request in report.finished:
        if request in done.aborted:
            text = f"{report.name}: request {request} finished after it had been aborted"
            found.append(_finding("KV602", "protocol", text, request))
        elif request in done.faulted:
            text = f"{report.name}: request {request} finished though {done.faulted[request].why}; it has to fail"
            found.append(_finding(code_of_unnoticed(done.faulted[request]), "protocol", text, request))
    return found[:MOST]


def _agreement(reports: Mapping[str, RankReport], *, has_trouble: bool) -> Sequence[Finding]:
    found = []
    for end in ("prefill", "decode"):
        told = [each for each in reports.values() if each.name.startswith(end) and each.summary and not each.lost]
        for report in told[1:]:
            first = told[0]
            assert first.summary is not None and report.summary is not None
            same = (first.summary.decisions, first.finished) == (report.summary.decisions, report.finished)
            if has_trouble or any(each.death for each in reports.values()):
                # Each rank loses the rooms that it shared with the dead one, and those differ from rank to rank.
                same = first.finished == report.finished
            elif first.failed.keys() != report.failed.keys() or _aborts_apart(first, report):
                same = False
            if not same:
                text = (
                    f"{first.name} and {report.name} decided differently: {len(first.finished)} and "
                    f"{len(report.finished)} requests finished, {len(first.failed)} and {len(report.failed)} failed, "
                    f"{len(first.aborted)} and {len(report.aborted)} were aborted"
                )
                found.append(_finding("KV601", "protocol", text))
    return found


def _aborts_apart(one: RankReport, other: RankReport) -> set[int]:
    """Except requests that failed at both: the order of an abort and a failure is up to each rank's machine, and the
    outcome was agreed on."""
    return (one.aborted ^ other.aborted) - (one.failed.keys() & other.failed.keys())


def _accounts(report: RankReport) -> Sequence[Finding]:
    assert report.summary is not None
    return [
        _finding(
            "KV401", "accounting", f"{report.name}: {free} of {total} ids of {space} are free {when}; expected all"
        )
        for when, counts in (("when idle", report.summary.counts), ("after close", report.summary.returned))
        for space, (free, total) in counts.items()
        if free != total
    ]


def _bytes(report: RankReport, shape: ModelShape, load: Load, *, ranks: int) -> Sequence[Finding]:
    sealed = _sealed(report)
    found = []
    for request, size in _expected(report, shape, load, ranks=ranks).items():
        if sealed.get(request, 0) != size:
            text = (
                f"{report.name}: request {request} was received with {sealed.get(request, 0)} verified bytes, and its "
                f"prompt has {size}"
            )
            found.append(_finding("KV301", "bytes", text, request))
    return found[:MOST]


def _expected(report: RankReport, shape: ModelShape, load: Load, *, ranks: int) -> dict[int, int]:
    finished = report.finished
    return {job.request: bytes_for(shape, job.prompt_tokens, ranks) for job in load.jobs if job.request in finished}


def _sealed(report: RankReport) -> dict[int, int]:
    assert report.summary is not None
    return {int(request): size for request, size in report.summary.sealed.items()}


def _evidence(decode: Sequence[RankReport], load: Load, reports: Mapping[str, RankReport]) -> Evidence:
    total = Evidence(schedules=0)
    summaries = [report.summary.evidence for report in decode if report.summary is not None]
    for each in summaries:
        total = total.plus(each)
    return replace(
        total,
        schedules=1,
        events=sum(report.summary.evidence.events for report in reports.values() if report.summary is not None),
        requests=len(load.jobs),
        aborts=len({request for report in reports.values() for request in report.aborted}) or None,
        retractions=max((each.retractions or 0 for each in summaries), default=0),
        resumes=max((each.resumes or 0 for each in summaries), default=0),
        foreign_reuses=max((each.foreign_reuses or 0 for each in summaries), default=0),
    )


def _named(finding: Finding, rank: str) -> Finding:
    is_named = finding.message.startswith(f"{rank}: ")
    return finding if is_named else replace(finding, message=f"{rank}: {finding.message}")


def _finding(code: str, oracle: str, message: str, request: int | None = None) -> Finding:
    return Finding(code=code, oracle=oracle, request=request, message=message)
