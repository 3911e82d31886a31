"""The verdict on content words, on literal rows: what the oracle and the probes both call each kind of wrong row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcheck.core.base.content import POISON_HALF, POISON_WORD, RowSites, Site, Tag, word
from kvcheck.core.base.deviation import Elsewhere, Expectation, Owners, classify
from kvcheck.core.probes.frame.buffer_views import BufferView
from kvcheck.core.probes.frame.content import ProbeJudge, content

SITE = Site("token", "latent", "", 3)
STATE = Site("state", "conv", "", 1)
OWN = Expectation(request=2, author=2, position=70)
SHARED = Expectation(request=2, author=1, position=7)
VERSION = Expectation(request=2, author=2, position=69, is_state=True)
EMPTY = Expectation(request=2, author=2, position=-1, is_state=True)
POISONED = Owners(requests=9, unwritten=(POISON_WORD,))
ZEROED = Owners(requests=9, unwritten=(0,))
HALVES = Owners(requests=9, unwritten=(POISON_HALF,), positions=128)
PLACES = Elsewhere(
    rows=(RowSites(space="window", buffer="v", piece="", layers=(9,), words=4),), requests=9, positions=128
)
MEDIA = {"poisoned": POISONED, "zeroed": ZEROED, "with places": replace(POISONED, elsewhere=PLACES)}
FOREIGN_WORD = 0x0123456789ABCDEF
"""By no rule: what arithmetic or a writer without the rule leaves."""


def row(owner: int, position: int, site: Site = SITE, words: int = 4) -> list[int]:
    return [word(Tag(owner, 0, position), site, at) for at in range(words)]


def half(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


OURS, THEIRS = row(2, 70), row(5, 11)
KINDS: dict[str, tuple[list[int], Site, Expectation, tuple[str, int | None]]] = {
    "foreign": (THEIRS, SITE, OWN, ("KV102", 5)),
    "foreign in a shared prefix": (THEIRS, SITE, SHARED, ("KV102", 5)),
    "foreign state": (row(4, 69, STATE), STATE, VERSION, ("KV102", 4)),
    "own row of another position": (row(2, 69), SITE, OWN, ("KV301", 2)),
    "shared row of another position": (row(1, 6), SITE, SHARED, ("KV301", 1)),
    "the reader's own row where a prefix belongs": (row(2, 7), SITE, SHARED, ("KV301", 2)),
    "stale state": (row(2, 66, STATE), STATE, VERSION, ("KV101", 2)),
    "later state": (row(2, 70, STATE), STATE, VERSION, ("KV301", 2)),
    "own state where none is computed": (row(2, 0, STATE), STATE, EMPTY, ("KV101", 2)),
    "torn between two requests": (OURS[:2] + THEIRS[2:], SITE, OWN, ("KV103", 5)),
    "torn between two others": (row(3, 0)[:2] + THEIRS[2:], SITE, OWN, ("KV103", 3)),
    "torn between two positions": (OURS[:2] + row(2, 69)[2:], SITE, OWN, ("KV103", 2)),
    "foreign beside words by no rule": ([*THEIRS[:3], FOREIGN_WORD], SITE, OWN, ("KV103", 5)),
    "own row with one word changed": ([*OURS[:3], OURS[3] ^ 1], SITE, OWN, ("KV105", None)),
    "words by no rule": ([FOREIGN_WORD] * 4, SITE, OWN, ("KV105", None)),
    "own words permuted within the row": (OURS[::-1], SITE, OWN, ("KV105", None)),
    "own words of another buffer": (row(2, 70, replace(SITE, buffer="k")), SITE, OWN, ("KV105", None)),
    "own words of another layer": (row(2, 70, replace(SITE, layer=4)), SITE, OWN, ("KV105", None)),
    "a request that the run has not": (row(10, 70), SITE, OWN, ("KV105", None)),
    "nothing deviates but the tail": (OURS, SITE, OWN, ("KV105", None)),
    "no whole word": ([], SITE, OWN, ("KV105", None)),
}


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_row_has_one_code_in_every_medium(kind: str, medium: str) -> None:
    words, site, expected, verdict = KINDS[kind]
    found = classify(words, site, expected, MEDIA[medium])
    assert (found.code, found.owner) == verdict, found.story


@pytest.mark.parametrize(
    ("owners", "fill", "code"),
    [
        (POISONED, POISON_WORD, "KV104"),
        (POISONED, 0, "KV105"),
        (ZEROED, 0, "KV104"),
        (ZEROED, POISON_WORD, "KV105"),
        (replace(POISONED, unwritten=(POISON_WORD, 0)), 0, "KV104"),
        (replace(POISONED, unwritten=(POISON_WORD, 0)), POISON_WORD, "KV104"),
        (HALVES, POISON_HALF, "KV104"),
        (HALVES, 0, "KV105"),
    ],
)
def test_unwritten_memory_is_what_the_caller_says_it_is(owners: Owners, fill: int, code: str) -> None:
    assert classify([fill] * 4, SITE, OWN, owners).code == code
    assert classify([fill] * 4, STATE, EMPTY, owners).code == code


@pytest.mark.parametrize("owners", MEDIA.values())
def test_row_that_was_written_in_part_is_torn(owners: Owners) -> None:
    fill = owners.unwritten[0]
    found = [classify([*words[:2], fill, fill], SITE, OWN, owners) for words in (OURS, THEIRS)]
    assert [(each.code, each.owner) for each in found] == [("KV103", 2), ("KV103", 5)]


def test_odd_words_beside_own_ones_are_a_write_where_others_write() -> None:
    words = [FOREIGN_WORD, *OURS[1:]]
    assert classify(words, SITE, OWN, ZEROED).code == "KV105"
    assert classify(words, SITE, OWN, replace(ZEROED, has_others=True)).code == "KV103"


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([None, *THEIRS[1:3], None], ("KV102", 5)),
        ([None, *row(2, 69)[1:3], None], ("KV301", 2)),
        ([None, 0, 0, None], ("KV104", None)),
        ([*THEIRS[:1], None, *OURS[2:]], ("KV103", 5)),
    ],
)
def test_words_that_were_not_read_say_nothing(words: list[int | None], verdict: tuple[str, int | None]) -> None:
    found = classify(words, SITE, OWN, ZEROED)
    assert (found.code, found.owner) == verdict


@pytest.mark.parametrize(
    ("owner", "position", "verdict"), [(5, 11, ("KV102", 5)), (2, 69, ("KV301", 2)), (9, 127, ("KV102", 9))]
)
def test_half_words_are_resolved_by_tags_of_the_run(owner: int, position: int, verdict: tuple[str, int | None]) -> None:
    found = classify([*map(half, row(owner, position))], SITE, OWN, HALVES)
    assert (found.code, found.owner) == verdict
    lost = classify([*map(half, row(owner, position))], SITE, OWN, replace(HALVES, requests=1, positions=8))
    assert lost.code == "KV105"


HARMS: dict[str, tuple[Callable[[torch.Tensor], None], str, int | None]] = {
    "foreign": (lambda rows: rows.copy_(content(SITE, 5, (70, 71), 36)), "KV102", 5),
    "rows permuted": (lambda rows: rows.copy_(rows.flip(0)), "KV301", 2),
    "never written": (lambda rows: rows.zero_(), "KV104", None),  # type: ignore[arg-type,return-value]
    "the tail alone": (lambda rows: rows[:, 34].bitwise_xor_(4), "KV105", None),
}


@pytest.mark.parametrize("harm", HARMS)
def test_bytes_of_an_engine_are_judged_by_the_same_words(harm: str) -> None:
    change, code, owner = HARMS[harm]
    held = BufferView(name="latent", layer=3, unit="token", rows=content(SITE, 2, (70, 71), 36).clone())
    change(held.rows)
    judge = ProbeJudge()
    assert judge.compare(held, held.rows, request=2, positions=(70, 71), ids=(4, 5), when="read") == 0
    (finding,) = judge.findings
    assert (finding.code, finding.seen_request) == (code, owner)
    assert "2 of 2 rows are wrong" in finding.message and ", layer 3, holds " in finding.message


def test_bytes_that_do_not_count_hide_no_owner() -> None:
    rows = content(SITE, 5, (70,), 36)
    held, part = BufferView(name="latent", layer=3, unit="token", rows=rows), torch.arange(36) < 20
    judge = ProbeJudge()
    judge.compare(held, rows, request=2, positions=(70,), ids=(4,), when="read", part=part)
    judge.compare(held, rows * 0, request=2, positions=(70,), ids=(4,), when="again", part=part)
    assert [finding.code for finding in judge.findings] == ["KV102", "KV104"]
    assert judge.words == {"latent": 2 * 2}


@pytest.mark.parametrize("code", ["KV201", None])
def test_torn_row_of_a_wait_has_the_code_of_the_wait(code: str | None) -> None:
    rows = torch.cat([content(SITE, 2, (70,), 32)[:, :16], content(SITE, 5, (70,), 32)[:, 16:]], 1)
    held = BufferView(name="latent", layer=3, unit="token", rows=rows)
    judge = ProbeJudge()
    judge.compare(held, rows, request=2, positions=(70,), ids=(4,), when="read", code=code)
    assert judge.findings[0].code == (code or "KV103")
