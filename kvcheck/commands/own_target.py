"""Questions to a worker about a target of the user's own: its name, stories, smaller schedules, a search.

Invariants:
- The process of a command never imports the user's module: a crash there ends a worker alone.
- A worker that ends early raises Unanswered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Finding, Verdict, to_plain, value_from
from kvcheck.core.base.story import Story
from kvcheck.core.run.plan import Plan

WORKER = "kvcheck.commands.worker"
"""The module that a process of cells or answers runs."""
OWN = "own"
"""The argument with which a worker answers questions: those here, and of lines that are replayed on a device."""
Tell = Callable[[Any], None]
"""Takes an intermediate result, as JSON."""
Facts = dict[str, object]


def identity(name: str) -> str:
    """Return the code of MODULE:NAME in one line. Raises UsageError if it is no target."""
    from kvcheck.core.run.workers import Unanswered

    try:
        return str(_ask("identity", name=name))
    except Unanswered as why:
        raise UsageError(f"--target {name}: it cannot be loaded: {why}") from why


def stories(findings: Sequence[Finding], *, until: float) -> Mapping[str, Story]:
    """Return the stories of the first causes, by id. Raises Unanswered."""
    found: dict[str, object] = {}
    _ask("stories", lambda row: found.update([row]), findings=to_plain(findings), until=until)
    return {name: value_from(Story, story, "story") for name, story in found.items()}


def smaller(findings: Sequence[Finding], told: Callable[[str, Facts], None], *, until: float) -> None:
    """Pass facts of smaller schedules to a callback, with the id of the finding. Raises Unanswered."""
    _ask("smaller", lambda row: told(*row), findings=to_plain(findings), until=until)


def shrink(plan: Plan, runs: int, told: Callable[[str], None], *, is_text: bool) -> Verdict:
    return Verdict(_ask("shrink", told, line=plan.line(), runs=runs, is_text=is_text))


def _ask(what: str, told: Tell = lambda row: None, **given: object) -> object:
    from kvcheck.core.run.workers import AskedProcess

    until = given.get("until")
    with closing(AskedProcess(WORKER, OWN)) as process:
        answer = process.ask([what, given], until=until if isinstance(until, float) else None, told=told)
    assert isinstance(answer, dict), "a row with the answer"
    return answer["answer"]
