"""What a call of kvcheck.testing ends in: what was judged, the findings, or why nothing could be judged.

Invariants:
- The text of a failure is the findings as people read them: causes first, with the bytes that were seen beside those
  that were wanted.
- What could not be judged is neither a finding nor a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.causes import Bug, bugs, in_causal_order
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.record import Finding

MOST_SHOWN = 5
"""Causes that are printed in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a call has judged. words: words of 8 bytes that were compared, by buffer. reads: rows or values compared.

    orderings: reads that raced with a load. not_tried: what the call left out, each with the reason.
    """

    words: Mapping[str, int]
    reads: int
    orderings: int = 0
    not_tried: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        named = ", ".join(f"{name} {count:,}" for name, count in self.words.items())
        left = f"; not tried: {'; '.join(self.not_tried)}" if self.not_tried else ""
        return f"judged {sum(self.words.values()):,} words in {self.reads:,} reads ({named}){left}"


class IntegrityError(AssertionError):
    """Something was found. findings: causes first, each with its symptoms. judged: what was compared on the way."""

    __module__ = "kvcheck.testing"

    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self.findings = judged.findings
        super().__init__(findings_text(self.findings))


class NotJudged(UnknownVerdict):
    """The call could not judge: the text says what is in the way and what to do about it. It is not a pass."""

    __module__ = "kvcheck.testing"


def settled(
    findings: Sequence[Finding], words: Mapping[str, int], reads: int, *, orderings: int = 0, not_tried: tuple[str, ...]
) -> Judged:
    """The result of a call, its findings in causal order."""
    return Judged(
        words=dict(words),
        reads=reads,
        orderings=orderings,
        not_tried=not_tried,
        findings=in_causal_order(findings),
    )


def findings_text(findings: Sequence[Finding]) -> str:
    """One block for each cause."""
    found = bugs(findings)
    shown = [line for bug in found[:MOST_SHOWN] for line in _block(bug)]
    if len(found) > MOST_SHOWN:
        shown.append(f"and {len(found) - MOST_SHOWN} more causes")
    return "\n".join(shown)


def _block(bug: Bug) -> list[str]:
    cause = bug.cause
    place = [name for name in (cause.buffer,) if name is not None]
    place += [f"layer {cause.layer}"] if cause.layer is not None else []
    place += [f"row {cause.row}"] if cause.row is not None else []
    lines = [f"{cause.code} {CODES[cause.code].title}"]
    lines += [f"  where   {', '.join(place)}"] if place else []
    lines.append(f"  what    {cause.message}")
    dump = cause.minimal or {}
    lines += [f"  {name:<7} {dump[name]}" for name in ("seen", "wanted") if name in dump]
    codes = Counter(each.code for each in bug.findings)
    also = codes.pop(cause.code) - 1
    followed = ", ".join(f"{code} x{count}" for code, count in codes.items())
    lines += [f"  also    {also} more of this code and cause"] if also else []
    lines += [f"  then    {followed}"] if followed else []
    return [*lines, f"  more    kvcheck explain {cause.code}"]
