"""Evidence counts what happened and no more; a reuse is foreign only when it really was."""

from __future__ import annotations

import pytest

from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Submitted
from kvcheck.core.cache.events import Allocated, Event, Freed, RoomChanged
from kvcheck.core.cache.transfer.receiver import FAILED, SUCCESS, TRANSFERRING
from kvcheck.core.stress.evidence import EvidenceCount
from kvcheck.core.stress.history import History
from kvcheck.core.stress.workload.events import Expected, Restored, Resumed, Retracted, Saved, Verified

TABLE = ("full.latent",)


def counted(*events: Event) -> Evidence:
    count = EvidenceCount()
    history = History()
    history.listen(count.handlers())
    for event in events:
        history.emit(event)
    return count.total(events=history.count, evictions=4, orderings=0)


def given(owner: int, *pages: int) -> Allocated:
    return Allocated("full", pages, owner)


def saved(request: int) -> Saved:
    return Saved(request, 64, TABLE, TABLE)


def back(request: int, *pages: int) -> Restored:
    return Restored(request, 64, pages, TABLE, TABLE)


def room(request: int, status: int) -> RoomChanged:
    return RoomChanged("decode-0", request, request, 1, TRANSFERRING, status, "")


def test_everything_is_counted_in_its_own_column() -> None:
    assert counted(
        Expected(1, ()),
        Expected(2, ()),
        Expected(3, ()),
        Retracted(1),
        Retracted(2),
        Resumed(1),
        Verified("window.k", 8),
        Verified("latent", 5),
        Verified("window.k", 2),
        room(1, SUCCESS),
        Submitted(2, "decode.write", "forward", (), ()),
        room(2, FAILED),
        room(3, SUCCESS),
        Freed("full", (1,)),
    ) == Evidence(
        schedules=1,
        events=14,
        requests=3,
        retractions=2,
        resumes=1,
        foreign_reuses=0,
        device_evictions=4,
        transfers=2,
        words_verified={"latent": 5, "window.k": 10},
    )


@pytest.mark.parametrize(
    ("events", "foreign"),
    [
        pytest.param((given(1, 3), saved(1), given(2, 3), given(1, 3), back(1, 3)), 1, id="given away in between"),
        pytest.param((given(1, 3), saved(1), given(1, 3), back(1, 3)), 0, id="its own page again"),
        pytest.param((given(2, 5), given(1, 3), saved(1), given(1, 5), back(1, 5)), 0, id="used before the retraction"),
        pytest.param((given(1, 3), saved(1), given(2, 4), given(1, 3), back(1, 3)), 0, id="the other took another"),
        pytest.param((given(1, 3), saved(1), given(2, 3), given(1, 7), back(1, 7)), 0, id="resumed elsewhere"),
        pytest.param(
            (given(1, 3, 4), saved(1), given(2, 3, 4), given(1, 3, 4), back(1, 3, 4)), 1, id="two pages are one reuse"
        ),
        pytest.param(
            (given(1, 3, 4), saved(1), given(2, 4), given(1, 3, 4), back(1, 3, 4)), 1, id="one page of two is enough"
        ),
        pytest.param(
            (given(1, 3), saved(1), Allocated("window", (3,), 2), given(1, 3), back(1, 3)), 0, id="another space"
        ),
        pytest.param(
            (*(given(1, 3), saved(1), given(2, 3), given(1, 3), back(1, 3)), *(saved(1), given(1, 3), back(1, 3))),
            1,
            id="a second retraction starts anew",
        ),
        pytest.param(
            (
                *(given(1, 3), saved(1), given(2, 3), given(1, 3), back(1, 3)),
                *(saved(1), given(2, 3), given(1, 3), back(1, 3)),
            ),
            2,
            id="two foreign reuses",
        ),
    ],
)
def test_a_reuse_is_foreign_only_after_another_had_the_page(events: tuple[Event, ...], foreign: int) -> None:
    assert counted(*events).foreign_reuses == foreign
