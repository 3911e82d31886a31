"""Every kvcheck command in a fenced block of the documents is one that kvcheck takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rigs.blocks import Block, blocks_of, complaints_of, kvcheck_words, text_of
from test_documents import DOCUMENTS


def test_a_fence_that_is_not_closed_is_told() -> None:
    with pytest.raises(AssertionError, match="3 fences, 1 blocks"):
        blocks_of("README.md", "a\n\n```\nkvcheck stress\n```\n```\n")


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
