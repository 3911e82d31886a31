"""The content oracle on literal histories: whose the bytes were, from when, from where, or from nowhere.

Invariants:
- Words are made by the content rule for the owner that the finding must name; nothing else tells the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcheck.core.base import content
from kvcheck.core.base.content import RowSites, Site, Tag
from kvcheck.core.base.record import Finding
from kvcheck.core.cache.events import Event, RoomMarked
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.content import ContentOracle
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.workload.events import (
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
SCALE = Site("full", "index_k_with_scale", "scale", 3)
STATE = Site("state", "conv", "", 1)
TOPK = Site("metadata", "metadata.output_topk_p", "output_topk_p", 0)
POISON = -0x5A5A5A5A5A5A5A5B
"""0xA5A5A5A5A5A5A5A5, signed."""


def row(owner: int, position: int, site: Site, words: int = 4) -> tuple[int, ...]:
    """A row of 64-bit words written for somebody."""
    return tuple(content.word(Tag(owner, 0, position), site, at) for at in range(words))


def half(word: int) -> int:
    """The low half of a word as a signed 32-bit number."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


def saw(site: Site, *words: int, author: int = 2, position: int = 70, count: int = 1, is_half: bool = False) -> Saw:
    """Request 2 read token 70 in row 6 of page 9."""
    return Saw(
        Mismatch(
            request=2,
            space=site.space,
            buffer=site.buffer,
            piece=site.piece,
            layer=site.layer,
            page=9,
            row=6,
            position=position,
            author=author,
            words=words,
            half=is_half,
            count=count,
        )
    )


def where(finding: Finding) -> tuple[str, int | None, int | None, str | None, int | None, int | None]:
    """Code, request, seen_request, buffer, layer, page."""
    return (finding.code, finding.request, finding.seen_request, finding.buffer, finding.layer, finding.page)


FOREIGN = saw(LATENT, *row(5, 11, LATENT))
FOREIGN_HALF = saw(SCALE, *map(half, row(5, 11, SCALE, 1)), is_half=True)
OTHER_POSITION_HALF = saw(SCALE, *map(half, row(2, 69, SCALE, 1)), is_half=True)
OTHER_POSITION = saw(LATENT, *row(2, 69, LATENT))
OTHER_PREFIX_POSITION = saw(LATENT, *row(1, 6, LATENT), author=1, position=7)
TORN = saw(LATENT, *row(2, 70, LATENT)[:2], *row(5, 11, LATENT)[2:])
TORN_IN_THE_PREFIX = saw(LATENT, *row(2, 7, LATENT)[:2], *row(5, 11, LATENT)[2:], author=1, position=7)
PREFIX_TORN = saw(LATENT, *row(1, 7, LATENT)[:2], *row(5, 11, LATENT)[2:], author=1, position=7)
TORN_BY_ITSELF = saw(LATENT, *row(2, 70, LATENT)[:2], *row(2, 69, LATENT)[2:])
HALF_WRITTEN = saw(LATENT, *row(2, 70, LATENT)[:2], POISON, POISON)
NEVER_WRITTEN = saw(LATENT, *([POISON] * 4))
NEVER_WRITTEN_HALF = saw(SCALE, -0x5A5A5A5B, is_half=True)
NOBODY = saw(LATENT, 0, 0, 0, 0)
NOBODY_HALF = saw(SCALE, 0, is_half=True)
OTHER_BUFFER = saw(LATENT, *row(2, 70, replace(LATENT, buffer="k")))
OTHER_LAYER = saw(LATENT, *row(2, 70, replace(LATENT, layer=4)))
STALE_STATE = saw(STATE, *row(2, 66, STATE), position=69)
LATER_STATE = saw(STATE, *row(2, 70, STATE), position=69)
FOREIGN_STATE = saw(STATE, *row(4, 69, STATE), position=69)
FRESH_STATE_OF_ANOTHER = saw(STATE, *row(4, 69, STATE), position=-1)
FRESH_STATE_OF_ITS_OWN = saw(STATE, *row(2, 69, STATE), position=-1)
FRESH_STATE_UNWRITTEN = saw(STATE, *([POISON] * 4), position=-1)
FOREIGN_METADATA = saw(TOPK, *row(4, 0, TOPK), position=0)
LEASED_EMPTY = Leased(2, "prefill", 3, ())
LEASED_FULL = Leased(2, "prefill", 3, (("output_topk_p", row(4, 0, TOPK)), ("bootstrap_room", (4, 0))))
RUN: tuple[Event, ...] = (Expected(5, ()), Verified("latent", 4))


def test_words_that_were_read_and_equal_are_judged_and_green() -> None:
    oracle = ContentOracle()
    assert judge(oracle, History.of(Verified("latent", 128), Verified("k", 4), LEASED_EMPTY)) == ()
    assert oracle.judged == 133, "a lease is one judgement, as a word is"


CASES = [
    pytest.param(FOREIGN, "KV102", 5, "request 5's bytes (its position 11)", id="foreign"),
    pytest.param(FOREIGN_HALF, "KV102", 5, "request 5's bytes (its position 11)", id="foreign, 32 bits"),
    pytest.param(OTHER_POSITION, "KV301", 2, "the bytes of position 69", id="its own, elsewhere"),
    pytest.param(OTHER_POSITION_HALF, "KV301", 2, "the bytes of position 69", id="its own, elsewhere, 32 bits"),
    pytest.param(OTHER_PREFIX_POSITION, "KV301", 1, "the bytes of position 6", id="the prefix, elsewhere"),
    pytest.param(TORN, "KV103", 5, "with words of request 2 (position 70) and request 5 (position 11);", id="torn"),
    pytest.param(
        TORN_IN_THE_PREFIX,
        "KV103",
        5,
        "with words of request 2 (position 7) and request 5 (position 11);",
        id="torn in the prefix",
    ),
    pytest.param(
        PREFIX_TORN,
        "KV103",
        5,
        "a torn row with words of request 1 (position 7) and request 5 (position 11);",
        id="prefix torn",
    ),
    pytest.param(
        TORN_BY_ITSELF, "KV103", 2, "a torn row with words of request 2 (position 69 and 70);", id="torn by itself"
    ),
    pytest.param(
        HALF_WRITTEN,
        "KV103",
        2,
        "a torn row with words of request 2 (position 70) and 2 words of nobody;",
        id="half written",
    ),
    pytest.param(NEVER_WRITTEN, "KV104", None, "memory that was never written", id="never written"),
    pytest.param(NEVER_WRITTEN_HALF, "KV104", None, "memory that was never written", id="never written, 32 bits"),
    pytest.param(NOBODY, "KV105", None, "words that nobody writes there", id="nobody's"),
    pytest.param(NOBODY_HALF, "KV105", None, "words that nobody writes there", id="nobody's, 32 bits"),
    pytest.param(OTHER_BUFFER, "KV105", None, "words that nobody writes there", id="right in another buffer"),
    pytest.param(OTHER_LAYER, "KV105", None, "words that nobody writes there", id="right in another layer"),
]


@pytest.mark.parametrize(("event", "code", "owner", "story"), CASES)
def test_a_deviating_row_names_code_owner_and_place(event: Saw, code: str, owner: int | None, story: str) -> None:
    (finding,) = judge(ContentOracle(), History.of(*RUN, event))
    assert where(finding) == (code, 2, owner, event.mismatch.buffer, 3, 9)
    assert (finding.row, finding.oracle, finding.tier) == (6, "content", "device")
    assert story in finding.message
    assert "request 2 read" in finding.message
    assert "layer 3, page 9, row 6" in finding.message


SITES = SitesKnown(
    (
        RowSites(space="full", buffer="latent", piece="", layers=(3, 4), words=4),
        RowSites(space="full", buffer="k", piece="", layers=(3, 4), words=4, heads=2),
        RowSites(space="full", buffer="index_k_with_scale", piece="scale", layers=(3, 4), words=2, is_half=True),
        RowSites(space="metadata", buffer=TOPK.buffer, piece=TOPK.piece, layers=(0,), words=8),
    )
)
HEAD = replace(LATENT, buffer="k")
SECOND_HEAD = tuple(content.word(Tag(1, 0, 0), HEAD, at) for at in (2, 3))
OTHER_LAYERS_SCALES = tuple(half(word) for word in row(2, 9, replace(SCALE, layer=4), 2))
LATER = saw(LATENT, *row(2, 5000, replace(LATENT, layer=4)))


@pytest.mark.parametrize(
    ("event", "owner", "story"),
    [
        (OTHER_BUFFER, 2, "saw the words of buffer k of request 2, position 70; expected its own position 70"),
        (OTHER_LAYER, 2, "saw the words of layer 4 of request 2, position 70; expected its own position 70"),
        (saw(HEAD, *SECOND_HEAD), 1, "saw the words of head 1 of request 1, position 0; expected its own position 70"),
        (saw(SCALE, *OTHER_LAYERS_SCALES, is_half=True), 2, "saw the words of layer 4 of request 2, position 9"),
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


MARK = content.word(Tag(77, 1, 3), LATENT, 9)
"""A word by which a receiver says that nobody has written: any word at all."""


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (saw(LATENT, *([MARK] * 4)), "KV104"),
        (saw(SCALE, half(MARK), half(MARK >> 32), is_half=True), "KV104"),
        (saw(LATENT, *row(2, 70, LATENT)[:2], MARK, MARK), "KV103"),
        (saw(TOPK, *([MARK] * 4), position=0), "KV104"),
    ],
)
def test_what_a_room_was_marked_with_was_never_written(event: Saw, code: str) -> None:
    (finding,) = judge(ContentOracle(), History.of(*RUN, RoomMarked("decode-0", MARK), event))
    assert finding.code == code
    (unmarked,) = judge(ContentOracle(), History.of(*RUN, event))
    assert unmarked.code == "KV105"


def drained(*rows: Saw) -> RoomDrained:
    return RoomDrained("decode-1", 2, 640, tuple(each.mismatch for each in rows))


def test_a_room_that_failed_may_be_half_written_and_holds_no_others_bytes() -> None:
    """Its memory was marked, and belongs to it until its sources have stopped."""
    oracle = ContentOracle()
    marked = saw(LATENT, *([MARK] * 4))
    half_marked = saw(LATENT, *row(2, 70, LATENT)[:2], MARK, MARK)
    legal = (marked, half_marked, NEVER_WRITTEN, STALE_STATE, OTHER_POSITION, OTHER_LAYER)
    assert judge(oracle, History.of(SITES, *RUN, RoomMarked("decode-1", MARK), drained(*legal), drained())) == ()
    assert oracle.judged == 4 + 2 * 640
    for foreign in (FOREIGN, FOREIGN_STATE, FOREIGN_METADATA, FOREIGN_HALF):
        found = judge(ContentOracle(), History.of(*RUN, drained(marked, foreign), drained(foreign)))
        assert [(each.code, each.request, each.seen_request) for each in found] == [
            ("KV102", 2, 5 if foreign in (FOREIGN, FOREIGN_HALF) else 4)
        ], "each place once"
        assert found[0].message.startswith("decode-1: the room of request 2 failed, and ")


def test_a_position_is_known_once_it_was_computed() -> None:
    codes = [
        found.code
        for begun in ((), (Forward(2, 0, 5001),))
        for found in judge(ContentOracle(), History.of(SITES, *RUN, *begun, LATER))
    ]
    assert codes == ["KV105", "KV106"]


def test_padding_and_slots_name_words_of_other_places_too() -> None:
    padding = Padding("full", "latent", "", 3, 2, row(5, 11, replace(LATENT, layer=4)))
    nobodys = Padding("full", "k", "", 3, 2, (1, 2, 3, 4))
    slot = Leased(2, "prefill", 3, (("output_topk_index", row(4, 0, TOPK)),))
    first, second, third = judge(ContentOracle(), History.of(SITES, *RUN, padding, nobodys, slot))
    assert (first.code, first.request) == ("KV403", 5)
    assert "holds words of layer 4 of request 5, position 11 after the run" in first.message
    assert "holds other bytes after the run" in second.message
    assert (third.code, third.seen_request) == ("KV102", 4)
    assert "with words of field output_topk_p of request 4, position 0 in output_topk_index" in third.message


@pytest.mark.parametrize(
    ("event", "code", "owner", "story"),
    [
        (STALE_STATE, "KV101", 2, "its own state as of token 66"),
        (LATER_STATE, "KV301", 2, "the bytes of position 70"),
        (FOREIGN_STATE, "KV102", 4, "request 4's bytes (its position 69)"),
    ],
)
def test_a_state_is_stale_foreign_or_ahead(event: Saw, code: str, owner: int, story: str) -> None:
    (finding,) = judge(ContentOracle(), History.of(*RUN, event))
    assert where(finding) == (code, 2, owner, "conv", 1, 9)
    assert story in finding.message
    assert "layer 1, slot 9" in finding.message


@pytest.mark.parametrize(
    ("event", "code", "owner", "story"),
    [
        (FRESH_STATE_OF_ANOTHER, "KV102", 4, "request 4's bytes (its position 69)"),
        (FRESH_STATE_OF_ITS_OWN, "KV101", 2, "its own state as of token 69"),
        (FRESH_STATE_UNWRITTEN, "KV104", None, "memory that was never written"),
    ],
)
def test_a_state_that_is_not_empty_at_first_is_the_previous_owners(
    event: Saw, code: str, owner: int | None, story: str
) -> None:
    (finding,) = judge(ContentOracle(), History.of(*RUN, event))
    assert where(finding) == (code, 2, owner, "conv", 1, 9)
    assert story in finding.message
    assert finding.message.endswith("expected an empty state: the request has computed nothing yet")


def test_metadata_has_no_layer_and_no_page() -> None:
    (finding,) = judge(ContentOracle(), History.of(*RUN, FOREIGN_METADATA))
    assert where(finding) == ("KV102", 2, 4, "metadata.output_topk_p", None, None)
    assert finding.row is None
    assert "expected what its own prefill handed over" in finding.message


def test_a_message_says_whose_word_belongs_there_and_how_many_rows_differ() -> None:
    own = saw(LATENT, *row(5, 11, LATENT), count=3)
    prefix = saw(SCALE, *map(half, row(5, 11, SCALE, 1)), author=1, position=7, is_half=True)
    first, second = judge(ContentOracle(), History.of(*RUN, own, prefix))
    assert "row 6 (and 2 more rows)" in first.message
    assert "expected its own position 70" in first.message
    assert "index_k_with_scale.scale, layer 3" in second.message
    assert "expected the shared prefix's (written by request 1) position 7" in second.message


def test_a_slot_that_still_holds_bytes_names_whose_they_are() -> None:
    first, second = judge(ContentOracle(), History.of(LEASED_FULL))
    assert where(first) == ("KV102", 2, 4, "metadata.output_topk_p", None, 3)
    assert "prefill slot 3 was handed to request 2 with request 4's bytes in output_topk_p" in first.message
    assert where(second) == ("KV102", 2, None, "metadata.bootstrap_room", None, 3)
    assert "with an earlier owner's bytes in bootstrap_room" in second.message


def test_a_page_is_told_once_for_each_request_buffer_and_layer() -> None:
    again = Saw(replace(FOREIGN.mismatch, row=7))
    elsewhere = Saw(replace(FOREIGN.mismatch, page=10))
    reader = Saw(replace(FOREIGN.mismatch, request=3, author=3))
    findings = judge(ContentOracle(), History.of(*RUN, FOREIGN, again, elsewhere, reader, LEASED_FULL, LEASED_FULL))
    assert [(found.request, found.page) for found in findings] == [(2, 9), (2, 10), (3, 9), (2, 3), (2, 3)]


def test_more_of_the_same_is_not_listed() -> None:
    events = [Saw(replace(NOBODY.mismatch, page=page)) for page in range(1, MAX_FINDINGS + 9)]
    assert len(judge(ContentOracle(), History.of(*events))) == MAX_FINDINGS


# Broken oracles


class IgnoresHalves(ContentOracle):
    def _saw(self, event: Saw) -> None:
        super()._saw(Saw(replace(event.mismatch, half=False)))


class KnowsNoOtherRequests(ContentOracle):
    def _expected(self, event: Expected) -> None:
        return


class ForgetsPrefixAuthors(ContentOracle):
    def _saw(self, event: Saw) -> None:
        super()._saw(Saw(replace(event.mismatch, author=event.mismatch.request)))


class ReadsTheFirstWord(ContentOracle):
    def _saw(self, event: Saw) -> None:
        super()._saw(Saw(replace(event.mismatch, words=event.mismatch.words[:1])))


class KnowsNoPlaces(ContentOracle):
    def _sites_known(self, event: SitesKnown) -> None:
        return


class ForgetsTheLayer(ContentOracle):
    def _saw(self, event: Saw) -> None:
        super()._saw(Saw(replace(event.mismatch, layer=4)))


class TrustsLeases(ContentOracle):
    def _leased(self, event: Leased) -> None:
        self.judged += 1


class NeverCounts(ContentOracle):
    def _verified(self, event: Verified) -> None:
        return


@pytest.mark.parametrize(
    ("broken", "event"),
    [
        (IgnoresHalves, FOREIGN_HALF),
        (IgnoresHalves, OTHER_POSITION_HALF),
        (KnowsNoOtherRequests, FOREIGN_HALF),
        (ForgetsPrefixAuthors, OTHER_PREFIX_POSITION),
        (ReadsTheFirstWord, TORN),
        (KnowsNoPlaces, OTHER_LAYER),
        (ForgetsTheLayer, OTHER_LAYER),
        (TrustsLeases, LEASED_FULL),
        (NeverCounts, Verified("latent", 4)),
    ],
)
def test_a_broken_oracle_is_noticed(broken: Callable[[], ContentOracle], event: Event) -> None:
    whole, other = ContentOracle(), broken()
    expected = ([*map(where, judge(whole, History.of(SITES, *RUN, event)))], whole.judged)
    assert ([*map(where, judge(other, History.of(SITES, *RUN, event)))], other.judged) != expected
