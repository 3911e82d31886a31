"""The record as one HTML page that needs no network and no other file.

Invariants:
- The page's own policy forbids loading; its only script is allowed by hash.
- Letters and words carry the meaning. Colour only repeats it.
- Text of the record reaches the page only through autoescape; the embedded JSON holds no `<`, `>` or `&`.
- Causes are the cards of the terminal, each with its other findings folded. The embedded JSON is complete.
- A value that does not apply is "n/a", never 0.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path

from markupsafe import Markup

from kvcheck.core.base.record import RunRecord
from kvcheck.core.base.server_facts import server_of
from kvcheck.core.report import cards, one_file, prices, situation_matrix, story_text, view
from kvcheck.core.report.charts import cost_svg, curves, story_svg
from kvcheck.core.report.templates import asset, filled
from kvcheck.core.report.view import ARM_COLUMNS, server_view
from kvcheck.core.report.wording import replay_line
from kvcheck.core.run.store import write_text

PLAIN_JSON_BYTES = 100_000
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


def write(record: RunRecord, path: Path) -> None:
    write_text(one_file("html", path), render(record))


def render(record: RunRecord) -> str:
    found, cells = cards.cards_of(record.findings), view.cells_of(record)
    summary, message, command = view.headline(record, found)
    ordered, unfolded = view.in_reading_order(record, cells)
    columns, rows = view.cell_matrix(record, cells)
    encoding, embedded = _embed(record.to_json())
    script = asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    device, version = record.environment.get("device", ""), record.tool.get("version", "")
    return filled(
        "page.html.j2",
        record=record,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        script=script,
        subtitle=" · ".join(filter(None, (f"kvcheck {version}".strip(), str(device), record.run_id))),
        summary=summary,
        message=message,
        command=command,
        counts=view.counts_of(record),
        server=server_view(record),
        arm_columns=ARM_COLUMNS,
        situations=situation_matrix.situation_view(record),
        cells=cells,
        matrix_columns=columns,
        matrix_rows=rows if len(cells) > 1 and not record.bench else {},
        families=view.families_of(record),
        open_cells=ordered[:unfolded],
        folded_cells=ordered[unfolded:],
        causes=[_cause(record, each) for each in found if not each.is_conditional],
        conditional=[
            (cards.condition_text(each), replay_line(record, each.finding)) for each in found if each.is_conditional
        ],
        copied=cards.COPIED,
        letter=_letter,
        legend=", ".join(f"{letter} {word}" for letter, word in LETTERS.values()),
        suspects_of=view.suspects_of,
        story=story_text,
        story_svg=lambda story: Markup(story_svg(story)),
        words=sorted(record.evidence.words_verified.items(), key=lambda item: (-item[1], item[0])),
        oracles=view.oracles_of(record.mutants),
        mark_of=view.mark_of,
        prices=_prices(record),
        environment=_environment(record),
        plan=view.run_facts(record),
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


def _cause(record: RunRecord, card: cards.Card) -> dict[str, object]:
    """Return a card with its facts, and its maps if they have more than the one place that the facts name."""
    maps = view.maps_of([card.finding, *card.others])
    is_one = sum(len(each.codes) for each in maps) == 1
    return {"card": card, "facts": cards.facts_of(card, record), "maps": [] if is_one else maps}


def _letter(code: str) -> str:
    return next(letter for prefix, (letter, _) in LETTERS.items() if code.startswith(prefix))


def _environment(record: RunRecord) -> dict[str, object]:
    left_out = () if server_of(record) is None else ("server",)
    return {**record.tool, **{name: value for name, value in record.environment.items() if name not in left_out}}


def _prices(record: RunRecord) -> dict[str, object] | None:
    rows = record.bench
    if not rows:
        return None
    priced = [row for row in rows if not prices.is_check(row)]
    by_case = {case: [row for row in priced if row.case == case] for case in dict.fromkeys(row.case for row in priced)}
    drawn = {case: Markup(cost_svg(each)) for case, each in by_case.items()}
    steps = prices.decode_steps(rows)
    return {
        "steps": {where: prices.time_text(step) for where, step in steps.items()},
        "of_servers": all(prices.kind_of(row.case) == prices.SERVER for row in rows),
        "axis": prices.ratio_axis(row.ratio for row in prices.largest(priced)),
        "shares": prices.SHARES if steps else None,
        "kind_of": prices.kind_of,
        "largest": prices.prices_by_case(prices.largest(rows), rows),
        "every": prices.prices_by_case(rows, rows),
        "curves": curves(priced),
        "panels": {case: drawing for case, drawing in drawn.items() if drawing},
    }
