"""HiCache beside other requests: aborts, rings, rounds, duplicates, and random lives of everything at once."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.cache import BACKENDS, REQUESTS, Rig, check_counts, check_values, rig_of
from rigs.examples import examples

from kvcheck.core.cache.backend.simulated import Choice, Goal, SimulatedBackend
from kvcheck.core.cache.events import Evicted
from kvcheck.core.cache.hicache.cache import WRITE_POLICIES, Lease
from kvcheck.core.cache.hicache.eviction import EVICTION_ORDERS
from kvcheck.core.cache.hicache.host_pool import COPY_METHODS, HOST_LAYOUTS
from kvcheck.core.cache.hicache.node import make_copy, merge
from kvcheck.core.stress.history import History
from kvcheck.core.stress.workload.shapes import TINY_SHAPES


class HeldBack:
    """Everything runs at once, but for the lanes that are held back, by their patterns."""

    def __init__(self, *lanes: str) -> None:
        self.lanes = set(lanes)

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        free = [at for at, (pending, _) in enumerate(enabled) if not self._is_held(pending.lane.name)]
        return free[0] if free else None if may_pause else 0

    def _is_held(self, lane: str) -> bool:
        return any(fnmatchcase(lane, pattern) for pattern in self.lanes)


def held_back(name: str, *lanes: str, **config: object) -> tuple[Rig, HeldBack]:
    history, chooser = History(keep=True), HeldBack(*lanes)
    return rig_of(name, SimulatedBackend(chooser, history.emit), history=history, **config), chooser  # type: ignore[arg-type]


# Aborts


@pytest.mark.parametrize("moment", ["admitted", "started", "prepared", "computed", "retracted"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_request_that_ends_early_leaves_nothing_behind(name: str, backend: str, moment: str) -> None:
    rig = rig_of(name, backend)
    rig.serve("abc")
    rig.demote("abc")
    lease = rig.admit("abcd")
    if moment != "admitted":
        rig.cache.start_loads()
    if moment == "prepared":
        rig.cache.prepare([lease])
    if moment in ("computed", "retracted"):
        rig.run(lease, "abcd", keep=moment == "retracted")
    if moment == "retracted":
        rig.cache.drop(lease)
        assert (lease.node, lease.loads, lease.state_from) == (rig.tree.root, [], None)
    rig.abort(lease)
    rig.cache.settle()
    assert rig.cache.locked() == 0 and rig.tree.root.locks == 0
    assert rig.serve("abc") == 3
    rig.close()


# Rings and rounds


@pytest.mark.parametrize("ring", [1, 2])
def test_with_the_ring_full_a_load_is_deferred_until_the_oldest_is_acknowledged(ring: int) -> None:
    rig, chooser = held_back("llama-3-tiny", "hicache.h2d.*", ring=ring)
    texts = ["a", "b", "c"][: ring + 1]
    for text in texts:
        rig.serve(text)
        rig.demote(text)
    rig.spoil()
    leases: list[Lease] = []
    for text in texts:
        assert rig.cache.is_deferring == rig.cache.must_defer(rig.tokens(text)) == (len(leases) == ring)
        leases.append(rig.admit(text))
        rig.cache.start_loads()
    assert [rig.cache.is_loaded(each) for each in leases] == [True] * ring + [False]
    assert not rig.cache.must_defer(rig.tokens(texts[0])), "it is on its way to the device"
    assert not rig.cache.must_defer(rig.tokens("z")), "nobody has it"
    chooser.lanes.clear()
    assert rig.cache.poll() and not rig.cache.is_deferring
    rig.cache.start_loads()
    assert all(rig.cache.is_loaded(each) for each in leases)
    for lease, text in zip(leases, texts, strict=True):
        rig.run(lease, text)
        rig.finish(lease, text)
    rig.close()


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_finished_transfer_is_acknowledged_in_the_round_that_the_period_names(period: int) -> None:
    rig = rig_of(ack_period=period)
    rig.serve("ab")
    assert [rig.cache.poll() for _ in range(period)] == [False] * (period - 1) + [True]
    assert rig.node("ab").is_backed
    assert not any(rig.cache.poll() for _ in range(2 * period))
    rig.close()


def test_transfers_are_acknowledged_in_their_order() -> None:
    rig = rig_of(backend="simulated, lazy")
    for text in ("a", "b"):
        rig.serve(text)
    assert rig.cache.wait_oldest()
    assert [rig.node(text).is_backed for text in ("a", "b")] == [True, False]
    rig.cache.settle()
    assert [rig.node(text).is_backed for text in ("a", "b")] == [True, True]
    assert not rig.cache.wait_oldest()
    rig.close()


def test_an_eviction_beside_a_load_says_so() -> None:
    rig = rig_of(backend="simulated, lazy")
    for text in ("a", "b"):
        rig.serve(text)
        rig.demote(text)
    lease = rig.admit("a")
    rig.cache.start_loads()
    assert rig.residency.evict_host("full", 1) == 1
    told = [event for event in rig.history.events if isinstance(event, Evicted)]
    assert told[-1] == Evicted("host", "full", True)
    rig.abort(lease)
    rig.close()


# What requests give and keep


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_what_was_decoded_is_offered_at_the_end(name: str) -> None:
    rig = rig_of(name, "simulated, random")
    lease = rig.admit("abc")
    rig.run(lease, "abc", keep=False)
    rig.run(lease, "abcdef", keep=False)
    rig.finish(lease, "abcdef")
    rig.check()
    served = 0 if rig.pool.has_state else 6
    assert rig.serve("abcdefg") == served
    rig.close()


def test_a_cached_state_never_takes_the_slot_of_a_request_that_can_still_be_opened() -> None:
    rig = rig_of("qwen3-next-tiny", states=1)
    rig.serve("a")
    rig.cache.settle()
    rig.serve("b")
    assert (rig.node("a").device.state, rig.serve("b")) == (None, 1)
    leases = [rig.admit(text) for text in ("b", "x", "y")]
    assert len(leases) == REQUESTS
    for lease in leases:
        rig.abort(lease)
    rig.close()


def test_keeping_nothing_gives_the_root_nothing() -> None:
    rig = rig_of("qwen3-next-tiny")
    lease = rig.admit("a")
    rig.cache.keep(lease, rig.tokens(""))
    rig.finish(lease, "")
    assert rig.tree.root.device.state is None
    rig.close()


def test_a_window_is_loaded_where_it_is_seen_and_only_there() -> None:
    rig = rig_of("gpt-oss-tiny", "simulated, random")  # pages of 4, a window of 10: three pages are seen
    for text in ("ab", "abcd", "abcdef"):
        rig.serve(text)
    rig.demote("abcdef")
    rig.spoil()
    assert rig.serve("abcdef") == 6
    held = [len(rig.node(text).device.ids("window")) for text in ("ab", "abcd", "abcdef")]
    assert held == [0, 1, 2]
    assert rig.serve("abcd") == 4  # now the rest of its own window is missing
    assert len(rig.node("abcd").device.ids("window")) == 2
    rig.close()


def test_direct_copies_take_host_pages_in_order_and_leave_the_values_they_got() -> None:
    copy = make_copy("full", np.array([5, 1, 3]), np.array([2, 9, 4]), (b"x", b"y", b"z"), owners=np.array([7, 8, 9]))
    (moved,) = rig_of(method="direct").controller.move((copy,))
    assert (moved.host.tolist(), moved.device.tolist(), moved.chain) == ([1, 3, 5], [9, 4, 2], (b"y", b"z", b"x"))
    assert (moved.owners.tolist(), copy.owners.tolist()) == ([8, 9, 7], [7, 8, 9])
    assert (copy.host.tolist(), copy.device.tolist(), copy.chain) == ([5, 1, 3], [2, 9, 4], (b"x", b"y", b"z"))
    assert rig_of(method="kernel").controller.move((copy,)) == (copy,)


def test_merging_joins_legs_by_space_in_the_order_they_came() -> None:
    copies = [
        make_copy(space, np.array(host), np.array(device), (b"x",) * len(host), owners=host[0])
        for space, host, device in (("full", [1, 2], [3, 4]), ("state", [7], [8]), ("full", [5], [6]))
    ]
    full, state = merge(copies)
    assert (full.space, full.host.tolist(), full.device.tolist()) == ("full", [1, 2, 5], [3, 4, 6])
    assert full.owners.tolist() == [1, 1, 5]
    assert (state.space, state.host.tolist(), state.device.tolist()) == ("state", [7], [8])


# Everything at once


def play(rig: Rig, program: list[tuple[str, str, int]], *, closed: bool) -> None:
    """Random lives. closed: what is backed up is closed under prefixes."""
    under_way: list[tuple[Lease, str]] = []
    for verb, text, n in program:
        if verb == "admit" and len(under_way) < REQUESTS and not rig.cache.is_deferring:
            under_way.append((rig.admit(text), text))
        elif verb == "round":
            rig.cache.start_loads()
            rig.cache.poll()
        elif verb == "evict":
            spaces = [*rig.pool.sets]
            rig.cache.evict(spaces[n % len(spaces)], n)
        elif under_way and verb in ("finish", "abort"):
            lease, text = under_way.pop(n % len(under_way))
            if verb == "abort":
                rig.abort(lease)
            else:
                while not rig.cache.is_loaded(lease):
                    rig.cache.start_loads()
                    if not rig.cache.is_loaded(lease):
                        assert rig.cache.wait_oldest()
                rig.run(lease, text, keep=bool(n % 2))
                rig.finish(lease, text)
        check_counts(rig)
        check_values(rig)
        for node in rig.tree.nodes() if closed else ():
            assert node.parent is not None
            assert not node.host.is_live or node.parent is rig.tree.root or node.parent.host.is_live
    for lease, _ in under_way:
        rig.abort(lease)
    rig.close()


PROGRAMS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "finish", "finish", "round", "abort", "evict"]),
        st.text(alphabet="ab", min_size=1, max_size=3),
        st.integers(0, 6),
    ),
    min_size=5,
    max_size=30,
)


@examples(25)
@given(
    program=PROGRAMS,
    backend=st.sampled_from([*BACKENDS]),
    layout=st.sampled_from(HOST_LAYOUTS),
    method=st.sampled_from(COPY_METHODS),
    write_policy=st.sampled_from([*WRITE_POLICIES]),
    order=st.sampled_from([*EVICTION_ORDERS]),
    ring=st.integers(1, 3),
    ack_period=st.integers(1, 3),
)
@pytest.mark.parametrize("name", ["llama-3-tiny", "glm-5.1-tiny", "gpt-oss-tiny", "qwen3-next-tiny"])
def test_random_lives_read_right_words_and_leave_nothing_behind(
    name: str, program: list[tuple[str, str, int]], backend: str, **config: object
) -> None:
    rig = rig_of(name, backend, pages=9, host_pages=6, host_window=5, host_states=3, **config)  # type: ignore[arg-type]
    play(rig, program, closed=config["write_policy"] != "write-back")
