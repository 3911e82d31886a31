"""HiCache over both tiers: the same bytes come back, all or nothing, and nothing is held longer than it is needed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rigs.cache import BACKENDS, Rig, rig_of

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.simulated import Choice, Goal, SimulatedBackend
from kvcheck.core.cache.hicache.cache import CacheConfig
from kvcheck.core.cache.hicache.host_pool import COPY_METHODS, HOST_LAYOUTS
from kvcheck.core.stress.history import History
from kvcheck.core.stress.workload.shapes import TINY_SHAPES


class ForwardFirst:
    """Nothing runs until the host waits; then the forward lane runs as far as it may."""

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        return None if may_pause else 0


def forward_first(name: str, **config: object) -> Rig:
    """A rig whose forward lane overtakes every copy that it does not wait for."""
    history = History(keep=True)
    return rig_of(name, SimulatedBackend(ForwardFirst(), history.emit), history=history, **config)  # type: ignore[arg-type]


def buffers(rig: Rig) -> set[str]:
    return {f"{space}.{each.name}" for space, each in rig.pool.buffers()}


# The way down and back


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_prefix_that_left_the_device_comes_back_bit_for_bit(
    name: str, layout: str, method: str, backend: str
) -> None:
    rig = rig_of(name, backend, layout=layout, method=method)
    assert [rig.serve(text) for text in ("abc", "abc", "abcde", "xy")] == [0, 3, 3, 0]
    rig.cache.settle()
    rig.cache.evict("full", 9)
    assert rig.cache.cached("device", "full") == 0
    assert rig.residency.device_evictions == 3
    rig.spoil()
    rig.words.clear()
    assert rig.serve("abcdef") == 5
    assert rig.serve("xy") == 2
    rig.check()
    assert set(rig.words) == buffers(rig)
    rig.close()


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_only_what_the_request_asks_for_is_loaded(name: str) -> None:
    rig = rig_of(name, "simulated, random")
    if rig.pool.has_state:
        rig.serve("ab")
    rig.serve("abcd")
    rig.demote("abcd")
    rig.spoil()
    assert rig.serve("abx") == 2
    rig.check()
    assert rig.node("ab").device.is_live and not rig.node("abcd").device.is_live
    assert rig.serve("abcd") == 4
    rig.close()


def test_a_second_load_that_brings_a_companion_is_waited_for_as_well() -> None:
    rig = forward_first("qwen3-next-tiny")
    rig.serve("a")
    rig.serve("ab")
    rig.demote("ab")
    rig.spoil()
    first = rig.admit("ab")
    rig.cache.start_loads()
    second = rig.admit("a")  # needs the state of a node whose pages the first load brings
    third = rig.admit("a")
    rig.cache.start_loads()
    assert [each.number for each in first.loads] == [3]
    assert [each.number for each in second.loads] == [each.number for each in third.loads] == [3, 4]
    for lease, text in ((second, "a"), (third, "a"), (first, "ab")):
        rig.run(lease, text)
        rig.finish(lease, text)
    rig.close()


# All or nothing


@pytest.mark.parametrize(
    ("name", "scarce"),
    [
        ("llama-3-tiny", {"pages": 4}),
        ("glm-5.1-tiny", {"pages": 4}),
        ("gpt-oss-tiny", {"window_pages": 4}),
        ("qwen3-next-tiny", {"states": 1}),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_load_that_does_not_fit_leaves_everything_as_it_was(name: str, scarce: dict[str, int], backend: str) -> None:
    rig = rig_of(name, backend, **scarce)  # type: ignore[arg-type]
    rig.serve("abc")
    rig.demote("abc")
    other = rig.admit("xy")
    rig.run(other, "xy")
    rig.cache.settle()
    before = rig.everything()
    lease = rig.admit("abc")
    assert (lease.holding.shared, lease.loads, lease.node) == (0, [], rig.tree.root)
    rig.abort(lease)
    assert rig.everything() == before
    rig.finish(other, "xy")
    rig.cache.settle()
    assert rig.cache.locked() == 0
    rig.cache.evict("full", 9)
    assert rig.serve("abc") == 3
    rig.close()


def test_a_load_that_does_not_fit_still_serves_what_the_device_holds() -> None:
    rig = rig_of(pages=4)
    rig.serve("a")
    rig.serve("abc")
    rig.cache.settle()
    rig.residency.demote(rig.node("abc"))
    other = rig.admit("xy")
    rig.run(other, "xy")
    lease = rig.admit("abc")
    assert (lease.holding.shared, lease.node.chain[-1]) == (1, rig.node("a").chain[-1])
    rig.abort(lease)
    rig.finish(other, "xy")
    rig.close()


def test_a_load_makes_room_by_evicting_others_and_never_what_it_loads() -> None:
    rig = rig_of(pages=4)
    rig.serve("ab")
    rig.serve("abcd")
    rig.cache.settle()
    rig.residency.demote(rig.node("abcd"))
    rig.serve("xy")
    rig.cache.settle()
    rig.node("ab").last_used = 0  # by their order alone, the prefix would go first
    rig.node("xy").last_used = 99
    assert rig.serve("abcd") == 4
    assert not rig.node("xy").device.is_live
    rig.close()


# Policies


@pytest.mark.parametrize(
    ("policy", "uses"), [("write-through", 1), ("write-through-selective", 2), ("write-back", None)]
)
def test_a_node_is_backed_up_at_the_use_that_its_policy_names(policy: str, uses: int | None) -> None:
    rig = rig_of(write_policy=policy)
    for use in (1, 2, 3):
        rig.serve("ab")
        rig.cache.settle()
        assert rig.node("ab").is_backed == (uses is not None and use >= uses)
    rig.cache.evict("full", 1)
    assert rig.node("ab").is_backed and not rig.node("ab").device.is_live
    assert rig.serve("ab") == 2
    rig.close()


@pytest.mark.parametrize("policy", ["write-through", "write-through-selective"])
def test_a_node_that_was_not_backed_up_is_dropped_by_eviction(policy: str) -> None:
    rig = rig_of(write_policy=policy, host_pages=2)
    rig.serve("ab")
    rig.serve("ab")
    rig.cache.settle()
    rig.serve("xyz")  # more than the host has
    rig.serve("xyz")
    rig.cache.settle()
    assert rig.node("ab").is_backed and not rig.node("xyz").is_backed
    assert rig.cache.evict("full", 9) == 5
    assert sorted(rig.nodes()) == ["ab"]
    rig.close()


def test_a_node_is_not_backed_up_under_a_parent_that_is_not() -> None:
    rig = rig_of(host_pages=2, pages=8)
    rig.serve("abc")  # no room on the host
    rig.serve("abcde")  # there would be room for the second node alone
    rig.cache.settle()
    assert [node.is_backed for node in rig.nodes().values()] == [False, False]
    rig.close()


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="write-around"):
        CacheConfig(write_policy="write-around")
    with pytest.raises(UsageError, match="ack_period"):
        CacheConfig(ack_period=0)
    with pytest.raises(UsageError, match="mru"):
        rig_of(order="mru")


# What transfers hold


def test_a_split_during_a_backup_acknowledges_both_halves() -> None:
    rig = rig_of(backend="simulated, lazy")
    rig.serve("abcd")
    (backup,) = rig.controller.backups
    whole, half = rig.admit("abcd"), rig.admit("ab")
    halves = [rig.node("ab"), rig.node("abcd")]
    assert [node.backing for node in halves] == [backup, backup]
    assert not any(node.is_backed for node in halves)
    assert [(node.locks, node.host_locks) for node in halves] == [(3, 1), (2, 1)]
    assert rig.cache.wait_oldest()
    assert [node.backing for node in halves] == [None, None]
    assert [(node.locks, node.host_locks) for node in halves] == [(2, 0), (1, 0)]
    assert all(node.is_backed for node in halves)
    rig.finish(whole, "abcd")
    rig.finish(half, "ab")
    rig.demote("abcd")
    rig.spoil()
    assert rig.serve("abcd") == 4
    rig.close()


def test_a_state_that_the_tree_gives_is_copied_and_not_shared() -> None:
    rig = rig_of("qwen3-next-tiny")
    rig.serve("ab")
    lease = rig.admit("ab")
    assert lease.state_from is rig.node("ab")
    assert rig.node("ab").device.state not in (None, lease.holding.state_slot)
    rig.run(lease, "abc")  # overwrites the request's own state
    rig.finish(lease, "abc")
    assert rig.serve("ab") == 2
    rig.close()
