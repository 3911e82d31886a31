"""Ranks that own a tree each: they decide on reduced numbers alone, so their trees stay the same."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, BrokenBarrierError, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.cache import Rig, rig_of
from rigs.examples import examples

from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.stress.history import History
from kvcheck.core.stress.strategies import EagerStrategy, LazyStrategy, RandomStrategy

Snapshot = list[object]
Program = list[tuple[str, str]]


class Collective:
    """Ranks meet here; each leaves with the least of what they brought."""

    def __init__(self, ranks: int) -> None:
        self._barrier = Barrier(ranks, timeout=20)
        self._brought = [0] * ranks

    def agree(self, rank: int) -> Callable[[int], int]:
        def reduce(count: int) -> int:
            self._brought[rank] = count
            self._barrier.wait()
            least = min(self._brought)
            self._barrier.wait()  # nobody brings the next number before all have read this one
            return least

        return reduce

    def leave(self) -> None:
        """A rank that has failed lets the others fail too."""
        self._barrier.abort()


def rank_of(rank: int, name: str, agree: Callable[[int], int], **config: object) -> Rig:
    """The first rank's copies run at once, the second's when they are waited for, others' at random."""
    history = History(keep=True)
    strategies = (EagerStrategy, LazyStrategy, lambda: RandomStrategy(rank))
    backend = SimulatedBackend(strategies[min(rank, 2)](), history.emit)
    small = {"pages": 6, "window_pages": 6, "host_pages": 8, "host_window": 8, "host_states": 4, "states": 3}
    return rig_of(name, backend, history=history, agree=agree, **small, **config)  # type: ignore[arg-type]


def snapshot(rig: Rig) -> Snapshot:
    """Everything that decides what a rank does next: tree, tiers, ids, order, locks, free ids, transfers."""
    return [
        [
            (
                text,
                (node.ordinal, node.last_used, node.hits, node.priority, node.locks, node.host_locks),
                [
                    [each.ids(space).tolist() for space in ("full", "window", "state")]
                    for each in (node.device, node.host)
                ],
                (node.backing is None, [each.number for each in node.loading]),
            )
            for text, node in rig.nodes().items()
        ],
        {name: each.available for name, each in (*rig.pool.allocators.items(), *rig.host.allocators.items())},
        ([each.number for each in rig.controller.backups], [each[0].number for each in rig.controller.loads]),
    ]


def follow(rig: Rig, program: Program) -> list[Snapshot]:
    """Run a program; what the rank looks like after each round."""
    rounds = []
    for verb, text in program:
        rig.cache.poll()
        if verb == "serve":
            rig.serve(text)
        elif verb == "abort":
            lease = rig.admit(text)
            rig.cache.start_loads()
            rig.cache.release(lease)
            rig.pool.close(lease.holding)
        else:
            rig.cache.evict("full", len(text))
        rounds.append(snapshot(rig))
    return rounds


def run_ranks(
    ranks: int, name: str, program: Program, *, agreeing: bool = True, **config: object
) -> list[list[Snapshot]]:
    """The rounds of every rank; they run in threads, because they meet in the reductions."""
    collective = Collective(ranks)
    rounds: list[list[Snapshot]] = [[] for _ in range(ranks)]
    failed: list[BaseException] = []

    def run(rank: int, rig: Rig) -> None:
        try:
            rounds[rank] = follow(rig, program)
            rig.check()
        except BrokenBarrierError:
            pass  # some other rank has failed, and says why
        except BaseException as error:
            failed.append(error)
            collective.leave()

    rigs = [rank_of(rank, name, collective.agree(rank) if agreeing else int, **config) for rank in range(ranks)]
    threads = [Thread(target=run, args=(rank, rig)) for rank, rig in enumerate(rigs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return rounds


EVICTING: Program = [("serve", "abc"), ("evict", "xxx"), ("serve", "abd")]
"""The second round evicts what a rank holds to be backed up, if it has heard of the end of the copy."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_decide_alone_come_to_differ(ranks: int) -> None:
    rounds = run_ranks(ranks, "llama-3-tiny", EVICTING, agreeing=False)
    assert rounds[0][0][0] == rounds[1][0][0]
    assert rounds[0][1][0] != rounds[1][1][0]


PROGRAMS = st.lists(
    st.tuples(st.sampled_from(["serve", "serve", "abort", "evict"]), st.text(alphabet="ab", min_size=1, max_size=4)),
    min_size=4,
    max_size=14,
)


@examples(15)
@given(
    program=PROGRAMS,
    ranks=st.integers(2, 3),
    policy=st.sampled_from(["write-through", "write-through-selective", "write-back"]),
    order=st.sampled_from(["lru", "lfu", "priority"]),
    ring=st.integers(1, 3),
    ack_period=st.integers(1, 3),
)
@pytest.mark.parametrize("name", ["llama-3-tiny", "gpt-oss-tiny", "qwen3-next-tiny"])
def test_after_every_round_all_ranks_hold_the_same_tree(
    name: str, program: Program, ranks: int, policy: str, order: str, ring: int, ack_period: int
) -> None:
    rounds = run_ranks(ranks, name, program, write_policy=policy, order=order, ring=ring, ack_period=ack_period)
    for each in rounds[1:]:
        assert each == rounds[0]
    assert len(rounds[0]) == len(program)
