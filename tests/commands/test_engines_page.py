"""docs/engines.md: its table of verdicts on releases is what the published records say.

Invariants:
- Every cell of the records is in exactly one row of the table, and a row has the worst verdict of its cells.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from commands.test_readme import cells_of, tables, worst

from kvcheck.core.probes.installed import ENGINES

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
ROWS = {  # what a row of the table says, and the cells that it stands for
    "index buffer of a retracted request: the pool alone": "pool-copy.nsa",
    "the same through the request": "retract.nsa",
    "metadata kept after its slot was reused": "metadata.get-buf",
    "index readers wait for their layer": "layer-wait.nsa",
    "MHA, MLA, SWA: copy, retract, waits": "pool-copy.mha pool-copy.mla pool-copy.swa "
    "retract.mha retract.mla retract.swa layer-wait.mha layer-wait.mla",
    "Mamba hybrid: copy, retract": "pool-copy.mamba retract.mamba",
    "host tier by kernel and direct copies": "host-copy.mha-kernel host-copy.mha-direct host-copy.mla-kernel "
    "host-copy.mla-direct host-copy.nsa-kernel host-copy.nsa-direct",
    "the same by copies compiled at run time: MHA": "host-copy.mha-late",
    "the same: MLA, NSA/DSA": "host-copy.mla-late host-copy.nsa-late",
    "prefill state list longer: `nsa-longer`": "state-lengths.nsa-longer",
    "the same: `swa-longer`": "state-lengths.swa-longer",
    "prefill state list shorter: `nsa-shorter`, `swa-shorter`": "state-lengths.nsa-shorter state-lengths.swa-shorter",
    "a copy of states fails: `state-failure`": "state-failure.nsa state-failure.swa",
    "ranks agree, metadata is there: `metadata`": "agreement.metadata",
    "the same where pages are late too: `everything`": "agreement.everything",
    "the same by the default route: `default-metadata`": "agreement.default-metadata",
    "moved tokens: MHA, SWA, Mamba hybrid": "token-moves.mha token-moves.swa token-moves.mamba",
    "moved tokens: MLA": "token-moves.mla",
    "moved tokens: NSA/DSA": "token-moves.nsa",
    "lists of the hybrid controller, kernel copies": "index-moves.hybrid-kernel",
    "the same, direct copies": "index-moves.hybrid-direct",
    "lists of the radix tree, both ways": "index-moves.tree-kernel index-moves.tree-direct",
    "lists of the tree of hybrid models, kernel copies": "index-moves.mamba-tree-kernel",
    "the same by them, direct copies": "index-moves.mamba-tree-direct",
    "prefix tree `radix`": "prefixes.radix",
    "prefix tree `mamba`": "prefixes.mamba",
    "prefix tree `swa`": "prefixes.swa",
    "unified tree: `unified-full`, `unified-mamba`": "prefixes.unified-full prefixes.unified-mamba",
    "unified tree: `unified-swa`": "prefixes.unified-swa",
}


def dropped_by(release: str) -> set[str]:
    """Subjects that a release has dropped on purpose, as the tables of the probes have them."""
    rows = ENGINES.load("sglang").probes
    return {f"{row.name}.{each.subject}" for row in rows for each in row.dropped if release in each.releases}


def test_the_table_of_verdicts_is_what_the_records_say() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Verdicts on releases")[2]
    head, *rows = tables(text)[""]
    cells = cells_of("sglang")
    assert [row[0] for row in rows] == [*ROWS] and head[1:] == list(dict.fromkeys(head[1:]))
    assert {*head[1:]} == {row["version"] for row in cells}
    for name, *shown in rows:
        for release, verdict in zip(head[1:], shown, strict=True):
            here = [
                (each["verdict"], each["codes"])
                for each in cells
                if each["version"] == release and each["cell"].split("/")[1] in ROWS[name].split()
            ]
            expected = "–" if ROWS[name] in dropped_by(release) else worst(here)
            assert expected == verdict, f"{name}, {release}: {here}"


def test_every_cell_of_the_records_is_in_one_row() -> None:
    named = Counter(" ".join(ROWS.values()).split())
    assert set(named.values()) == {1}
    assert {*named} == {row["cell"].split("/")[1] for row in cells_of("sglang")}
