"""The lifetime oracle on literal histories: freed in flight, used while free, freed twice, written for another.

Invariants:
- Reuse is right or wrong by what has completed before the free, never by how much lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
from kvcheck.core.cache.events import Allocated, Event, Freed
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.lifetime import LifetimeOracle
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge

Ids = tuple[int, ...]


def touching(ids: Ids, *, owner: int | None = None, space: str = "full") -> tuple[Footprint, ...]:
    """A footprint on ids, for one request or for none."""
    owners = None if owner is None else np.full(len(ids), owner)
    return (Footprint(space, ("latent",), (0, 1), np.array(ids, dtype=np.int64), owners=owners),)


def write(ordinal: int, ids: Ids, *, owner: int | None, space: str = "full") -> Submitted:
    """A decode write is queued."""
    return Submitted(ordinal, "decode.write", "forward", (), touching(ids, owner=owner, space=space))


def read(ordinal: int, ids: Ids, *, owner: int | None = None, space: str = "full") -> Submitted:
    """A save is queued."""
    return Submitted(ordinal, "offload.save", "offload", touching(ids, owner=owner, space=space), ())


def backup(ordinal: int, device: int, host: int, *, owner: int) -> Submitted:
    """A page goes to the host."""
    source, target = touching((device,), owner=owner), touching((host,), owner=owner, space="host.full")
    return Submitted(ordinal, "hicache.backup", "hicache.d2h", source, target)


def load(ordinal: int, host: int, device: int, *, owner: int) -> Submitted:
    """A page comes from the host."""
    source, target = touching((host,), owner=owner, space="host.full"), touching((device,), owner=owner)
    return Submitted(ordinal, "hicache.load", "hicache.h2d.0", source, target)


def where(finding: Finding) -> tuple[str, int | None, int | None, str | None, int | None, int | None]:
    """Code, request, seen_request, buffer, layer, page."""
    return (finding.code, finding.request, finding.seen_request, finding.buffer, finding.layer, finding.page)


REUSE: tuple[Event, ...] = (
    Allocated("full", (3, 4), 1),
    write(1, (3, 4), owner=1),
    read(2, (3, 4), owner=1),
    Completed(1),
    Completed(2),
    Freed("full", (3, 4)),
    Allocated("full", (4, 3), 2),
    write(3, (3, 4), owner=2),
    Completed(3),
    Freed("full", (3, 4)),
)
SHARED_PREFIX: tuple[Event, ...] = (
    Allocated("full", (3,), 1),
    write(1, (3,), owner=1),
    Allocated("full", (5,), 2),
    Allocated("full", (6,), 4),
    read(2, (3, 5), owner=2),
    read(3, (3, 6), owner=4),
    Completed(1),
    Completed(3),
    Completed(2),
    Freed("full", (3, 5, 6)),
)
OTHERS_ARE_BUSY: tuple[Event, ...] = (
    Allocated("full", (3, 4), 1),
    Allocated("state", (3,), 1),
    read(1, (4,), owner=1),
    read(2, (3,), owner=1, space="state"),
    Freed("full", (3,)),
)
READ_AND_WRITTEN_BY_ONE: tuple[Event, ...] = (
    Allocated("full", (3,), 1),
    Submitted(1, "pool.move", "forward", touching((3,), owner=1), touching((3,), owner=1)),
    Completed(1),
    Freed("full", (3,)),
)
HOUSEKEEPING: tuple[Event, ...] = (
    write(1, (3, 4), owner=None),
    Allocated("full", (3,), 1),
    write(2, (3,), owner=None),
    Freed("full", (3,)),
    Completed(1),
    Completed(2),
)
BACKUP: tuple[Event, ...] = (
    Allocated("full", (3,), 1),
    Allocated("host.full", (0,), 2),
    backup(1, 3, 0, owner=2),
    Completed(1),
    Freed("full", (3,)),
    Freed("host.full", (0,)),
)
LOAD: tuple[Event, ...] = (
    Allocated("host.full", (0,), 1),
    Allocated("full", (3,), 2),
    load(1, 0, 3, owner=2),
    Completed(1),
    Freed("host.full", (0,)),
    Freed("full", (3,)),
)
STATE_COPY: tuple[Event, ...] = (
    Allocated("state", (1,), 1),
    Allocated("state", (2,), 1),
    Submitted(1, "hicache.copy_state", "forward", touching((1,), space="state"), touching((2,), space="state")),
    Freed("state", (1,)),
    Allocated("state", (1,), 2),
    write(2, (1,), owner=2, space="state"),
    Completed(1),
    Completed(2),
)
TABLES_AND_SEALS: tuple[Event, ...] = (
    Allocated("full", (1,), 1),
    write(1, (7,), owner=None, space="table"),
    write(2, (7,), owner=None, space="seals"),
    Freed("full", (1,)),
)
HIGH_IDS: tuple[Event, ...] = (
    Allocated("full", (1,), 1),
    Allocated("full", (5000,), 2),
    write(1, (5000,), owner=2),
    Completed(1),
    Freed("full", (5000, 1)),
)

FREED_IN_FLIGHT: tuple[Event, ...] = (
    Allocated("full", (3, 4), 1),
    write(1, (3,), owner=1),
    read(2, (3, 4), owner=1),
    Completed(1),
    Freed("full", (4,)),
)
FREED_BEFORE_THE_SECOND_READER: tuple[Event, ...] = (*SHARED_PREFIX[:8], Freed("full", (3,)))
USED_AFTER_FREE: tuple[Event, ...] = (Allocated("full", (3,), 1), Freed("full", (3,)), write(1, (3,), owner=1))
READ_OF_NOTHING: tuple[Event, ...] = (read(1, (3,), owner=1),)
DOUBLE_FREE: tuple[Event, ...] = (Allocated("full", (3, 4), 1), Freed("full", (3,)), Freed("full", (4, 3)))
TWICE_HANDED_OUT: tuple[Event, ...] = (Allocated("full", (3,), 1), Allocated("full", (3,), 2))
HOST_PAGE_FREED_BEFORE_ITS_BACKUP: tuple[Event, ...] = (*BACKUP[:3], Freed("host.full", (0,)))
SOURCE_FREED_BEFORE_ITS_BACKUP: tuple[Event, ...] = (*BACKUP[:3], Freed("full", (3,)))
HOST_PAGE_FREED_BEFORE_ITS_LOAD: tuple[Event, ...] = (*LOAD[:3], Freed("host.full", (0,)))
LOAD_INTO_A_FREE_PAGE: tuple[Event, ...] = (LOAD[0], load(1, 0, 3, owner=2))
BACKUP_INTO_ANOTHERS_HOST_PAGE: tuple[Event, ...] = (*BACKUP[:2], backup(1, 3, 0, owner=1))
STATE_COPY_INTO_A_FREE_SLOT: tuple[Event, ...] = (STATE_COPY[0], *STATE_COPY[2:3])
VALUE_DROPPED_BEFORE_ITS_RESTORE: tuple[Event, ...] = (
    Allocated("host.offload", (4,), 1),
    read(1, (4,), owner=1, space="host.offload"),
    Freed("host.offload", (4,)),
)
FOREIGN_WRITE: tuple[Event, ...] = (
    Allocated("full", (3,), 1),
    Allocated("full", (4,), 2),
    write(1, (3, 4), owner=2),
)


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(REUSE, id="reuse after completion"),
        pytest.param(SHARED_PREFIX, id="a prefix read by several requests"),
        pytest.param(OTHERS_ARE_BUSY, id="other pages and other spaces are busy"),
        pytest.param(READ_AND_WRITTEN_BY_ONE, id="read and written by one operation"),
        pytest.param(HOUSEKEEPING, id="writes that name no request"),
        pytest.param(BACKUP, id="a backup"),
        pytest.param(LOAD, id="a load of a host page that another request left"),
        pytest.param(STATE_COPY, id="a slot that is given away while the lane still copies it"),
        pytest.param(TABLES_AND_SEALS, id="rows that nobody hands out"),
        pytest.param(HIGH_IDS, id="ids far apart"),
    ],
)
def test_what_is_fine_stays_green_and_is_judged(events: tuple[Event, ...]) -> None:
    oracle = LifetimeOracle()
    assert judge(oracle, History.of(*events)) == ()
    assert oracle.judged > 0


@pytest.mark.parametrize(
    ("events", "expected", "words"),
    [
        (FREED_IN_FLIGHT, ("KV202", 1, 4), "full page 4 was freed while offload.save of it was pending"),
        (FREED_BEFORE_THE_SECOND_READER, ("KV202", 1, 3), "full page 3 was freed while offload.save of it was pending"),
        (USED_AFTER_FREE, ("KV202", None, 3), "full page 3 is free, yet decode.write writes it"),
        (READ_OF_NOTHING, ("KV202", None, 3), "full page 3 is free, yet offload.save reads it"),
        (DOUBLE_FREE, ("KV402", None, 3), "full page 3 was freed though it is not allocated"),
        (TWICE_HANDED_OUT, ("KV402", 2, 3), "full page 3 was handed out while request 1 holds it"),
        (FOREIGN_WRITE, ("KV403", 2, 3), "full page 3 belongs to request 1, yet decode.write writes it for request 2"),
    ],
    ids=["in flight", "second reader", "used after free", "never allocated", "double free", "handed twice", "foreign"],
)
def test_what_is_wrong_names_page_and_request(
    events: tuple[Event, ...], expected: tuple[str, int | None, int], words: str
) -> None:
    (finding,) = judge(LifetimeOracle(), History.of(*events))
    code, request, page = expected
    assert where(finding) == (code, request, None, None, None, page)
    assert (finding.oracle, finding.tier) == ("lifetime", "device")
    assert finding.message == words


@pytest.mark.parametrize(
    ("events", "expected", "words"),
    [
        (
            HOST_PAGE_FREED_BEFORE_ITS_BACKUP,
            ("KV202", "host", 2, 0),
            "host.full page 0 was freed while hicache.backup of it was pending",
        ),
        (
            SOURCE_FREED_BEFORE_ITS_BACKUP,
            ("KV202", "device", 1, 3),
            "full page 3 was freed while hicache.backup of it was pending",
        ),
        (
            HOST_PAGE_FREED_BEFORE_ITS_LOAD,
            ("KV202", "host", 1, 0),
            "host.full page 0 was freed while hicache.load of it was pending",
        ),
        (LOAD_INTO_A_FREE_PAGE, ("KV202", "device", None, 3), "full page 3 is free, yet hicache.load writes it"),
        (
            BACKUP_INTO_ANOTHERS_HOST_PAGE,
            ("KV403", "host", 1, 0),
            "host.full page 0 belongs to request 2, yet hicache.backup writes it for request 1",
        ),
        (
            STATE_COPY_INTO_A_FREE_SLOT,
            ("KV202", "device", None, 2),
            "state slot 2 is free, yet hicache.copy_state writes it",
        ),
        (
            VALUE_DROPPED_BEFORE_ITS_RESTORE,
            ("KV202", "host", 1, 4),
            "host.offload value 4 was freed while offload.save of it was pending",
        ),
    ],
)
def test_copies_between_tiers_hold_what_they_name(
    events: tuple[Event, ...], expected: tuple[str, str, int | None, int], words: str
) -> None:
    (finding,) = judge(LifetimeOracle(), History.of(*events))
    assert (finding.code, finding.tier, finding.request, finding.page) == expected
    assert finding.message == words


def test_a_free_page_written_beside_a_foreign_one_is_two_findings() -> None:
    events = (Allocated("full", (3,), 1), write(1, (3, 4), owner=2))
    findings = judge(LifetimeOracle(), History.of(*events))
    assert [(found.code, found.page) for found in findings] == [("KV202", 4), ("KV403", 3)]


def test_a_reuse_in_flight_is_told_once_and_does_not_taint_the_next_owner() -> None:
    late = (*FREED_IN_FLIGHT, Allocated("full", (4,), 2), Completed(2), write(3, (4,), owner=2), Completed(3))
    findings = judge(LifetimeOracle(), History.of(*late, Freed("full", (4,))))
    assert [where(found) for found in findings] == [("KV202", 1, None, None, None, 4)]


def test_ids_are_counted_one_by_one() -> None:
    oracle = LifetimeOracle()
    judge(oracle, History.of(*REUSE))
    assert oracle.judged == 2 + 2 + 2 + 2 + 2, "ids of three operations and of two frees"


def test_an_operation_on_no_ids_is_nothing() -> None:
    oracle = LifetimeOracle()
    assert judge(oracle, History.of(read(1, ()), Completed(1))) == ()
    assert oracle.judged == 0


def test_more_of_the_same_is_not_listed() -> None:
    events = [Freed("full", (page,)) for page in range(1, MAX_FINDINGS + 9)]
    assert len(judge(LifetimeOracle(), History.of(*events))) == MAX_FINDINGS


# Broken oracles


class ForgetsCompletions(LifetimeOracle):
    def _completed(self, event: Completed) -> None:
        return


class ForgetsOperations(LifetimeOracle):
    def _submitted(self, event: Submitted) -> None:
        return


class ForgetsReads(LifetimeOracle):
    def _submitted(self, event: Submitted) -> None:
        super()._submitted(Submitted(event.ordinal, event.name, event.lane, (), event.writes))


class CompletesEverything(LifetimeOracle):
    def _completed(self, event: Completed) -> None:
        for ordinal in list(self._pending):
            super()._completed(Completed(ordinal))


class MixesSpaces(LifetimeOracle):
    def _allocated(self, event: Allocated) -> None:
        super()._allocated(Allocated("any", event.ids, event.owner))

    def _freed(self, event: Freed) -> None:
        super()._freed(Freed("any", event.ids))

    def _submitted(self, event: Submitted) -> None:
        reads, writes = (tuple(replace(row, space="any") for row in rows) for rows in (event.reads, event.writes))
        super()._submitted(Submitted(event.ordinal, event.name, event.lane, reads, writes))


class TakesAllForOne(LifetimeOracle):
    def _allocated(self, event: Allocated) -> None:
        super()._allocated(Allocated(event.space, event.ids, 1))


class HoldsReadersToTheOwner(LifetimeOracle):
    def _submitted(self, event: Submitted) -> None:
        super()._submitted(Submitted(event.ordinal, event.name, event.lane, (), (*event.reads, *event.writes)))


class PassesOverNoRequest(LifetimeOracle):
    def _submitted(self, event: Submitted) -> None:
        reads, writes = (
            tuple(each for each in rows if each.owners is not None) for rows in (event.reads, event.writes)
        )
        super()._submitted(Submitted(event.ordinal, event.name, event.lane, reads, writes))


class HoldsForNoRequest(LifetimeOracle):
    def _submitted(self, event: Submitted) -> None:
        def owned(each: Footprint) -> Footprint:
            return replace(each, owners=np.ones(len(each.rows), dtype=np.int64))

        reads = tuple(map(owned, (*event.reads, *event.writes)))
        super()._submitted(Submitted(event.ordinal, event.name, event.lane, reads, ()))


class KnowsEverySpace(LifetimeOracle):
    def _submitted(self, event: Submitted) -> None:
        for each in (*event.reads, *event.writes):
            self._space(each.space).is_allocated = True
        super()._submitted(event)


class NeverFrees(LifetimeOracle):
    def _freed(self, event: Freed) -> None:
        return


@pytest.mark.parametrize(
    ("broken", "events"),
    [
        (ForgetsCompletions, REUSE),
        (ForgetsOperations, FREED_IN_FLIGHT),
        (ForgetsReads, FREED_BEFORE_THE_SECOND_READER),
        (CompletesEverything, FREED_IN_FLIGHT),
        (MixesSpaces, OTHERS_ARE_BUSY),
        (TakesAllForOne, REUSE),
        (HoldsReadersToTheOwner, SHARED_PREFIX),
        (PassesOverNoRequest, STATE_COPY_INTO_A_FREE_SLOT),
        (HoldsForNoRequest, STATE_COPY),
        (KnowsEverySpace, HOUSEKEEPING),
        (KnowsEverySpace, TABLES_AND_SEALS),
        (ForgetsReads, HOST_PAGE_FREED_BEFORE_ITS_LOAD),
        (NeverFrees, REUSE),
        (NeverFrees, DOUBLE_FREE),
    ],
)
def test_a_broken_oracle_is_noticed(broken: Callable[[], LifetimeOracle], events: tuple[Event, ...]) -> None:
    assert judge(broken(), History.of(*events)) != judge(LifetimeOracle(), History.of(*events))
