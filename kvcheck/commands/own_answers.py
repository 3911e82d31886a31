"""A worker's answers to the questions of `own_target.py` about a target of the user's own.

Invariants:
- Intermediate results are sent at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from kvcheck.commands.own_target import Tell
from kvcheck.commands.targets import target_of
from kvcheck.core.base.record import Finding, to_plain, value_from
from kvcheck.core.run.plan import parse_line


def answered(text: str, say: Callable[[str], None]) -> str:
    what, given = json.loads(text)
    answer = QUESTIONS[what](lambda row: say(json.dumps({"told": to_plain(row)})), **given)
    return json.dumps({"answer": answer})


def _identity(tell: Tell, *, name: str) -> str:
    from kvcheck.core.stress.targets.own import own_identity

    return own_identity(name)


def _stories(tell: Tell, *, findings: list[object], until: float) -> None:
    from kvcheck.core.stress.stories import stories as made

    for row in made(_findings(findings), target_of, until=until).items():
        tell(row)


def _smaller(tell: Tell, *, findings: list[object], until: float) -> None:
    from kvcheck.core.stress.smaller import smaller as found

    for row in found(_findings(findings), target_of, until=until):
        tell(row)


def _shrink(tell: Tell, *, line: str, runs: int, is_text: bool) -> str:
    from kvcheck.commands.shrink import search

    return search(parse_line(line), runs, tell, is_text=is_text).value


def _findings(rows: list[object]) -> list[Finding]:
    return [value_from(Finding, row, "finding") for row in rows]


QUESTIONS: Mapping[str, Callable[..., object]] = {
    "identity": _identity,
    "stories": _stories,
    "smaller": _smaller,
    "shrink": _shrink,
}
