"""Troubles as markdown: a heading with code, title and cell, the message, its counts, the replay line."""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.base.nouns import counted
from kvcheck.core.report.ci.trouble import Kind, Trouble
from kvcheck.core.report.markdown import code_block, code_span, escaped

MOST_SHOWN = 100
WORDS = {Kind.GAP: " (unknown: no pass)", Kind.CONDITIONAL: " (changes no verdict)"}


def trouble_lines(troubles: Sequence[Trouble], runs: Sequence[str | None] = ()) -> list[str]:
    """Return a section for each trouble. runs: the run of each, if there are several."""
    lines: list[str] = []
    for number, trouble in enumerate(troubles[:MOST_SHOWN], 1):
        run = [f"Run {code_span(name)}."] if runs and (name := runs[number - 1]) else []
        lines += [
            f"#### {number}. {escaped(trouble.head)}: {code_span(trouble.where)}{WORDS.get(trouble.kind, '')}",
            "",
            *(line for text in (*_texts(trouble), *run) for line in (text, "")),
        ]
        if trouble.replay:
            lines += [*code_block([trouble.replay]), ""]
    if len(troubles) > MOST_SHOWN:
        lines += [f"and {counted(len(troubles) - MOST_SHOWN, 'more cause')} in the record", ""]
    return lines


def _texts(trouble: Trouble) -> list[str]:
    texts = [escaped(trouble.message)]
    texts += [f"Only if {escaped(trouble.condition)}."] if trouble.condition else []
    texts += [f"Seen {escaped(trouble.seen)}."] if trouble.seen else []
    texts += [f"In a baseline: {escaped(trouble.named)}."] if trouble.named else []
    return texts
