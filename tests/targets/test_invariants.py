"""Every invariant of the host tier has an oracle or tests that exist; the tests of H6 are here.

Invariants:
- A test that is renamed or moved is missed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import typer
from rigs.cache import Rig, rig_of
from typer.testing import CliRunner

from kvcheck.commands import doctor
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.stress.history import History, OperationEvents
from kvcheck.core.stress.invariants import INVARIANTS, Invariant
from kvcheck.core.stress.oracles import ORACLES
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.stress.oracles.ordering import OrderingOracle
from kvcheck.core.stress.strategies import DelayStrategy

TESTS_FOLDER = Path(__file__).parents[1]

TESTS: dict[str, tuple[str, ...]] = {
    "H1": (
        "cache/hicache/test_hicache.py::test_loads_of_one_round_are_merged_and_each_request_keeps_its_own_values",
        "cache/hicache/test_hicache.py::test_index_values_belong_to_the_node_the_transfer_and_the_request_each",
    ),
    "H2": (
        "cache/hicache/test_hicache.py::test_index_values_belong_to_the_node_the_transfer_and_the_request_each",
        "cache/hicache/test_radix_tree.py::test_the_tree_and_its_callers_do_not_share_index_memory",
    ),
    "H3": (
        "cache/hicache/test_eviction.py::test_every_id_is_given_back_once_by_the_tier_that_holds_it",
        "cache/hicache/test_eviction.py::test_a_tombstone_keeps_its_pages_and_frees_its_companions_once",
    ),
    "H4": (
        "cache/hicache/test_layer_gate.py::test_a_reader_waits_on_its_own_lane_for_its_own_layer_on_every_load_lane",
        "cache/hicache/test_layer_gate.py::test_two_readers_each_wait_for_themselves",
        "cache/hicache/test_layer_gate.py::test_before_a_graph_is_replayed_its_lane_waits_for_the_last_layer_of_every_load",
        "stress/test_benign.py::test_the_same_harness_finds_a_variation_that_drops_an_edge",
    ),
    "H5": (
        "cache/hicache/test_hicache.py::test_nothing_of_a_transfer_is_evicted_before_it_is_acknowledged",
        "cache/hicache/test_hicache.py::test_a_split_during_a_backup_acknowledges_both_halves",
        "cache/hicache/test_hicache.py::test_a_split_during_a_load_acknowledges_both_halves",
        "cache/hicache/test_hicache.py::test_a_load_makes_room_by_evicting_others_and_never_what_it_loads",
    ),
    "H6": (
        "targets/test_invariants.py::test_a_backup_waits_for_the_pass_that_computes_its_pages",
        "cache/hicache/test_hicache.py::test_write_back_waits_for_the_copy_before_it_gives_the_pages_away",
    ),
    "H7": (
        "cache/hicache/test_layer_gate.py::test_the_ring_is_full_when_every_entry_is_in_flight_and_its_oldest_comes_free_first",
        "cache/hicache/test_layer_gate.py::test_an_entry_that_is_armed_again_stands_for_the_new_load_alone",
        "cache/hicache/test_layer_gate.py::test_the_ring_is_a_queue_of_as_many_loads",
    ),
    "H8": (
        "cache/hicache/test_hicache.py::test_a_node_is_not_backed_up_under_a_parent_that_is_not",
        "cache/hicache/test_hicache.py::test_a_node_that_was_not_backed_up_is_dropped_by_eviction",
        "cache/hicache/test_hicache.py::test_a_prefix_whose_state_or_window_is_gone_on_both_tiers_is_not_served",
    ),
    "H9": (
        "cache/hicache/test_hicache.py::test_a_prefix_that_left_the_device_comes_back_bit_for_bit",
        "cache/hicache/test_eviction.py::test_a_lock_keeps_a_path_on_the_device_and_a_host_lock_on_the_host",
        "cache/hicache/test_radix_tree.py::test_both_halves_of_a_split_keep_the_locks_and_unlocking_reaches_both",
    ),
    "H10": (
        "cache/hicache/test_hicache.py::test_a_load_that_does_not_fit_leaves_everything_as_it_was",
        "cache/hicache/test_hicache.py::test_a_load_that_does_not_fit_still_serves_what_the_device_holds",
    ),
    "H11": (
        "cache/hicache/test_storage.py::test_the_restorable_prefix_is_the_longest_by_definition",
        "cache/hicache/test_storage_tier.py::test_a_prefix_is_no_longer_than_what_arrived_of_every_space",
        "cache/hicache/test_storage_tier.py::test_a_window_page_that_did_not_arrive_ends_the_prefix_before_it",
    ),
    "H12": (
        "cache/hicache/test_ranks.py::test_ranks_that_agree_stay_the_same_where_others_differ",
        "cache/hicache/test_ranks.py::test_after_every_round_all_ranks_hold_the_same_tree",
        "cache/hicache/test_storage_tier.py::test_a_page_that_one_rank_lost_is_published_by_none",
    ),
    "H13": (
        "cache/hicache/test_host_pool.py::test_units_go_to_the_host_and_come_back_bit_for_bit",
        "cache/hicache/test_hicache.py::test_a_prefix_that_left_the_device_comes_back_bit_for_bit",
    ),
}
"""Tests of each invariant, as "file::function" under tests/."""


def functions(file: str) -> set[str]:
    """Names of the test functions of a file under tests/."""
    tree = ast.parse((TESTS_FOLDER / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def missing(tests: Iterable[str]) -> list[str]:
    """The tests that do not exist."""
    named = [(test, *test.split("::")) for test in tests]
    return [
        test for test, file, function in named if not (TESTS_FOLDER / file).is_file() or function not in functions(file)
    ]


def test_invariants_are_numbered_without_a_gap() -> None:
    assert [each.name for each in INVARIANTS] == [f"H{number}" for number in range(1, 17)]
    assert TESTS.keys() <= {each.name for each in INVARIANTS}


@pytest.mark.parametrize("each", INVARIANTS, ids=lambda each: each.name)
def test_every_invariant_is_checked_by_something_that_exists(each: Invariant) -> None:
    tests = TESTS.get(each.name, ())
    assert each.oracles or tests
    assert set(each.oracles) <= set(ORACLES.names())
    assert missing(tests) == []


def test_a_test_that_does_not_exist_is_noticed() -> None:
    wrong = ["no_file.py::test_x", "targets/test_invariants.py::test_x", "targets/test_invariants.py::functions"]
    assert missing(wrong) == wrong


def test_list_says_of_each_invariant_what_checks_it() -> None:
    app = typer.Typer()
    app.command("list")(doctor.list_kind)
    app.command("explain")(doctor.explain)
    rows = json.loads(CliRunner().invoke(app, ["list", "invariants", "--json"]).output)
    assert [(row["name"], row["oracles"]) for row in rows] == [(each.name, list(each.oracles)) for each in INVARIANTS]
    assert "oracle ordering, oracle content" in CliRunner().invoke(app, ["explain", "h4"]).output
    listed = CliRunner().invoke(app, ["list", "invariants"]).output
    assert listed.count("(checked by this project's own tests)") == 2  # H11 and H12
    assert "(checked by oracle ordering)" in listed


# H6: a backup reads what has been computed


class UnorderedBackup(TransferController):
    """Backups do not wait for the forward lane; loads do."""

    def _behind_forward(self) -> tuple[Signal, ...]:
        return () if not self._queued else super()._behind_forward()


def backed_up_behind_a_slow_pass(monkeypatch: pytest.MonkeyPatch, controller: type[TransferController]) -> Rig:
    """A prefix is computed by a pass that runs when it is waited for, backed up, loaded back and read."""
    monkeypatch.setattr("rigs.cache.TransferController", controller)
    history = History(keep=True)
    rig = rig_of(
        "llama-3-tiny", SimulatedBackend(DelayStrategy(["compute"]), OperationEvents(history.emit)), history=history
    )
    rig.serve("abc")
    assert rig.controller.backups
    rig.demote("abc")
    rig.spoil()
    assert rig.serve("abc") == 3
    rig.backend.drain()
    return rig


def test_a_backup_waits_for_the_pass_that_computes_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = backed_up_behind_a_slow_pass(monkeypatch, TransferController)
    rig.close()
    assert rig.words


def test_a_backup_that_does_not_wait_keeps_what_the_pages_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = backed_up_behind_a_slow_pass(monkeypatch, UnorderedBackup)
    assert rig.wrong
    assert OrderingOracle.name in {row for each in INVARIANTS if each.name == "H6" for row in each.oracles}
    assert judge(OrderingOracle(), rig.history) == (), "the rig's operations name no footprint: the bytes tell"
