"""The content oracle on literal histories: whose the bytes were, from when, from where, or from nowhere.

Words are made by the content rule for the owner that the finding must name. All kinds of rows are in test_classify.py
and test_deviation_elsewhere.py of tests/base.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcheck.core.base import content
from kvcheck.core.base.content import RowSites, Site, Tag
from kvcheck.core.cache.events import RoomMarked
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.content import ContentOracle
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.workload.events import (
    Event,
    Expected,
    Forward,
    Leased,
    Padding,
    RoomDrained,
    Saw,
    SitesKnown,
    Verified,
)
from kvcheck.core.stress.workload.mismatch import Mismatch

LATENT = Site("full", "latent", "", 3)
HEAD = replace(LATENT, buffer="k")
NEXT_LAYER = replace(LATENT, layer=4)
KEY = Site("full", "index_k_with_scale", "key", 3)
SCALE = replace(KEY, piece="scale")
STATE = Site("state", "conv", "", 1)
TOPK = Site("metadata", "metadata.output_topk_p", "output_topk_p", 0)
POISON = -0x5A5A5A5A5A5A5A5B
"""0xA5A5A5A5A5A5A5A5, signed."""


def row(owner: int, position: int, site: Site = LATENT, words: int = 4) -> tuple[int, ...]:
    """A row of 64-bit words written for somebody."""
    return tuple(content.word(Tag(owner, 0, position), site, at) for at in range(words))


def halves(*words: int) -> tuple[int, ...]:
    """The low half of each word as a signed 32-bit number."""
    return tuple(((word & 0xFFFFFFFF) ^ 1 << 31) - (1 << 31) for word in words)


def saw(site: Site, words: tuple[int, ...], *, author: int = 2, position: int = 70, count: int = 1) -> Saw:
    """Request 2 read token 70 in row 6 of page 9."""
    where = {"space": site.space, "buffer": site.buffer, "piece": site.piece, "layer": site.layer, "page": 9, "row": 6}
    given = {"position": position, "author": author, "words": words, "half": site == SCALE, "count": count}
    return Saw(Mismatch(request=2, **where, **given))  # type: ignore[arg-type]


FOREIGN = saw(LATENT, row(5, 11))
FOREIGN_HALF = saw(SCALE, halves(*row(5, 11, SCALE, 1)))
OTHER_POSITION = saw(LATENT, row(2, 69))
OTHER_BUFFER = saw(LATENT, row(2, 70, HEAD))
OTHER_LAYER = saw(LATENT, row(2, 70, NEXT_LAYER))
NEVER_WRITTEN = saw(LATENT, (POISON,) * 4)
NOBODY = saw(LATENT, (0,) * 4)
STALE_STATE = saw(STATE, row(2, 66, STATE), position=69)
FOREIGN_STATE = saw(STATE, row(4, 69, STATE), position=69)
FOREIGN_METADATA = saw(TOPK, row(4, 0, TOPK), position=0)
LEASED_FULL = Leased(2, "prefill", 3, (("output_topk_p", row(4, 0, TOPK)), ("bootstrap_room", (4, 0))))
RUN: tuple[Event, ...] = (Expected(5, ()), Verified("latent", 4))
SITES = SitesKnown(
    (
        RowSites(space="full", buffer="latent", piece="", layers=(3, 4), words=4),
        RowSites(space="full", buffer="k", piece="", layers=(3, 4), words=4, heads=2),
        RowSites(space="full", buffer="index_k_with_scale", piece="scale", layers=(3, 4), words=2, is_half=True),
        RowSites(space="metadata", buffer=TOPK.buffer, piece=TOPK.piece, layers=(0,), words=8),
    )
)

CASES: dict[str, tuple[str, int | None, str, Saw]] = {  # code, owner and words of the message
    "foreign": ("KV102", 5, "request 5's bytes (its position 11)", FOREIGN),
    "foreign, 32 bits": ("KV102", 5, "request 5's bytes (its position 11)", FOREIGN_HALF),
    "its own, elsewhere": ("KV301", 2, "position 69", OTHER_POSITION),
    "the prefix, elsewhere": ("KV301", 1, "position 6", saw(LATENT, row(1, 6), author=1, position=7)),
    "torn": ("KV103", 5, "request 2 (position 70) and request 5", saw(LATENT, row(2, 70)[:2] + row(5, 11)[2:])),
    "prefix torn": (
        "KV103",
        5,
        "request 1 (position 7) and request 5 (position 11);",
        saw(LATENT, row(1, 7)[:2] + row(5, 11)[2:], author=1, position=7),
    ),
    "half written": ("KV103", 2, "and 2 words of nobody;", saw(LATENT, (*row(2, 70)[:2], POISON, POISON))),
    "never written": ("KV104", None, "never written", NEVER_WRITTEN),
    "never written, 32 bits": ("KV104", None, "never written", saw(SCALE, halves(POISON))),
    "nobody's": ("KV105", None, "words that nobody writes there", NOBODY),
    "nobody's, 32 bits": ("KV105", None, "words that nobody writes there", saw(SCALE, (0,))),
    "right in another buffer": ("KV105", None, "words that nobody writes there", OTHER_BUFFER),
    "stale state": ("KV101", 2, "its own state as of token 66", STALE_STATE),
    "foreign state": ("KV102", 4, "request 4's bytes (its position 69)", FOREIGN_STATE),
    "another's at first": ("KV102", 4, "expected an empty state", saw(STATE, row(4, 69, STATE), position=-1)),
    "its own at first": ("KV101", 2, "expected an empty state", saw(STATE, row(2, 69, STATE), position=-1)),
    "unwritten at first": ("KV104", None, "expected an empty state", saw(STATE, (POISON,) * 4, position=-1)),
    "metadata": ("KV102", 4, "expected what its own prefill handed over", FOREIGN_METADATA),
    "more rows": ("KV102", 5, "(and 2 more rows)", saw(LATENT, row(5, 11), count=3)),
    "expected of a prefix": (
        "KV102",
        5,
        "expected the shared prefix's (written by request 1) position 7",
        saw(SCALE, halves(*row(5, 11, SCALE, 1)), author=1, position=7),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_deviating_row_names_code_owner_and_place(name: str) -> None:
    code, owner, words, event = CASES[name]
    (finding,) = judge(ContentOracle(), History.of(*RUN, event))
    site = event.mismatch
    place = (None, None, None) if site.space == "metadata" else (site.layer, 9, 6)
    assert (finding.code, finding.request, finding.seen_request, finding.buffer) == (code, 2, owner, site.buffer)
    assert (finding.layer, finding.page, finding.row) == place
    assert (finding.oracle, finding.tier) == ("content", "device")
    assert words in finding.message and "request 2 read" in finding.message


def test_words_that_were_read_and_equal_are_judged_and_green() -> None:
    oracle = ContentOracle()
    events = (Verified("latent", 128), Verified("k", 4), Leased(2, "prefill", 3, ()))
    assert judge(oracle, History.of(*events)) == ()
    assert oracle.judged == 133, "a lease is one judgement, as a word is"


@pytest.mark.parametrize(
    ("event", "owner", "story"),
    [
        (OTHER_BUFFER, 2, "the words of buffer k of request 2, position 70"),
        (OTHER_LAYER, 2, "the words of layer 4 of request 2, position 70"),
        (saw(HEAD, row(1, 0, HEAD)[2:]), 1, "the words of head 1 of request 1, position 0"),
        (saw(SCALE, halves(*row(2, 9, replace(SCALE, layer=4), 2))), 2, "the words of layer 4 of request 2"),
    ],
)
def test_words_of_another_place_are_named_by_it_where_the_history_has_the_places(
    event: Saw, owner: int, story: str
) -> None:
    (finding,) = judge(ContentOracle(), History.of(SITES, *RUN, event))
    assert (finding.code, finding.seen_request) == ("KV106", owner)
    assert story in finding.message
    (alone,) = judge(ContentOracle(), History.of(*RUN, event))
    assert (alone.code, alone.seen_request) == ("KV105", None), "a stored history without places is judged as before"


def test_a_position_is_known_once_it_was_computed() -> None:
    codes = [
        found.code
        for begun in ((), (Forward(2, 0, 5001),))
        for found in judge(ContentOracle(), History.of(SITES, *RUN, *begun, saw(LATENT, row(2, 5000, NEXT_LAYER))))
    ]
    assert codes == ["KV105", "KV106"]


# Rooms

MARK = content.word(Tag(77, 1, 3), LATENT, 9)
"""A word by which a receiver says that nobody has written: any word at all."""
MARKED = saw(LATENT, (MARK,) * 4)
HALF_MARKED = saw(LATENT, (*row(2, 70)[:2], MARK, MARK))


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (MARKED, "KV104"),
        (saw(SCALE, halves(MARK, MARK >> 32)), "KV104"),
        (HALF_MARKED, "KV103"),
        (saw(TOPK, (MARK,) * 4, position=0), "KV104"),
    ],
)
def test_what_a_room_was_marked_with_was_never_written(event: Saw, code: str) -> None:
    (finding,) = judge(ContentOracle(), History.of(*RUN, RoomMarked("decode-0", MARK), event))
    (unmarked,) = judge(ContentOracle(), History.of(*RUN, event))
    assert (finding.code, unmarked.code) == (code, "KV105")


def drained(*rows: Saw) -> RoomDrained:
    return RoomDrained("decode-1", 2, 640, tuple(each.mismatch for each in rows))


def test_a_room_that_failed_may_be_half_written() -> None:
    """Its memory was marked, and belongs to it until its sources have stopped."""
    oracle = ContentOracle()
    legal = drained(MARKED, HALF_MARKED, NEVER_WRITTEN, STALE_STATE, OTHER_POSITION, OTHER_LAYER)
    assert judge(oracle, History.of(SITES, *RUN, RoomMarked("decode-1", MARK), legal, drained())) == ()
    assert oracle.judged == 4 + 2 * 640


@pytest.mark.parametrize(
    ("foreign", "owner"), [(FOREIGN, 5), (FOREIGN_HALF, 5), (FOREIGN_STATE, 4), (FOREIGN_METADATA, 4)]
)
def test_a_room_that_failed_holds_no_others_bytes(foreign: Saw, owner: int) -> None:
    (found,) = judge(ContentOracle(), History.of(*RUN, drained(MARKED, foreign), drained(foreign)))
    assert (found.code, found.request, found.seen_request) == ("KV102", 2, owner)
    assert found.message.startswith("decode-1: the room of request 2 failed")


# Padding and slots


def padding(site: Site, *words: int) -> Padding:
    """Row 2 of the padding unit, in layer 3."""
    return Padding(site.space, site.buffer, site.piece, 3, 2, words)


PADDED = replace(STATE, layer=3)


@pytest.mark.parametrize(
    ("event", "owner", "words"),
    [
        (padding(LATENT, *row(5, 11)), 5, "page 0, row 2 holds request 5's bytes (its position 11)"),
        (padding(LATENT, POISON, row(5, 11)[1]), 5, "request 5's bytes"),
        (padding(KEY, *row(6, 11, KEY, 1)), 6, "request 6's bytes"),
        (padding(PADDED, *row(4, 11, PADDED, 1)), 4, "slot 0, row 2 holds request 4's bytes"),
        (padding(HEAD, 0, 0), None, "other bytes after the run"),
        (padding(LATENT, *row(5, 11, NEXT_LAYER)), 5, "words of layer 4 of request 5, position 11"),
    ],
)
def test_written_padding_is_kv403_and_names_the_writer(event: Padding, owner: int | None, words: str) -> None:
    (finding,) = judge(ContentOracle(), History.of(SITES, Expected(6, ()), event))
    assert (finding.code, finding.request, finding.buffer) == ("KV403", owner, event.buffer)
    assert (finding.layer, finding.page, finding.row) == (3, 0, 2)
    assert words in finding.message


def test_padding_as_it_was_made_is_right() -> None:
    oracle = ContentOracle()
    assert judge(oracle, History.of(padding(LATENT), padding(STATE))) == ()
    assert oracle.judged == 2


def test_a_slot_that_still_holds_bytes_names_whose_they_are() -> None:
    moved = Leased(2, "prefill", 3, (("output_topk_index", row(4, 0, TOPK)),))
    found = judge(ContentOracle(), History.of(SITES, *RUN, LEASED_FULL, moved))
    assert [(each.code, each.request, each.seen_request, each.buffer, each.page) for each in found] == [
        ("KV102", 2, 4, "metadata.output_topk_p", 3),
        ("KV102", 2, None, "metadata.bootstrap_room", 3),
        ("KV102", 2, 4, "metadata.output_topk_index", 3),
    ]
    assert "field output_topk_p of request 4" in found[2].message


# Limits


def test_a_page_is_told_once_for_each_request_buffer_and_layer() -> None:
    again, elsewhere, reader = (
        Saw(replace(FOREIGN.mismatch, **change))  # type: ignore[arg-type]
        for change in ({"row": 7}, {"page": 10}, {"request": 3, "author": 3})
    )
    findings = judge(ContentOracle(), History.of(*RUN, FOREIGN, again, elsewhere, reader, LEASED_FULL, LEASED_FULL))
    assert [(found.request, found.page) for found in findings] == [(2, 9), (2, 10), (3, 9), (2, 3), (2, 3)]


def test_more_of_the_same_is_not_listed() -> None:
    events = [Saw(replace(NOBODY.mismatch, page=page)) for page in range(1, MAX_FINDINGS + 9)]
    assert len(judge(ContentOracle(), History.of(*events))) == MAX_FINDINGS
