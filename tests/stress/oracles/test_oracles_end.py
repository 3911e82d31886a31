"""What only the end of a run can show, on literal histories: ids back, maps empty, padding as it was made.

Invariants:
- A history is written out here event by event; an oracle that is broken on purpose gives another verdict on it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcheck.core.base import content
from kvcheck.core.base.content import Site, Tag
from kvcheck.core.cache.events import Event
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.accounting import AccountingOracle
from kvcheck.core.stress.oracles.content import ContentOracle
from kvcheck.core.stress.oracles.oracle import Oracle, judge
from kvcheck.core.stress.workload.events import Counted, Expected, Mapped, Padding, Returned

POISON = -0x5A5A5A5A5A5A5A5B
"""0xA5A5A5A5A5A5A5A5, signed."""
TREE_FULL = Counted("full", 20, 44, 64)
RETURNED = (TREE_FULL, Returned("full", 64, 64), Returned("rows", 8, 8))
KEPT = (TREE_FULL, Returned("full", 60, 64), Returned("rows", 8, 8))
UNMAPPED = (Mapped("full_to_window", ()),)
MAPPED = (Mapped("full_to_window", ((3, 7), (5, 2))),)


def padding(space: str, buffer: str, piece: str, *words: int) -> Padding:
    """Row 2 of the padding unit, in layer 3."""
    return Padding(space, buffer, piece, 3, 2, words)


def word(owner: int, site: Site, at: int = 0) -> int:
    """A word that a request wrote for its position 11."""
    return content.word(Tag(owner, 0, 11), site, at)


INTACT = (padding("full", "latent", ""), padding("state", "conv", ""))
LATENT = padding("full", "latent", "", *(word(5, Site("full", "latent", "", 3), at) for at in range(4)))
LATENT_IN_PART = padding("full", "latent", "", POISON, word(5, Site("full", "latent", "", 3), 1))
INDEX = padding("full", "index_k_with_scale", "key", word(6, Site("full", "index_k_with_scale", "key", 3)))
STATE = padding("state", "conv", "", word(4, Site("state", "conv", "", 3)))
ZEROED = padding("full", "k", "", 0, 0)


@pytest.mark.parametrize(("oracle", "events"), [(AccountingOracle, RETURNED), (AccountingOracle, UNMAPPED)])
def test_everything_back_and_every_map_empty_is_right(oracle: Callable[[], Oracle], events: tuple[Event, ...]) -> None:
    made = oracle()
    assert judge(made, History.of(*events)) == ()
    assert made.judged == len(events)


def test_pages_that_the_tree_did_not_give_back_at_close_are_kv401() -> None:
    (finding,) = judge(AccountingOracle(), History.of(*KEPT))
    assert (finding.code, finding.tier) == ("KV401", "device")
    assert "4 of 64 ids of full are not free after close" in finding.message


def test_a_map_that_still_names_a_freed_page_is_kv401() -> None:
    (finding,) = judge(AccountingOracle(), History.of(*MAPPED))
    assert finding.code == "KV401"
    assert "full_to_window still maps 3 to 7 after all requests have finished (2 entries are left)" in finding.message


def test_padding_as_it_was_made_is_right() -> None:
    oracle = ContentOracle()
    assert judge(oracle, History.of(*INTACT)) == ()
    assert oracle.judged == len(INTACT)


@pytest.mark.parametrize(
    ("event", "owner", "words"),
    [
        (LATENT, 5, "latent, layer 3, page 0, row 2 holds request 5's bytes (its position 11)"),
        (LATENT_IN_PART, 5, "page 0, row 2 holds request 5's bytes (its position 11)"),
        (INDEX, 6, "index_k_with_scale, layer 3, page 0, row 2 holds request 6's bytes"),
        (STATE, 4, "conv, layer 3, slot 0, row 2 holds request 4's bytes"),
        (ZEROED, None, "k, layer 3, page 0, row 2 holds other bytes after the run"),
    ],
)
def test_written_padding_is_kv403_and_names_the_writer(event: Padding, owner: int | None, words: str) -> None:
    (finding,) = judge(ContentOracle(), History.of(Expected(6, ()), event))
    assert (finding.code, finding.request, finding.buffer) == ("KV403", owner, event.buffer)
    assert (finding.layer, finding.page, finding.row) == (3, 0, 2)
    assert words in finding.message


class TrustsTheTree(AccountingOracle):
    def _returned(self, event: Returned) -> None:
        self.judged += 1


class TrustsMaps(AccountingOracle):
    def _mapped(self, event: Mapped) -> None:
        self.judged += 1


class IgnoresPadding(ContentOracle):
    def _padding(self, event: Padding) -> None:
        self.judged += 1


@pytest.mark.parametrize(
    ("whole", "broken", "events"),
    [
        (AccountingOracle, TrustsTheTree, KEPT),
        (AccountingOracle, TrustsMaps, MAPPED),
        (ContentOracle, IgnoresPadding, (LATENT,)),
        (ContentOracle, IgnoresPadding, (ZEROED,)),
    ],
)
def test_a_broken_oracle_is_noticed(
    whole: Callable[[], Oracle], broken: Callable[[], Oracle], events: tuple[Event, ...]
) -> None:
    assert judge(whole(), History.of(*events)) != judge(broken(), History.of(*events))
