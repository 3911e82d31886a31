"""Every fenced block of the documents has a row that says which test runs it, compares it, or why it is only parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs.block_rows import BUGS_RUN, GPU, REGISTER, By, Parsed, Row
from rigs.blocks import PROJECT, Block, blocks_of, complaints_of, kvcheck_words, text_of
from test_documents import DOCUMENTS


def row_of(block: Block, rows: dict[str, Row]) -> list[str]:
    """The rows of a block. A block that begins as another does has the longer beginning."""
    return [start for start in rows if block.first.startswith(start)]


def complaints(document: str, text: str, rows: dict[str, Row]) -> list[str]:
    """Blocks without exactly one row, and rows without a block."""
    blocks = blocks_of(document, text)
    found = [
        f"{document}:{block.line}: {len(row_of(block, rows))} rows of REGISTER begin as the block {block.first!r}"
        for block in blocks
        if len(row_of(block, rows)) != 1
    ]
    for start in rows:
        many = sum(block.first.startswith(start) for block in blocks)
        found += [] if many else [f"{document}: no block begins with {start!r}"]
    return found


def test_every_block_has_its_row_and_every_row_its_block() -> None:
    assert {*REGISTER} <= {*DOCUMENTS}
    told = [each for name in DOCUMENTS for each in complaints(name, text_of(name), REGISTER.get(name, {}))]
    assert not told, "\n".join(told)


def test_a_block_without_a_row_and_a_row_without_a_block_are_told() -> None:
    page = "a\n\n```\nkvcheck stress\n```\n"
    (told,) = complaints("README.md", page, {})
    assert told == "README.md:3: 0 rows of REGISTER begin as the block 'kvcheck stress'"
    assert len(complaints("README.md", page, {"kvcheck": Parsed(GPU), "kvcheck stress": Parsed(GPU)})) == 1
    (told,) = complaints("README.md", page, {"kvcheck stress": Parsed(GPU), "pip": Parsed(GPU)})
    assert told == "README.md: no block begins with 'pip'"
    with pytest.raises(AssertionError, match="3 fences, 1 blocks"):
        blocks_of("README.md", f"{page}```\n")


def functions_of(path: Path) -> set[str]:
    """Names of the functions of a module."""
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def no_test(document: str, row: Row) -> str:
    """Why the test that a row names cannot judge the document; empty for one that can."""
    if not isinstance(row, By):
        return ""
    name, _, function = row.test.partition("::")
    path = PROJECT / "tests" / name
    if not path.is_file() or function not in functions_of(path):
        return f"{document}: there is no test {row.test}"
    is_named = Path(document).name in path.read_text(encoding="utf-8")
    return "" if is_named else f"{document}: {name} does not name this document"


def test_a_test_that_judges_a_block_exists_and_reads_the_document() -> None:
    told = [no_test(document, row) for document, rows in REGISTER.items() for row in rows.values()]
    assert not [each for each in told if each]
    assert no_test("README.md", By("commands/test_readme.py::test_nothing")).endswith("::test_nothing")
    assert "does not name" in no_test("docs/words.md", By(BUGS_RUN))


def commands_of(blocks: list[Block]) -> Iterator[tuple[Block, list[str]]]:
    """The kvcheck commands in blocks of no language or of a shell."""
    for block in blocks:
        for line in block.commands if block.language in ("", "sh") else ():
            if (words := kvcheck_words(line)) is not None:
                yield block, words


def test_every_command_in_a_block_is_one_that_kvcheck_takes() -> None:
    found = [pair for name in DOCUMENTS for pair in commands_of(blocks_of(name, text_of(name)))]
    told = [f"{block.document}:{block.line}: {each}" for block, words in found for each in complaints_of(words)]
    assert not told, "\n".join(told)
    assert len(found) > 60


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("kvcheck stres", "no command 'stres'"),
        ("kvcheck stress --sed 1", "No such option: --sed"),
        ("kvcheck gate --budget b.toml", "Missing argument"),
        ("kvcheck stress hicach --seed 1", "no scenario 'hicach'"),
        ("kvcheck stress --mutant no-such", "no mutant 'no-such'"),
        ("X=1 python -m kvcheck probe sglang:DIR --probe retrac.nsa", "no probe 'retrac.nsa'"),
        ("kvcheck live http://127.0.0.1:1 retract", "no scenario 'retract'"),
        ("kvcheck bench serve --versus http://127.0.0.1:1", "Missing argument 'URL'"),
    ],
)
def test_a_command_that_kvcheck_does_not_take_is_told(line: str, complaint: str) -> None:
    words = kvcheck_words(line)
    assert words is not None
    (told,) = complaints_of(words)
    assert complaint in told


@pytest.mark.parametrize("line", ["pip install kvcheck", "git kvcheck", "kvchecks stress", "# kvcheck x"])
def test_a_line_of_another_program_is_none_of_kvchecks(line: str) -> None:
    assert kvcheck_words(line) is None
