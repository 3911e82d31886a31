"""watch: values that share memory or change are found; owned ones, views that are allowed and arenas stay green."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcheck.testing import IntegrityError, NotJudged, watch


class Rows:
    def __init__(self) -> None:
        self.token = torch.zeros(4, 1, dtype=torch.int64)
        self.hidden = torch.zeros(4, 16, dtype=torch.bfloat16)

    def copies(self, row: int) -> dict[str, torch.Tensor]:
        return {"token": self.token[row].clone(), "hidden": self.hidden[row].clone()}

    def put(self, row: int, value: float) -> None:
        self.token[row], self.hidden[row] = int(value), value


def test_a_view_is_found_at_once_with_its_row_and_its_receiver() -> None:
    rows = Rows()
    with pytest.raises(IntegrityError) as caught:
        watch(rows.copies(3) | {"hidden": rows.hidden[3]}, of=rows, name="get(3)", owner="request 1")
    (finding,) = caught.value.findings
    assert (finding.code, finding.buffer) == ("KV305", "get(3).hidden")
    assert "request 1 was given to keep, shares its memory with Rows.hidden, row 3" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        lambda rows: rows.hidden[2].view(torch.uint8),
        lambda rows: (1, [rows.hidden[1:3].t()]),
        lambda rows: rows.hidden[:, 5:6],
        lambda rows: rows.hidden,
    ],
)
def test_a_part_of_any_form_is_found(value: Any) -> None:
    rows = Rows()
    with pytest.raises(IntegrityError, match="KV305"):
        watch(value(rows), of=rows)


def test_a_value_that_changes_is_found_at_the_end_of_the_block() -> None:
    kept = torch.zeros(4)
    with pytest.raises(IntegrityError) as caught, watch([kept], name="lengths", owner="request 7"):
        kept[2] = 1
    (finding,) = caught.value.findings
    assert (finding.code, finding.buffer) == ("KV303", "lengths[0]")
    assert "lengths[0], which request 7 was given, changed" in finding.message
    assert finding.minimal is not None and finding.minimal["seen"] != finding.minimal["wanted"]


def test_memory_of_numpy_is_watched_too() -> None:
    rows = np.zeros((4, 4))
    kept = watch({"ids": rows[1]}, name="ids")
    rows[1, 0] = 9
    with pytest.raises(IntegrityError, match="KV303"):
        kept.check()


def test_an_owned_value_stays_green_and_says_what_was_judged() -> None:
    rows = Rows()
    with watch(rows.copies(3), of=rows, name="get(3)") as kept:
        rows.put(3, 2)
    assert kept.judged.words == {"get(3).token": 1, "get(3).hidden": 4} and kept.judged.reads == 2


def test_a_view_may_be_a_view_where_the_caller_says_so() -> None:
    rows = Rows()
    with watch(rows.hidden[3], of=rows, is_view=True):
        rows.put(2, 2)
    with pytest.raises(IntegrityError, match="KV303"), watch(rows.hidden[3], of=rows, is_view=True):
        rows.put(3, 2)


@pytest.mark.parametrize("cut", [(slice(0, 4), slice(4, 8)), ((slice(None), 0), (slice(None), 1))])
def test_slices_of_an_arena_and_interleaved_views_share_nothing(cut: Any) -> None:
    both = torch.zeros(8, 2, 4)
    with watch(both[cut[0]], of={"v": both[cut[1]]}):
        both[cut[1]] = 1


@pytest.mark.parametrize("value", [None, (), {"a": 1}, torch.zeros(0), torch.zeros(2, device="meta")])
def test_what_holds_no_bytes_cannot_be_watched(value: Any) -> None:
    with pytest.raises(NotJudged, match="cannot be watched"):
        watch(value, of=Rows())


def test_an_error_in_the_block_is_not_replaced() -> None:
    kept = torch.zeros(2)
    with pytest.raises(ZeroDivisionError), watch(kept):
        kept[0] = 1 / 0
