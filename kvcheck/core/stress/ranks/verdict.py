"""What the ranks of a run told, judged: from bytes seen at the receivers, and counts made by nobody who moved them.

Invariants:
- A run is green only if every request has the reference's tokens on every decode rank, every receiver has read and
  verified exactly the bytes that were worked out beforehand, and every rank gave everything back.
- A request fails for what was done to it, and its reason says so; what was done to it and should have ended it, did.
- A rank that was killed or frozen on purpose excuses failed requests, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.ranks.supervisor import RankReport
from kvcheck.core.stress.ranks.work import bytes_for
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.workload.events import Faulted

MOST = 20
"""Findings of one kind; more of the same helps nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """expected, verified: bytes at all receivers, worked out and read there. evidence: of the decode ranks together."""

    findings: tuple[Finding, ...]
    expected: int
    verified: int
    evidence: Evidence


def judge(
    stories: Mapping[str, RankReport],
    shape: ModelShape,
    load: Load,
    reference: Mapping[int, tuple[int, ...]],
    *,
    silence: str = "",
    troubled: Collection[str] = (),
) -> Judgement:
    """troubled: ranks that were killed or frozen on purpose."""
    decode = [story for name, story in stories.items() if name.startswith("decode")]
    found = [_finding("KV901", "liveness", silence)] if silence else []
    found += [
        _finding("KV902", "liveness", story.death)
        for story in stories.values()
        if story.death and story.name not in troubled
    ]
    alive = [story for story in decode if not story.death and not silence]
    done = _Done.of(stories)
    has_trouble = bool(troubled) or bool(found)
    for story in alive:
        found += _outputs(story, load, reference)
        found += _reasons(story, done, excuses=has_trouble)
    for story in stories.values():
        if story not in decode:
            found += _reasons(story, done, excuses=has_trouble)
    found += _agreement(stories, has_trouble=bool(troubled))
    for story in stories.values():
        if story.closing is not None:
            found += [_named(each, story.name) for each in story.closing.findings]
            found += _accounts(story)
    expected = verified = 0
    for story in alive:
        if story.closing is not None:
            found += _bytes(story, shape, load, ranks=len(decode))
            expected += sum(_expected(story, shape, load, ranks=len(decode)).values())
            verified += sum(size for request, size in _sealed(story).items() if request in _judged(story))
    return Judgement(
        findings=tuple(found), expected=expected, verified=verified, evidence=_evidence(alive, load, stories)
    )


@dataclass(frozen=True, slots=True)
class _Done:
    """What was done to requests on purpose. reasons: all that decode ranks gave for a request that failed."""

    aborted: frozenset[int]
    faulted: Mapping[int, Faulted]
    reasons: Mapping[int, str]

    @staticmethod
    def of(stories: Mapping[str, RankReport]) -> _Done:
        reasons: dict[int, str] = {}
        for story in stories.values():
            for request, reason in story.failed.items():
                reasons[request] = f"{reasons.get(request, '')}; {reason}".removeprefix("; ")
        return _Done(
            frozenset(request for story in stories.values() for request in story.aborted),
            {request: fault for story in stories.values() for request, fault in story.faulted.items()},
            reasons,
        )


def _outputs(story: RankReport, load: Load, reference: Mapping[int, tuple[int, ...]]) -> Sequence[Finding]:
    """Every request has ended, and what has finished has the right tokens."""
    found = []
    for job in load.jobs:
        request = job.request
        if request in story.finished:
            if story.finished[request] != reference[request]:
                text = f"{story.name}: request {request} has other tokens than the reference run"
                found.append(_finding("KV501", "output", text, request))
        elif request not in story.failed and request not in story.aborted:
            text = f"{story.name}: request {request} neither finished nor failed"
            found.append(_finding("KV901", "liveness", text, request))
    return found[:MOST]


def _reasons(story: RankReport, done: _Done, *, excuses: bool) -> Sequence[Finding]:
    """A request failed because of what was done to it, or finished because nothing was."""
    found = []
    for request, reason in story.failed.items():
        fault = done.faulted.get(request)
        if request in done.aborted or excuses:
            continue
        if fault is None:
            text = f"{story.name}: request {request} failed, and nothing was wrong with it: {reason}"
            found.append(_finding("KV901", "protocol", text, request))
        elif unsaid := [name for name in fault.names if name not in done.reasons[request]]:
            text = f"{story.name}: request {request} failed because {fault.why}, and its reason does not say"
            text = f"{text} {' and '.join(map(repr, unsaid))}: {reason}"
            found.append(_finding("KV301", "protocol", text, request))
    for request in story.finished:
        if request in done.aborted:
            text = f"{story.name}: request {request} finished after it had been aborted"
            found.append(_finding("KV602", "protocol", text, request))
        elif request in done.faulted:
            text = f"{story.name}: request {request} finished though {done.faulted[request].why}; it has to fail"
            found.append(_finding("KV301", "protocol", text, request))
    return found[:MOST]


def _agreement(stories: Mapping[str, RankReport], *, has_trouble: bool) -> Sequence[Finding]:
    """Ranks of an end that stayed together have decided the same."""
    found = []
    for end in ("prefill", "decode"):
        told = [each for each in stories.values() if each.name.startswith(end) and each.closing and not each.lost]
        for story in told[1:]:
            first = told[0]
            assert first.closing is not None and story.closing is not None
            same = (first.closing.decisions, first.finished) == (story.closing.decisions, story.finished)
            if has_trouble or any(each.death for each in stories.values()):
                # Each survivor loses the rooms that it had under way with the dead one, and no two had the same.
                same = first.finished == story.finished
            elif (first.failed.keys(), first.aborted) != (story.failed.keys(), story.aborted):
                same = False
            if not same:
                text = (
                    f"{first.name} and {story.name} decided differently: {len(first.finished)} and "
                    f"{len(story.finished)} requests finished, {len(first.failed)} and {len(story.failed)} failed"
                )
                found.append(_finding("KV601", "protocol", text))
    return found


def _accounts(story: RankReport) -> Sequence[Finding]:
    """Nothing is held when all is done; worked out again from the counts themselves."""
    assert story.closing is not None
    return [
        _finding("KV401", "accounting", f"{story.name}: {free} of {total} ids of {space} are free {when}; expected all")
        for when, counts in (("when idle", story.closing.counts), ("after close", story.closing.returned))
        for space, (free, total) in counts.items()
        if free != total
    ]


def _bytes(story: RankReport, shape: ModelShape, load: Load, *, ranks: int) -> Sequence[Finding]:
    sealed = _sealed(story)
    found = []
    for request, size in _expected(story, shape, load, ranks=ranks).items():
        if sealed.get(request, 0) != size:
            text = (
                f"{story.name}: request {request} was received with {sealed.get(request, 0)} verified bytes, and its "
                f"prompt has {size}"
            )
            found.append(_finding("KV301", "bytes", text, request))
    return found[:MOST]


def _expected(story: RankReport, shape: ModelShape, load: Load, *, ranks: int) -> dict[int, int]:
    judged = _judged(story)
    return {job.request: bytes_for(shape, job.prompt_tokens, ranks) for job in load.jobs if job.request in judged}


def _judged(story: RankReport) -> set[int]:
    """Requests whose bytes this process of the rank has read: one that died has told nobody of bytes."""
    return story.finished.keys() - story.before


def _sealed(story: RankReport) -> dict[int, int]:
    assert story.closing is not None
    return {int(request): size for request, size in story.closing.sealed.items()}


def _evidence(decode: Sequence[RankReport], load: Load, stories: Mapping[str, RankReport]) -> Evidence:
    """Events of all processes; words and rooms of the decode ranks; what they all did together is counted once."""
    total = Evidence(schedules=0)
    closings = [story.closing.evidence for story in decode if story.closing is not None]
    for each in closings:
        total = total.plus(each)
    return replace(
        total,
        schedules=1,
        events=sum(story.closing.evidence.events for story in stories.values() if story.closing is not None),
        requests=len(load.jobs),
        aborts=len({request for story in stories.values() for request in story.aborted}) or None,
        retractions=max((each.retractions or 0 for each in closings), default=0),
        resumes=max((each.resumes or 0 for each in closings), default=0),
        foreign_reuses=max((each.foreign_reuses or 0 for each in closings), default=0),
    )


def _named(finding: Finding, rank: str) -> Finding:
    """A rank's own finding, which may say already whose it is."""
    is_named = finding.message.startswith(f"{rank}: ")
    return finding if is_named else replace(finding, message=f"{rank}: {finding.message}")


def _finding(code: str, oracle: str, message: str, request: int | None = None) -> Finding:
    return Finding(code=code, oracle=oracle, request=request, message=message)
