"""RUN#N, the name of a finding, and the command that replays it: by its schedule line or, if that is long, by name.

Invariants:
- A short command repeats the run's --out, so it works in the same working folder.
- A line of at most LONG characters is printed in full: it needs no stored run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from kvcheck.core.base.record import Finding, RunRecord

LONG = 100
"""Most characters of a command that a chat or a ticket does not fold."""
PROOF = ":proof"
"""Suffix of a number: the run in the other order, which shows the harm of a missing wait."""

SMALL = ":small"
"""Suffix of a number: the smaller schedule with the same failure."""

FINDING = re.compile(rf"(?P<run>.+)[#.](?P<number>[0-9]{{1,9}})(?P<part>{PROOF}|{SMALL})?")
"""RUN#N, an argument of commands. With a dot instead of # it is the finding's id."""


def replay_line(record: RunRecord, finding: Finding) -> str:
    """Return the shortest command that replays the finding; the run's own if no single schedule shows it."""
    return shorter(finding.replay, record, finding) or record.repro


def proof_line(record: RunRecord, finding: Finding) -> str:
    """Return the command for the order that proves a missing wait; "" if there is none."""
    return shorter(whole_proof_line(finding), record, finding, PROOF)


def whole_proof_line(finding: Finding) -> str:
    return str((finding.minimal or {}).get("replay", ""))


def small_line(finding: Finding) -> str:
    line = (finding.minimal or {}).get("line")
    return f"kvcheck replay {line}" if isinstance(line, str) and line else ""


def wait_text(finding: Finding) -> str:
    """Return the wait that removes the failure of the smaller schedule, with its evidence, or that none does."""
    wait = (finding.minimal or {}).get("wait")
    return wait if isinstance(wait, str) and small_line(finding) else ""


def shorter(whole: str, record: RunRecord, finding: Finding, part: str = "") -> str:
    """Return `whole`, or the command by name if that is shorter. part: a suffix such as PROOF."""
    named = None if len(whole) <= LONG else by_name("replay", record, finding, part)
    return whole if named is None else min(whole, named, key=len)


def by_name(verb: str, record: RunRecord, finding: Finding, part: str = "") -> str | None:
    """Return the command with RUN#N; None if the finding has no number in its run."""
    number = re.fullmatch(re.escape(record.run_id) + r"\.([1-9][0-9]*)", finding.id)
    if number is None:
        return None
    words = ["kvcheck", verb, f"{record.run_id}#{number[1]}{part}", *_out(record.argv)]
    return " ".join(word if word.startswith(record.run_id) else shlex.quote(word) for word in words)


def _out(argv: Sequence[str]) -> list[str]:
    for at, word in enumerate(argv):
        if word == "--out" and at + 1 < len(argv):
            return ["--out", argv[at + 1]]
        if word.startswith("--out="):
            return ["--out", word.removeprefix("--out=")]
    return []
