"""The record as one HTML page that needs no network and no other file.

Invariants:
- The page's own policy forbids loading; its only script is allowed by hash.
- Letters and words carry the meaning. Colour only repeats it.
- Text of the record reaches the page only through autoescape; the embedded JSON holds no `<`, `>` or `&`.
- A card is a cause, with its symptoms and repetitions folded. Only the first are shown; the embedded JSON is complete.
- A value that does not apply is "n/a", never 0. No control character of the record is in the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from kvcheck.core.base.causes import Bug, bugs
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted, plural
from kvcheck.core.base.record import Finding, Identity, MutantResult, RunRecord, Verdict, to_plain
from kvcheck.core.base.server_facts import TOKEN, server_of
from kvcheck.core.report.cell_matrix import cells_section, judged_text
from kvcheck.core.report.charts import words_svg
from kvcheck.core.report.price_section import price_section
from kvcheck.core.report.prices import in_short
from kvcheck.core.report.server_section import server_section
from kvcheck.core.report.situation_matrix import matrix_section
from kvcheck.core.report.story_drawing import story_svg
from kvcheck.core.report.story_text import lane_letter, lanes_of, step_text, waits_text
from kvcheck.core.report.templates import template
from kvcheck.core.report.wording import (
    LONG,
    MARKS,
    WORST_FIRST,
    asset,
    clip,
    evidence_text,
    replay_line,
    seen_text,
    small_line,
    visible,
    wait_text,
    whose_text,
    why_text,
)
from kvcheck.core.run.store import write_text

MOST_SUSPECTS = 12
MOST_LAYERS = 192
MOST_POSITIONS = 1 << 24
WHY_CHARS = 300
CAUSES_SHOWN = 100
SYMPTOMS_SHOWN = 40
MESSAGE_CHARS = 2000
OTHER_CHARS = 400
MAP_AXIS = 48
PLAIN_JSON_BYTES = 100_000
ANY = "any"
KNOWN_ANSWERS = "known-answers"
"""The oracle of running servers. Its findings name pages and positions of a request."""
FOUND = {"killed": "K", "reproduced": "K"}
"""Marks in the matrix for a mutant that its own oracle found, by outcome."""
LACKING = {"survived": "missed", "killed-by-other": "missed", "not-begun": "not run"}
"""Marks for a mutant that its own oracle did not find, by outcome; other outcomes are not judged."""
# One letter per kind of finding, for the layer x page maps. The first prefix that fits counts.
LETTERS = {
    "KV101": ("S", "stale"),
    "KV102": ("F", "foreign"),
    "KV103": ("T", "torn"),
    "KV104": ("N", "never written"),
    "KV105": ("B", "bit difference"),
    "KV106": ("M", "misplaced"),
    "KV2": ("O", "ordering"),
    "KV3": ("C", "contract"),
    "KV4": ("A", "accounting"),
    "KV5": ("X", "output"),
    "KV6": ("P", "protocol"),
    "KV7": ("L", "caching"),
    "": ("H", "hang, crash or other"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """read: position read by the wrong step in that layer, if known."""

    where: str
    read: str
    why: str


def suspects_of(minimal: Mapping[str, object] | None) -> tuple[list[Suspect], int]:
    """Return the first MOST_SUSPECTS rows of a finding and the number of others."""
    if minimal is None or minimal.get("test") not in ("walk", "position"):
        return [], 0
    given, wrong = minimal.get("suspects"), minimal.get("wrong")
    reads = wrong if isinstance(wrong, list) else []
    rows = [found for row in (given if isinstance(given, list) else []) if (found := _suspect(row, reads)) is not None]
    return rows[:MOST_SUSPECTS], max(0, len(rows) - MOST_SUSPECTS)


def _suspect(row: object, reads: list[object]) -> Suspect | None:
    if not isinstance(row, dict):
        return None
    layer, page, head = _number(row.get("layer"), MOST_LAYERS - 1), _number(row.get("page")), _number(row.get("head"))
    first, last = _number(row.get("first")), _number(row.get("last"))
    if layer is None or page is None or first is None or last is None or last < first:
        return None
    read, why = _number(reads[layer]) if layer < len(reads) else None, row.get("why")
    of_head = "" if head is None else f", KV head {head}"
    return Suspect(
        where=f"layer {layer}{of_head}, page {page} (positions {first:,} to {last:,})",
        read="n/a" if read is None else f"{read:,}",
        why=clip(why, WHY_CHARS) if isinstance(why, str) else "",
    )


def _number(value: object, most: int = MOST_POSITIONS) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None


def write(record: RunRecord, path: Path) -> None:
    write_text(path / "report.html" if path.is_dir() else path, render(record))


def render(record: RunRecord) -> str:
    found = bugs(record.findings)
    shown = found[:CAUSES_SHOWN]
    maps = _maps(record.findings)
    encoding, embedded = _embed(record.to_json())
    words = sorted(record.evidence.words_verified.items(), key=lambda item: (-item[1], item[0]))
    style, script = asset("page.css"), asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template("page.html.j2", visible).render(
        record=record,
        verdict=record.verdict.value,
        marks=MARKS,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=Markup(style),
        script=Markup(script),
        subtitle=_subtitle(record),
        banner=_banner(record, found),
        counts=_counts(record, len(found)),
        server=server_section(record),
        situations=matrix_section(record),
        cells=cells_section(record),
        findings=_cards(shown, record),
        total=f"{len(found):,}",
        left_out=f"{len(found) - len(shown):,}" if len(found) > len(shown) else "",
        maps=maps,
        legend=", ".join(f"{letter} {word}" for letter, word in LETTERS.values()),
        words=[{"label": name, "value": f"{count:,}"} for name, count in words],
        chart=Markup(words_svg(record.evidence.words_verified)),
        mutants=_mutants(record),
        prices=price_section(record.bench),
        facts=[table for table in _facts_tables(record) if table["rows"]],
        encoding=encoding,
        embedded=Markup(embedded),
    )


def _embed(text: str) -> tuple[str, str]:
    """Return (encoding, text): JSON without markup characters, or gzip if it is long."""
    compact = json.dumps(json.loads(text), ensure_ascii=True, separators=(",", ":"))
    if len(compact) > PLAIN_JSON_BYTES:
        return "gzip", base64.b64encode(gzip.compress(compact.encode(), mtime=0)).decode()
    for letter in "<>&":
        compact = compact.replace(letter, f"\\u{ord(letter):04x}")
    return "json", compact


def _subtitle(record: RunRecord) -> str:
    parts = [
        f"kvcheck {record.tool.get('version', '')}".strip(),
        str(record.environment.get("device", "")),
        record.run_id,
    ]
    return " · ".join(part for part in parts if part)


def _banner(record: RunRecord, found: tuple[Bug, ...]) -> dict[str, str]:
    failing = [row for row in record.mutants if row.verdict is Verdict.FAIL]
    conditional = sum(bug.cause.condition is not None for bug in found)
    if len(found) > conditional or (found and record.verdict is Verdict.FAIL):
        worst = found[0].cause
        known = CODES.get(worst.code)
        title = f" {known.title}" if known else ""
        return {
            "summary": _causes_text(found, conditional),
            "message": clip(f"{worst.code}{title}: {worst.message}", 400),
            "command": replay_line(record, worst),
        }
    if failing:
        row = failing[0]
        message = f"{row.name}: {row.outcome}{f'; {row.message}' if row.message else ''}"
        summary = f"{len(failing)} of {counted(len(record.mutants), 'mutant')} not found as expected"
        return {"summary": summary, "message": clip(message, 400), "command": row.replay or record.repro}
    if record.bench and record.verdict is Verdict.PASS:
        return {"summary": "price list", "message": clip(in_short(record.bench), 600), "command": record.repro}
    if record.verdict is Verdict.PASS:
        summary = _causes_text(found, conditional) if conditional else "no finding"
        return {"summary": summary, "message": f"Judged: {_judged(record)}.", "command": record.repro}
    return {"summary": "not judged", "message": clip(_why_not(record), 400), "command": record.repro}


def _judged(record: RunRecord) -> str:
    if server_of(record) is None and record.scenarios:
        return judged_text(record)
    if record.mutants:
        found = sum(row.verdict is Verdict.PASS for row in record.mutants)
        return f"{counted(len(record.mutants), 'mutant')}, {found} found by the oracle that has to find it"
    return evidence_text(record.evidence) or "nothing counted"


def _causes_text(found: tuple[Bug, ...], conditional: int) -> str:
    number = len(found)
    noun = "cause" if any(len(bug.findings) > 1 for bug in found) else "finding"
    if number == conditional:
        return f"{number:,} conditional {plural(number, noun)}"
    return counted(number, noun) + (f", {conditional:,} of them conditional" if conditional else "")


def _why_not(record: RunRecord) -> str:
    """Why a run without findings did not pass."""
    for verdict in (Verdict.FAIL, Verdict.UNKNOWN):
        for row in record.scenarios:
            if row.verdict is verdict:
                return f"{row.id}: {why_text(row) or 'no reason was recorded'}"
        for mutant in record.mutants:
            if mutant.verdict is verdict:
                return f"{mutant.name}: {mutant.outcome}; {mutant.message or 'no reason was recorded'}"
    if record.warnings:
        return record.warnings[0]
    return "No scenario ran, so nothing was judged. This is not a pass."


def _counts(record: RunRecord, causes: int) -> list[dict[str, str]]:
    noun = "cell" if server_of(record) is None else "scenario"
    by_verdict = {verdict: sum(row.verdict is verdict for row in record.scenarios) for verdict in WORST_FIRST}
    pairs: list[tuple[str, int]] = [
        *([(plural(causes, "cause"), causes)] if causes < len(record.findings) else []),
        (plural(len(record.findings), "finding"), len(record.findings)),
        *((f"{plural(count, noun)} {verdict.value.upper()}", count) for verdict, count in by_verdict.items() if count),
    ]
    if record.mutants:
        killed = sum(row.verdict is Verdict.PASS for row in record.mutants)
        pairs.append((f"of {counted(len(record.mutants), 'mutant')} found as expected", killed))
    if server_of(record) is not None:
        done = record.evidence
        pairs += [(plural(done.schedules, "round"), done.schedules), (plural(done.requests, "request"), done.requests)]
        tokens = done.observed.get(TOKEN, 0)
        pairs.append((f"{plural(tokens, 'token')} judged", tokens))
    else:
        done = record.evidence
        named = ("schedule", done.schedules), ("event", done.events)
        pairs += [(plural(count, noun_of), count) for noun_of, count in named if count]
    if record.evidence.words_verified:
        words = sum(record.evidence.words_verified.values())
        pairs.append((f"{plural(words, 'word')} verified", words))
    return [{"label": label, "value": f"{value:,}"} for label, value in pairs]


def _cards(found: tuple[Bug, ...], record: RunRecord) -> list[dict[str, object]]:
    taken: set[str] = set()
    cards: list[dict[str, object]] = []
    for number, bug in enumerate(found, start=1):
        finding = bug.cause
        known = CODES.get(finding.code)
        anchor = re.sub(r"[^A-Za-z0-9._-]", "-", finding.id) or f"finding-{number}"
        if anchor in taken:
            anchor = f"{anchor}-{number}"
        taken.add(anchor)
        suspects, left_out = suspects_of(finding.minimal)
        others = [each for each in bug.findings if each is not finding]
        cards.append(
            {
                "anchor": anchor,
                "id": finding.id or str(number),
                "code": finding.code,
                "title": known.title if known else "unknown code",
                "meaning": known.meaning if known else "This version does not know the code.",
                "scenario": " · ".join(part for part in (finding.scenario, finding.shape) if part),
                "message": clip(finding.message, MESSAGE_CHARS),
                "condition": clip(finding.condition or "", MESSAGE_CHARS),
                "where": _where(finding),
                "whose": whose_text(finding),
                "seen": seen_text(bug) if others else "",
                "others": [*map(_other, others[:SYMPTOMS_SHOWN])],
                "others_left_out": len(others[SYMPTOMS_SHOWN:]),
                "oracle": finding.oracle,
                "suspects": suspects,
                "left_out": left_out,
                "story": _story(finding),
                "replay": (command := replay_line(record, finding)),
                "small": clip(small_line(finding), MESSAGE_CHARS),
                "wait": clip(wait_text(finding), MESSAGE_CHARS),
                "whole": finding.replay if finding.replay and finding.replay != command else "",
                "minimal": clip(json.dumps(finding.minimal, indent=1, ensure_ascii=False), MESSAGE_CHARS)
                if finding.minimal
                else "",
            }
        )
    return cards


def _story(finding: Finding) -> dict[str, object]:
    story = finding.story
    if story is None or story.untold is not None:
        return {} if story is None else {"untold": story.untold}
    rows = [
        {"lane": step.lane, "text": step_text(step), "waits": waits_text(story, at), "is_wrong": step.is_wrong}
        for at, step in enumerate(story.steps)
    ]
    return {
        "untold": "",
        "about": story.about,
        "drawing": story_svg(story),
        "lanes": [f"{lane_letter(at)} {lane}" for at, lane in enumerate(lanes_of(story))],
        "steps": rows,
        "history": story.history,
        "row": story.row,
        "words": [to_plain(word) for word in story.words],
    }


def _other(finding: Finding) -> dict[str, str]:
    return {
        "id": finding.id,
        "code": finding.code,
        "cell": finding.cell,
        "oracle": finding.oracle,
        "message": clip(finding.message, OTHER_CHARS),
    }


def _where(finding: Finding) -> str:
    names = ("tier", "buffer", "layer", "page", "row", "lane")
    in_request = {"page": "page of the request:", "row": "position"} if finding.oracle == KNOWN_ANSWERS else {}
    parts = [
        f"{in_request.get(name, name)} {getattr(finding, name)}" for name in names if getattr(finding, name) is not None
    ]
    return " · ".join(parts) or "n/a (names no single place)"


def _letter(code: str) -> str:
    return next(letter for prefix, (letter, _) in LETTERS.items() if code.startswith(prefix))


def _maps(findings: tuple[Finding, ...]) -> list[dict[str, object]]:
    """One layer x page map per buffer with a located finding."""
    # Codes by buffer and (layer, page); None: the finding names no layer or page.
    placed: dict[str, dict[tuple[int | None, int | None], list[str]]] = {}
    for finding in findings:
        if finding.buffer is not None and (finding.layer is not None or finding.page is not None):
            cells = placed.setdefault(finding.buffer, {})
            cells.setdefault((finding.layer, finding.page), []).append(finding.code)
    maps: list[dict[str, object]] = []
    for buffer, cells in sorted(placed.items()):
        layers, more_layers = _axis(layer for layer, _ in cells)
        pages, more_pages = _axis(page for _, page in cells)
        left = [f"{count:,} more {word}" for count, word in ((more_layers, "layers"), (more_pages, "pages")) if count]
        maps.append(
            {
                "buffer": buffer,
                "more": f" ({' and '.join(left)} not drawn)" if left else "",
                "pages": [ANY if page is None else page for page in pages],
                "rows": [
                    {
                        "layer": ANY if layer is None else layer,
                        "cells": [_cell(cells.get((layer, page)), layer=layer, page=page) for page in pages],
                    }
                    for layer in layers
                ],
            }
        )
    return maps


def _axis(values: Iterable[int | None]) -> tuple[list[int | None], int]:
    found = sorted(set(values), key=lambda value: (value is None, value or 0))
    return found[:MAP_AXIS], max(0, len(found) - MAP_AXIS)


def _cell(codes: list[str] | None, *, layer: int | None, page: int | None) -> dict[str, object] | None:
    if not codes:
        return None
    counted = ", ".join(f"{code} x{codes.count(code)}" for code in sorted(set(codes)))
    place = f"layer {ANY if layer is None else layer}, page {ANY if page is None else page}"
    return {"letter": _letter(min(codes)), "count": len(codes), "title": f"{place}: {counted}"}


def _mutants(record: RunRecord) -> dict[str, object]:
    """The detection matrix: mutants by the oracles that should find them or did."""
    found = {row.name: _found_by(row) for row in record.mutants}
    oracles = sorted({name for row in record.mutants for name in (row.killer, found[row.name]) if name})
    rows: list[dict[str, object]] = []
    for row in sorted(record.mutants, key=lambda row: WORST_FIRST.index(row.verdict)):
        cells = [
            FOUND.get(row.outcome, "other code")
            if name == found[row.name] == row.killer
            else "K"
            if name == found[row.name]
            else LACKING.get(row.outcome, "not judged")
            if name == row.killer
            else ""
            for name in oracles
        ]
        plain = {"name": row.name, "bug": row.bug, "outcome": row.outcome, "message": row.message, "replay": row.replay}
        rows.append(
            {
                **plain,
                "verdict": row.verdict.value,
                "cells": cells,
                "schedules": f"{row.schedules:,}",
                "is_long": len(row.replay or "") > LONG,
            }
        )
    return {"oracles": oracles, "rows": rows}


def _found_by(row: MutantResult) -> str | None:
    """The oracle that found the mutant, without the code. On a device the delays find it."""
    return row.killer if row.outcome in FOUND else (row.killed_by or "").partition(" ")[0] or None


def _environment(record: RunRecord) -> dict[str, object]:
    left_out = () if server_of(record) is None else ("server",)
    return {**record.tool, **{name: value for name, value in record.environment.items() if name not in left_out}}


def _run_facts(record: RunRecord) -> dict[str, object]:
    identity = record.identity or Identity()
    return {
        "run": record.run_id,
        "code of kvcheck": short(identity.code),
        "content of the trace": short(identity.trace),
        "engine": short(identity.target),
        "command": " ".join(record.argv),
        "repeat with": record.repro,
        "seed": record.seed,
        "started": record.started_at,
        "duration": f"{record.duration_s:.1f} s",
        "exit code": record.exit_code,
    }


def _facts_tables(record: RunRecord) -> list[dict[str, object]]:
    return [
        {"id": "environment", "title": "Environment", "rows": _facts(_environment(record))},
        {"id": "plan", "title": "Plan", "rows": _facts({**_run_facts(record), **record.plan})},
    ]


def _facts(values: Mapping[str, object]) -> list[dict[str, str]]:
    return [{"label": str(label), "value": _plain(value)} for label, value in values.items()]


def _plain(value: object) -> str:
    if value is None:
        return "n/a"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
