"""RUN#N, the name of a finding, and the command that runs it again: by its line, or where that is long, by name.

Invariants:
- A short line works where the run's command was given: it names the folder of runs that the command named.
- A line of at most LONG characters is printed as it is: it needs no stored run.
- A finding without a number of its run has its whole line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from kvcheck.core.base.record import Finding, RunRecord

LONG = 100
"""Characters of a command that a reader takes in, and that a chat or a ticket does not fold."""
PROOF = ":proof"
"""Behind a number: the run in the other order, which shows that a missing wait does harm."""

SMALL = ":small"
"""Behind a number: the smaller schedule that fails as the finding does."""

FINDING = re.compile(rf"(?P<run>.+)[#.](?P<number>[0-9]{{1,9}})(?P<part>{PROOF}|{SMALL})?")
"""RUN#N, as commands take it. With a dot in place of # it is the finding's id."""


def replay_line(record: RunRecord, finding: Finding) -> str:
    """The shortest command that runs the finding again; the run's own where the finding is of no one schedule."""
    return shorter(finding.replay, record, finding) or record.repro


def proof_line(record: RunRecord, finding: Finding) -> str:
    """The command for the order that proves a missing wait; "" without one."""
    return shorter(whole_proof_line(finding), record, finding, PROOF)


def whole_proof_line(finding: Finding) -> str:
    """The command of the proof with its whole schedule line; "" without one."""
    return str((finding.minimal or {}).get("replay", ""))


def small_line(finding: Finding) -> str:
    """The command of a smaller schedule that fails as the finding does; "" where none was found."""
    line = (finding.minimal or {}).get("line")
    return f"kvcheck replay {line}" if isinstance(line, str) and line else ""


def wait_text(finding: Finding) -> str:
    """The wait that removes the failure around the smaller schedule, with its evidence, or that none does; "" where
    none was searched for."""
    wait = (finding.minimal or {}).get("wait")
    return wait if isinstance(wait, str) and small_line(finding) else ""


def shorter(whole: str, record: RunRecord, finding: Finding, part: str = "") -> str:
    """`whole`, or the finding's number in its run where that is shorter. part: of the finding, such as PROOF."""
    named = None if len(whole) <= LONG else by_name("replay", record, finding, part)
    return whole if named is None else min(whole, named, key=len)


def by_name(verb: str, record: RunRecord, finding: Finding, part: str = "") -> str | None:
    """The command that names the finding by its number in its run; None if it has no such number."""
    number = re.fullmatch(re.escape(record.run_id) + r"\.([1-9][0-9]*)", finding.id)
    if number is None:
        return None
    words = ["kvcheck", verb, f"{record.run_id}#{number[1]}{part}", *_out(record.argv)]
    return " ".join(word if word.startswith(record.run_id) else shlex.quote(word) for word in words)


def _out(argv: Sequence[str]) -> list[str]:
    """The option of the run's command that names the folder of runs; nothing where it is the usual one."""
    for at, word in enumerate(argv):
        if word == "--out" and at + 1 < len(argv):
            return ["--out", argv[at + 1]]
        if word.startswith("--out="):
            return ["--out", word.removeprefix("--out=")]
    return []
