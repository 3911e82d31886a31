"""Outcomes of a call: its result, its findings with causes first, or the reason why it could not judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.causes import Bug, bugs, in_causal_order
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.record import Finding

__tracebackhide__ = True

MOST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Result of a call. words: compared 8-byte words, by buffer. reads: rows or values compared.

    orderings: reads that raced with a load. not_tried: parts that the call left out, each with the reason.
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
    """Raised with the findings of a call: causes first, each followed by its symptoms. judged: the call's result."""

    __module__ = "kvcheck.testing"

    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self.findings = judged.findings
        super().__init__(findings_text(self.findings))


class NotJudged(UnknownVerdict):
    """Raised if the call could not judge; its text has the reason and the remedy. It is not a pass."""

    __module__ = "kvcheck.testing"


def settled(
    findings: Sequence[Finding], words: Mapping[str, int], reads: int, *, orderings: int = 0, not_tried: tuple[str, ...]
) -> Judged:
    return Judged(
        words=dict(words), reads=reads, orderings=orderings, not_tried=not_tried, findings=in_causal_order(findings)
    )


def findings_text(findings: Sequence[Finding]) -> str:
    found = bugs(findings)
    shown = [line for bug in found[:MOST_SHOWN] for line in _block(bug)]
    if len(found) > MOST_SHOWN:
        shown.append(f"and {len(found) - MOST_SHOWN} more causes")
    return "\n".join(shown)


def _block(bug: Bug) -> list[str]:
    cause = bug.cause
    place = [name for name in (cause.buffer,) if name is not None]
    place += [f"layer {cause.layer}"] if cause.layer is not None else []
    lines = [f"{cause.code} {CODES[cause.code].title}"]
    lines += [f"  where   {', '.join(place)}"] if place else []
    lines.append(f"  what    {cause.message}")
    dump = cause.minimal or {}
    lines += [f"  {name:<7} {dump[name]}" for name in ("called", "seen", "wanted") if name in dump]
    also = [each for each in bug.findings if each.code == cause.code and each is not cause]
    codes = Counter(each.code for each in bug.findings if each.code != cause.code)
    followed = ", ".join(f"{code} x{count}" for code, count in codes.items())
    names = ", ".join([*dict.fromkeys(str(each.buffer) for each in also)][:MOST_SHOWN])
    lines += [f"  also    {len(also)} more of this code and cause: {names}"] if also else []
    lines += [f"  then    {followed}"] if followed else []
    return [*lines, f"  more    kvcheck explain {cause.code}"]
