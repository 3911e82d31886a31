"""Stories: repeats the schedules of a run's first causes, and describes how each failure came about.

Invariants:
- Only a run that makes the finding again gives a story. Otherwise a sentence has the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvcheck.core.base.causes import bugs
from kvcheck.core.base.deadline import TimeUp, time_limit
from kvcheck.core.base.errors import UnknownVerdict, UsageError, machine_trouble
from kvcheck.core.base.record import Finding
from kvcheck.core.base.story import Story, short
from kvcheck.core.base.untold import why_untold
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.stress.flip import pair_of
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles import ORACLES
from kvcheck.core.stress.runner import ScheduleRunner, TargetOf
from kvcheck.core.stress.story_notes import StoryNotes
from kvcheck.core.stress.story_telling import tell

MOST_STORIES = 10

UNMADE = "the schedule was run once more and did not make the finding again"


def stories(
    findings: Sequence[Finding],
    target_of: TargetOf,
    *,
    until: float | None = None,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Mapping[str, Story]:
    """until: the time.monotonic() after which none is begun. told: called before each, with how many are done."""
    causes = [bug.cause for bug in bugs(findings)][:MOST_STORIES]
    found: dict[str, Story] = {}
    groups: dict[Plan, list[tuple[Finding, Finding]]] = {}
    for cause in causes:
        followed = _followed(cause, findings)
        if (why := why_untold(followed)) is not None:
            found[cause.id] = Story(about=_about(cause), untold=short(why))
            continue
        groups.setdefault(_plan(cause, followed), []).append((cause, followed))
    for done, (plan, pairs) in enumerate(groups.items()):
        told(done, len(groups))
        found |= dict(_run(plan, pairs, target_of, until))
    return {cause.id: found[cause.id] for cause in causes}


def with_stories(findings: Sequence[Finding], told: Mapping[str, Story]) -> list[Finding]:
    return [dataclasses.replace(each, story=told.get(each.id, each.story)) for each in findings]


def _followed(cause: Finding, findings: Sequence[Finding]) -> Finding:
    """The cause, or the first wrong bytes that it explains, if it names no place."""
    if cause.page is not None:
        return cause
    symptoms = [each for each in findings if each.cause == cause.id and each.page is not None]
    near = [each for each in symptoms if cause.buffer in (None, each.buffer)]
    return min(near, key=lambda each: (each.oracle != "content", each.request != cause.request), default=cause)


def _plan(cause: Finding, followed: Finding) -> Plan:
    """Of a confirmed race, the flipped schedule. Its numbers fit only a finding of an eager run."""
    plan = dataclasses.replace(parse_line(followed.schedule), expect=None)
    line = (cause.minimal or {}).get("replay")
    if followed is not cause or pair_of(cause) is None or not isinstance(line, str):
        return plan
    flipped = dataclasses.replace(parse_line(line.removeprefix("kvcheck replay ")), expect=None)
    pair = pair_of(cause)
    return flipped if pair is not None and flipped.choices == pair.text() else plan


def _run(
    plan: Plan, pairs: Sequence[tuple[Finding, Finding]], target_of: TargetOf, until: float | None
) -> Iterator[tuple[str, Story]]:
    notes = [StoryNotes(followed, ORACLES.load(followed.oracle)()) for _, followed in pairs]
    handlers: list[tuple[type, Handler]] = [row for each in notes for row in each.handlers()]
    why = None
    try:
        with time_limit(until):
            ScheduleRunner(target_of(plan)).run(plan, handlers=handlers)
    except TimeUp:
        why = "there was no time to run the schedule once more"
    except (UnknownVerdict, UsageError, OSError, MemoryError, RuntimeError, ImportError) as error:
        known = isinstance(error, UnknownVerdict | UsageError)
        why = str(error) if known else machine_trouble(error)
        if why is None:
            raise
    for (cause, followed), each in zip(pairs, notes, strict=True):
        if why is None:
            each.finish()
        if why is not None or each.moment is None:
            yield cause.id, Story(about=_about(cause), untold=short(why or UNMADE))
        else:
            yield cause.id, tell(each, cause, followed, is_flipped=plan.strategy == "flip")


def _about(cause: Finding) -> str:
    return short(f"{cause.code} of {cause.cell}")
