"""check_round_trip: pools that keep an id in another row, which is no wrong row if save and load agree on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rigs.own_pools import SLOTS, Paged, Pool, found, judged

from kvcheck.testing import NotJudged

At = Callable[[Any], Any]
TABLE = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))


class Translated(Pool):
    """`saved` and `loaded` map ids to rows."""

    def __init__(self, saved: At, loaded: At) -> None:
        super().__init__()
        self.saved, self.loaded = saved, loaded

    def save(self, ids: Any) -> Any:
        return super().save(self.saved(ids))

    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, self.loaded(ids))


def same(ids: Any) -> Any:
    return ids


def mirrored(ids: Any) -> Any:
    return SLOTS - 1 - ids


def beside(ids: Any) -> Any:
    return (ids + 1) % SLOTS


def looked_up(ids: Any) -> Any:
    return TABLE[ids]


MAPS: dict[str, tuple[At, At]] = {
    "mirrored": (mirrored, lambda rows: SLOTS - 1 - torch.tensor(rows)),
    "table": (looked_up, lambda rows: TABLE.argsort()[torch.tensor(rows)]),
    "beside": (beside, lambda rows: (torch.tensor(rows) - 1) % SLOTS),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_translation_is_not_judged_and_is_green_with_as_ids(name: str) -> None:
    at, back = MAPS[name]
    for seed in range(3):
        with pytest.raises(NotJudged, match="as_ids=") as caught:
            judged(Translated(at, at), seed=seed)
        assert "row" in str(caught.value) and "k, layer 0" in str(caught.value) and "\n" not in str(caught.value)
        assert min(judged(Translated(at, at), seed=seed, as_ids=back).words.values()) > 0


WRONG: dict[str, tuple[At, At]] = {
    "off by one in load": (same, beside),
    "off by one in save": (beside, same),
    "mirrored in load": (same, mirrored),
    "two translations": (mirrored, looked_up),
    "sorted in load": (same, lambda ids: ids.sort().values),
    "translated and sorted": (mirrored, lambda ids: mirrored(ids).sort().values),
    "ids are not read": (lambda ids: torch.arange(len(ids)), lambda ids: torch.arange(len(ids))),
    "ids share rows": (lambda ids: ids // 32 + 1, lambda ids: ids // 32 + 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_are_no_translation_stay_findings(name: str) -> None:
    pool = Translated(*WRONG[name])
    if name == "translated and sorted":
        assert found(pool, as_ids=MAPS["mirrored"][1]).findings
        return
    for seed in range(3):
        assert {each.code for each in found(pool, seed=seed).findings} <= {"KV403", "KV304", "KV301", "KV102"}


def test_one_buffer_with_wrong_rows_stays_a_finding() -> None:
    class OnlyV(Pool):
        def load(self, copy: Any, ids: Any) -> None:
            super().load(copy, ids)
            for each, rows in zip(self.v, copy[2:4], strict=True):
                each[ids - 1] = rows

    assert {each.buffer for each in found(OnlyV()).findings} == {"v"}


class Pages(Paged):
    """Pages that lie in mirrored order."""

    def save(self, ids: Any) -> Any:
        return super().save(12 * 16 - (ids - ids % 16) + ids % 16)

    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, 12 * 16 - (ids - ids % 16) + ids % 16)


def test_pages_are_translated_as_pages() -> None:
    options = {"slots": 13 * 16, "page_size": 16, "padding": ()}
    with pytest.raises(NotJudged, match=r"id 1 is kept in page 11.*as_ids="):
        judged(Pages(), ids=[*range(16, 48)], into=[*range(64, 96)], **options)


def test_a_call_with_one_id_that_fails_leaves_the_findings() -> None:
    class Several(Translated):
        def save(self, ids: Any) -> Any:
            assert len(ids) > 1
            return super().save(ids)

    assert found(Several(same, beside)).findings
