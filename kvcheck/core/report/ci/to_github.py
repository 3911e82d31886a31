"""GitHub Actions: workflow commands, shown as annotations, and a step summary in markdown.

Invariants:
- A text of the record cannot end its command or start another one.
- GitHub silently drops the eleventh error or warning of a step. So at most MOST of each are written, and the last has
  the number of the others.
- A note on what was driven or left out is no annotation.
- A summary has at most MOST_BYTES: GitHub refuses more than 1 MiB.
"""

from __future__ import annotations

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Verdict
from kvcheck.core.report.ci.outcome import CiOutcome, writer
from kvcheck.core.report.ci.trouble import CiTrouble, TroubleKind
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.templates import filled
from kvcheck.core.report.wording import clip

MOST = 10
MOST_CASES = 200
MOST_BYTES = 900_000
NOTES = ("not exercised: ", "not tried", "changed: ")
TEXT_CHARS = 1000


def workflow_commands(outcome: CiOutcome) -> list[str]:
    """Return the commands, one per line. GitHub reads every printed line that starts with :: as a command."""
    errors = [each for each in outcome.listed if each.kind is not TroubleKind.CONDITIONAL]
    others = [each for each in outcome.listed if each.kind is TroubleKind.CONDITIONAL]
    warnings = [_annotation(each) for each in others]
    notes = (*NOTES, *(f"{case.id}: " for case in outcome.cases))
    warnings += [("kvcheck warning", clip(text, TEXT_CHARS)) for text in outcome.warnings if not text.startswith(notes)]
    told = f"{outcome.name}: {outcome.verdict}, exit {outcome.exit_code}"
    return [
        *_commands("error", [_annotation(each) for each in errors]),
        *_commands("warning", warnings),
        _command("notice", told, clip(outcome.summary, TEXT_CHARS) or told),
    ]


def summary(outcome: CiOutcome) -> str:
    cases = sorted(outcome.cases, key=lambda case: (case.verdict is Verdict.PASS, case.verdict is Verdict.UNKNOWN))
    whole = filled("summary.md.j2", outcome=outcome, cases=cases, most=MOST_CASES)
    if len(whole.encode("utf-8", "backslashreplace")) <= MOST_BYTES:
        return whole
    return "\n".join([*whole.split("\n")[:3], "", "The rest does not fit into a summary; it is in the record.", ""])


def _lines(outcome: CiOutcome) -> str:
    return "".join(f"{line}\n" for line in workflow_commands(outcome))


def _annotation(trouble: CiTrouble) -> tuple[str, str]:
    lines = [f"{trouble.where}: {trouble.lines[0]}", *trouble.lines[1:]]
    return trouble.head, "\n".join(clip(printable(line), TEXT_CHARS) for line in lines)


def _commands(level: str, found: list[tuple[str, str]]) -> list[str]:
    if len(found) > MOST:
        more = f"{counted(len(found) - MOST + 1, f'more {level}')}: see the record, or the step summary"
        found = [*found[: MOST - 1], (f"more {level}s", more)]
    return [_command(level, title, text) for title, text in found]


def _command(level: str, title: str, text: str) -> str:
    named = _data(printable(title)).replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={named}::{_data(printable(text, keep=chr(10)))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


write = writer("github", _lines)
