"""Wording: texts for counts, reasons and coverage of a record, shared by pages and terminal.

Invariants:
- A count that does not apply is left out, never 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from kvcheck.core.base.codes import CODES
from kvcheck.core.base.nouns import counted, counted_field, plural
from kvcheck.core.base.record import Coverage, Evidence, Finding, RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.server_facts import KINDS, OBSERVED, TOKEN

MARKS = {"pass": "✔", "unknown": "?", "fail": "✘"}
WORST_FIRST = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS)
UNSEEN = ("events",)
"""Counts that cannot be taken inside a server."""
LONG = 100
"""Most characters of a command that a chat or a ticket does not fold."""
LABEL = 13
"""Characters of a label with its margin: " not reached  "."""
PROSE = 16
"""Characters of the narrowest column of prose; a longer word, such as a path, stands out of its own line alone."""
PROOF = ":proof"
"""Suffix of a number: the run in the other order, which shows the harm of a missing wait."""
SMALL = ":small"
"""Suffix of a number: the smaller schedule with the same failure."""
FINDING = re.compile(rf"(?P<run>.+)[#.](?P<number>[0-9]{{1,9}})(?P<part>{PROOF}|{SMALL})?")
"""RUN#N, an argument of commands. With a dot instead of # it is the finding's id."""


def evidence_text(evidence: Evidence, but: tuple[str, ...] = ()) -> str:
    parts: list[str] = []
    rounds = rounds_word(evidence)
    unseen = UNSEEN if evidence.observed else ()
    for field in dataclasses.fields(Evidence):
        value = getattr(evidence, field.name)
        if field.name == "words_verified":
            parts += [f"{counted(sum(value.values()), 'word')} verified"] if value else []
        elif field.name == "observed":
            parts += observed_texts(value)
        elif field.name == "situations":
            parts += [counted(reached, "situation")] if (reached := sum(map(bool, value.values()))) else []
        elif value is not None and field.name not in (*but, *unseen):
            parts.append(counted_field(value, rounds if field.name == "schedules" else field.name))
    return ", ".join(parts)


def rounds_word(evidence: Evidence) -> str:
    """Schedules of a server are rounds of requests, since their order inside it is not controlled."""
    return "rounds" if evidence.observed else "schedules"


def observed_texts(observed: Mapping[str, int]) -> list[str]:
    parts = [f"{counted(observed[TOKEN], 'token')} judged"] if TOKEN in observed else []
    return parts + [f"{name} {amount(name, observed[name])}" for name in in_order(observed)]


def amount(kind: str, count: int) -> str:
    return counted(count, OBSERVED[kind].unit.removesuffix("s")) if kind in OBSERVED else f"{count:,}"


def in_order(names: Iterable[str]) -> list[str]:
    given = set(names) - {TOKEN}
    return [*(name for name in KINDS if name in given), *sorted(given - KINDS.keys())]


def why_text(row: ScenarioResult) -> str:
    known = CODES.get(row.code or "")
    named = f"{row.code} {known.title}" if known else row.code
    return ": ".join(part for part in (named, row.reason) if part)


def conditional_text(cell: str, findings: Iterable[Finding]) -> str:
    count = sum(each.condition is not None and each.cell == cell for each in findings)
    return counted(count, "conditional finding") if count else ""


def whose_text(finding: Finding) -> str:
    mine, seen = finding.request, finding.seen_request
    if seen is None:
        return ""
    reader = "a reader" if mine is None else f"request {mine}"
    if finding.code < "KV2" or finding.oracle == "content":
        return f"{reader} saw bytes of its own" if mine == seen else f"{reader} saw bytes of request {seen}"
    return f"request {mine} on both sides" if mine == seen else f"{reader}; the other is request {seen}"


def coverage_text(found: Coverage) -> str:
    """Return strategies, then settings: "tried eager, lazy, 1 of 9 delays; not tried: random"."""
    tried, left = _by_kind(sorted(found.tried, key=_is_setting)), _by_kind(sorted(found.not_tried, key=_is_setting))
    parts = [_kind_text(kind, names, len(names) + len(left.get(kind, ()))) for kind, names in tried.items()]
    never = [_kind_text(kind, names, 0) for kind, names in left.items() if kind not in tried]
    whole = f"{found.scope}; " if found.scope else ""
    return f"{whole}tried {', '.join(parts) or 'nothing'}" + (f"; not tried: {', '.join(never)}" if never else "")


def _by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind, _, value = name.partition(":")
        kinds.setdefault(kind, []).append(value)
    return kinds


def _is_setting(name: str) -> bool:
    return ":" in name and not name.startswith("delay:")


def _kind_text(kind: str, values: list[str], of: int) -> str:
    """of: number of values of the kind; 0: none was tried."""
    if values == [""]:
        return kind
    if len(values) == 1 and of <= 1:
        return f"{kind} {values[0]}"
    many = plural(2, kind)
    return f"{len(values)} of {of} {many}" if of else f"any of {len(values)} {many}"


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def aligned(rows: Sequence[Sequence[str]], *, is_right: bool = False) -> list[str]:
    """Return the rows of a table for a terminal. is_right: all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    push = str.rjust if is_right else str.ljust
    return ["  ".join((row[0].ljust(widths[0]), *map(push, row[1:], widths[1:]))).rstrip() for row in rows]


def fitted(natural: Sequence[int], narrowest: Sequence[int], width: int, gap: int = 2) -> tuple[int, ...]:
    """Return widths of columns that fit `width`: the widest one gives way first, down to its narrowest."""
    widths = [*natural]
    while sum(widths) + gap * (len(widths) - 1) > width:
        open_ones = [at for at, each in enumerate(widths) if each > narrowest[at]]
        if not open_ones:
            break
        widths[max(open_ones, key=widths.__getitem__)] -= 1
    return tuple(widths)


def folded(
    cells: Sequence[str], widths: Sequence[int], *, margin: int = 0, gap: int = 2, breaks: bool = True
) -> list[str]:
    """Return a row of a table whose cells fold at spaces; the first one's margin is kept. breaks: at hyphens too."""
    parts = [
        textwrap.wrap(
            cell,
            width,
            break_long_words=False,
            break_on_hyphens=breaks,
            subsequent_indent=" " * (len(cell) - len(cell.lstrip())),
        )
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = itertools.zip_longest(*parts, fillvalue="")
    return [" " * margin + (" " * gap).join(map(str.ljust, line, widths)).rstrip() for line in lines]


def wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False)


def labelled(label: str, text: str, width: int, most: int | None = None) -> list[str]:
    """Return a label and its wrapped text. most: lines; what is left out ends in …."""
    lines = textwrap.wrap(
        text,
        max(width, LABEL + 20),
        initial_indent=f" {label:<{LABEL - 1}} ",
        subsequent_indent=" " * (LABEL + 1),
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=most,
        placeholder=" …",
    )
    return lines or [f" {label}"]


def hanging(head: str, parts: Sequence[str], width: int, *, indent: int, between: str = "  ") -> list[str]:
    """Return `head` and the parts, each unbroken, in lines of `width`; lines after the first start at `indent`."""
    lines, line = [], head
    for part in parts:
        if len(line.rstrip()) > indent and len(line) + len(part) > width:
            lines.append(line.rstrip())
            line = " " * indent
        line += part + between
    return [*lines, line.rstrip().removesuffix(between.rstrip())]


def hung(head: str, text: str, width: int) -> list[str]:
    """Return a head and its text, folded at spaces below its own beginning."""
    more = " " * len(head)
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
    ) or [head.rstrip()]


def table_lines(rows: Sequence[Sequence[str]], width: int, *, folding: Sequence[int] = (-1,)) -> list[str]:
    """Return the rows of a table, heads first, in lines of `width`. folding: columns of prose, folded at spaces."""
    natural = [max(map(len, column)) for column in zip(*rows, strict=True)]
    narrowest = list(natural)
    for at in folding:
        narrowest[at] = min(natural[at], PROSE)
    widths = fitted(natural, narrowest, width - 1)
    return [line for row in rows for line in folded(row, widths, margin=1, breaks=False)]


def replay_line(record: RunRecord, finding: Finding) -> str:
    return shorter(finding.replay, record, finding) or record.repro


def whole_proof_line(finding: Finding) -> str:
    return str((finding.minimal or {}).get("replay", ""))


def small_line(finding: Finding) -> str:
    line = (finding.minimal or {}).get("line")
    return f"kvcheck replay {line}" if isinstance(line, str) and line else ""


def called_text(finding: Finding) -> str:
    """The functions of an installed engine that a finding is about, with the file of the last; "" for none."""
    return str((finding.minimal or {}).get("called", ""))


def wait_text(finding: Finding) -> str:
    wait = (finding.minimal or {}).get("wait")
    return wait if isinstance(wait, str) and small_line(finding) else ""


def shorter(whole: str, record: RunRecord, finding: Finding, part: str = "") -> str:
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
