"""The lifetime oracle on literal histories: freed in flight, used while free, freed twice, written for another.

Reuse is right or wrong by the operations that have completed before the free, never by how much lies between.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
from kvcheck.core.cache.events import Allocated, Freed
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.lifetime import LifetimeOracle
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, judge
from kvcheck.core.stress.workload.events import Event

Ids = tuple[int, ...]


def alloc(owner: int, *ids: int, space: str = "full") -> Allocated:
    return Allocated(space, ids, owner)


def free(*ids: int, space: str = "full") -> Freed:
    return Freed(space, ids)


def done(*ordinals: int) -> tuple[Event, ...]:
    return tuple(map(Completed, ordinals))


def touching(ids: Ids, *, owner: int | None = None, space: str = "full") -> tuple[Footprint, ...]:
    owners = None if owner is None else np.full(len(ids), owner)
    return (Footprint(space, ("latent",), (0, 1), np.array(ids, dtype=np.int64), owners=owners),)


def write(ordinal: int, *ids: int, owner: int | None = None, space: str = "full") -> Submitted:
    return Submitted(ordinal, "decode.write", "forward", (), touching(ids, owner=owner, space=space))


def read(ordinal: int, *ids: int, owner: int | None = None, space: str = "full") -> Submitted:
    return Submitted(ordinal, "offload.save", "offload", touching(ids, owner=owner, space=space), ())


def backup(owner: int = 2) -> Submitted:
    """Page 3 goes to host page 0."""
    source, target = touching((3,), owner=owner), touching((0,), owner=owner, space="host.full")
    return Submitted(1, "hicache.backup", "hicache.d2h", source, target)


def load() -> Submitted:
    """Host page 0 comes to page 3, for request 2."""
    source, target = touching((0,), owner=2, space="host.full"), touching((3,), owner=2)
    return Submitted(1, "hicache.load", "hicache.h2d.0", source, target)


REUSE: tuple[Event, ...] = (
    *(alloc(1, 3, 4), write(1, 3, 4, owner=1), read(2, 3, 4, owner=1), *done(1, 2), free(3, 4)),
    *(alloc(2, 4, 3), write(3, 3, 4, owner=2), *done(3), free(3, 4)),
)
SHARED: tuple[Event, ...] = (
    *(alloc(1, 3), write(1, 3, owner=1), alloc(2, 5), alloc(4, 6), read(2, 3, 5, owner=2), read(3, 3, 6, owner=4)),
    *done(1, 3),
)
BACKUP = (alloc(1, 3), alloc(2, 0, space="host.full"))
LOAD = (alloc(1, 0, space="host.full"), alloc(2, 3))
COPY_STATE = Submitted(1, "hicache.copy_state", "f", touching((1,), space="state"), touching((2,), space="state"))

GOOD: dict[str, tuple[Event, ...]] = {
    "reuse after completion": REUSE,
    "a prefix read by several requests": (*SHARED, *done(2), free(3, 5, 6)),
    "other pages and other spaces are busy": (
        *(alloc(1, 3, 4), alloc(1, 3, space="state"), read(1, 4, owner=1), read(2, 3, owner=1, space="state"), free(3)),
    ),
    "read and written by one operation": (
        *(alloc(1, 3), Submitted(1, "pool.move", "f", touching((3,), owner=1), touching((3,), owner=1))),
        *(*done(1), free(3)),
    ),
    "writes that name no request": (write(1, 3, 4), alloc(1, 3), write(2, 3), free(3), *done(1, 2)),
    "a backup": (*BACKUP, backup(), *done(1), free(3), free(0, space="host.full")),
    "a load of a host page that another request left": (*LOAD, load(), *done(1), free(0, space="host.full"), free(3)),
    "a slot that is given away while the lane still copies it": (
        *(alloc(1, 1, space="state"), alloc(1, 2, space="state"), COPY_STATE, free(1, space="state")),
        *(alloc(2, 1, space="state"), write(2, 1, owner=2, space="state"), *done(1, 2)),
    ),
    "rows that nobody hands out": (alloc(1, 1), write(1, 7, space="table"), write(2, 7, space="seals"), free(1)),
    "ids far apart": (alloc(1, 1), alloc(2, 5000), write(1, 5000, owner=2), *done(1), free(5000, 1)),
}

# code, tier, request and page, and words of the message
Said = tuple[str, str, int | None, int, str]
BAD: dict[str, tuple[Said, tuple[Event, ...]]] = {
    "freed in flight": (
        ("KV202", "device", 1, 4, "full page 4 was freed while offload.save"),
        (alloc(1, 3, 4), write(1, 3, owner=1), read(2, 3, 4, owner=1), *done(1), free(4)),
    ),
    "freed before the second reader": (("KV202", "device", 1, 3, "while offload.save"), (*SHARED, free(3))),
    "used after free": (
        ("KV202", "device", None, 3, "is free, yet decode.write writes it"),
        (alloc(1, 3), free(3), write(1, 3, owner=1)),
    ),
    "never allocated": (("KV202", "device", None, 3, "is free, yet offload.save reads it"), (read(1, 3, owner=1),)),
    "freed twice": (("KV402", "device", None, 3, "is not allocated"), (alloc(1, 3, 4), free(3), free(4, 3))),
    "handed out twice": (("KV402", "device", 2, 3, "while request 1 holds it"), (alloc(1, 3), alloc(2, 3))),
    "written for another": (
        ("KV403", "device", 2, 3, "belongs to request 1, yet decode.write writes it for request 2"),
        (alloc(1, 3), alloc(2, 4), write(1, 3, 4, owner=2)),
    ),
    "a host page freed before its backup": (
        ("KV202", "host", 2, 0, "host.full page 0 was freed while hicache.backup"),
        (*BACKUP, backup(), free(0, space="host.full")),
    ),
    "the source freed before its backup": (
        ("KV202", "device", 1, 3, "full page 3 was freed while hicache.backup"),
        (*BACKUP, backup(), free(3)),
    ),
    "a host page freed before its load": (
        ("KV202", "host", 1, 0, "while hicache.load"),
        (*LOAD, load(), free(0, space="host.full")),
    ),
    "a load into a free page": (("KV202", "device", None, 3, "yet hicache.load writes it"), (LOAD[0], load())),
    "a backup into another's host page": (
        ("KV403", "host", 1, 0, "host.full page 0 belongs to request 2"),
        (*BACKUP, backup(owner=1)),
    ),
    "a state copied into a free slot": (
        ("KV202", "device", None, 2, "state slot 2 is free, yet hicache.copy_state writes it"),
        (alloc(1, 1, space="state"), COPY_STATE),
    ),
    "a value dropped before its restore": (
        ("KV202", "host", 1, 4, "host.offload value 4 was freed"),
        (
            *(alloc(1, 4, space="host.offload"), read(1, 4, owner=1, space="host.offload")),
            free(4, space="host.offload"),
        ),
    ),
    "one reuse in flight does not taint the next owner": (
        ("KV202", "device", 1, 4, "while offload.save"),
        (
            *(alloc(1, 3, 4), read(2, 3, 4, owner=1), free(4), alloc(2, 4), *done(2)),
            *(write(3, 4, owner=2), *done(3), free(4)),
        ),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_fine_stays_green_and_is_judged(name: str) -> None:
    oracle = LifetimeOracle()
    assert judge(oracle, History.of(*GOOD[name])) == ()
    assert oracle.judged > 0


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_names_page_and_request(name: str) -> None:
    (code, tier, request, page, words), events = BAD[name]
    (found,) = judge(LifetimeOracle(), History.of(*events))
    assert (found.code, found.tier, found.request, found.page) == (code, tier, request, page)
    assert (found.oracle, found.seen_request, found.buffer, found.layer) == ("lifetime", None, None, None)
    assert words in found.message


def test_a_free_page_written_beside_a_foreign_one_is_two_findings() -> None:
    findings = judge(LifetimeOracle(), History.of(alloc(1, 3), write(1, 3, 4, owner=2)))
    assert [(found.code, found.page) for found in findings] == [("KV202", 4), ("KV403", 3)]


def test_ids_of_operations_and_frees_are_counted_one_by_one() -> None:
    oracle = LifetimeOracle()
    judge(oracle, History.of(*REUSE, read(4), *done(4)))
    assert oracle.judged == 3 * 2 + 2 * 2


def test_more_of_the_same_is_not_listed() -> None:
    events = [free(page) for page in range(1, MAX_FINDINGS + 9)]
    assert len(judge(LifetimeOracle(), History.of(*events))) == MAX_FINDINGS
