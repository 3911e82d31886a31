"""What the host tier must keep true whatever the schedule, and which oracle or test would notice if it did not.

Invariants:
- Each row names a check that exists: an oracle judges it in every run, a test proves it on cases made for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariant:
    """One rule. oracles: rows of ORACLES that judge it in every run. tests: "file::function" under tests/."""

    name: str
    shows: str
    oracles: tuple[str, ...] = ()
    tests: tuple[str, ...]

    @property
    def checked_by(self) -> str:
        """The oracles and tests, in one line."""
        named = [f"oracle {name}" for name in self.oracles] + [f"tests/{name}" for name in self.tests]
        return ", ".join(named)


INVARIANTS = (
    Invariant(
        name="H1",
        shows="No move of a transfer changes the index values of nodes, requests or other transfers. They keep "
        "their numbers and their memory when a transfer is started, moved or merged.",
        oracles=("residency",),
        tests=(
            "test_hicache.py::test_loads_of_one_round_are_merged_and_each_request_keeps_its_own_values",
            "test_hicache.py::test_index_values_belong_to_the_node_the_transfer_and_the_request_each",
        ),
    ),
    Invariant(
        name="H2",
        shows="A node owns its index values, which are read-only and shared with no queue and no other node. They "
        "are int64 on the host, one a page, or one slot for a state.",
        oracles=("residency",),
        tests=(
            "test_hicache.py::test_index_values_belong_to_the_node_the_transfer_and_the_request_each",
            "test_radix_tree.py::test_the_tree_and_its_callers_do_not_share_index_memory",
        ),
    ),
    Invariant(
        name="H3",
        shows="The host pages and slots of a node are allocated as long as it names them, and are freed once.",
        oracles=("lifetime", "residency", "liveness"),
        tests=(
            "test_eviction.py::test_every_id_is_given_back_once_by_the_tier_that_holds_it",
            "test_eviction.py::test_a_tombstone_keeps_its_pages_and_frees_its_companions_once",
        ),
    ),
    Invariant(
        name="H4",
        shows="Nobody reads a layer of a page before that layer has been loaded. This holds on a second lane, in a "
        "companion buffer and in a replayed graph.",
        oracles=("ordering", "content"),
        tests=(
            "test_layer_gate.py::test_a_reader_waits_on_its_own_lane_for_its_own_layer_on_every_load_lane",
            "test_layer_gate.py::test_two_readers_each_wait_for_themselves",
            "test_layer_gate.py::test_before_a_graph_is_replayed_its_lane_waits_for_the_last_layer_of_every_load",
            "test_benign.py::test_the_same_harness_finds_a_variation_that_drops_an_edge",
        ),
    ),
    Invariant(
        name="H5",
        shows="A page that is being copied between tiers is not freed, evicted or reused until the copy is "
        "acknowledged. This holds on both sides, also when the node is split.",
        oracles=("ordering", "content"),
        tests=(
            "test_hicache.py::test_nothing_of_a_transfer_is_evicted_before_it_is_acknowledged",
            "test_hicache.py::test_a_split_during_a_backup_acknowledges_both_halves",
            "test_hicache.py::test_a_split_during_a_load_acknowledges_both_halves",
            "test_hicache.py::test_a_load_makes_room_by_evicting_others_and_never_what_it_loads",
        ),
    ),
    Invariant(
        name="H6",
        shows="A backup reads what the passes before it have computed, and before anybody writes over it.",
        oracles=("ordering", "content"),
        tests=(
            "test_invariants.py::test_a_backup_waits_for_the_pass_that_computes_its_pages",
            "test_hicache.py::test_write_back_waits_for_the_copy_before_it_gives_the_pages_away",
        ),
    ),
    Invariant(
        name="H7",
        shows="A ring entry is armed again only after the host has seen its load finish. With all entries in "
        "flight a load is put off, and nothing fails.",
        oracles=("ordering",),
        tests=(
            "test_layer_gate.py::test_the_ring_is_full_when_every_entry_is_in_flight_and_its_oldest_comes_free_first",
            "test_layer_gate.py::test_an_entry_that_is_armed_again_stands_for_the_new_load_alone",
            "test_layer_gate.py::test_the_ring_is_a_queue_of_as_many_loads",
        ),
    ),
    Invariant(
        name="H8",
        shows="What left the device is on the host, and no lookup goes past a node that no tier can serve. When "
        "writing through, nothing is backed up under a parent that is not.",
        oracles=("residency",),
        tests=(
            "test_hicache.py::test_a_node_is_not_backed_up_under_a_parent_that_is_not",
            "test_hicache.py::test_a_node_that_was_not_backed_up_is_dropped_by_eviction",
            "test_hicache.py::test_a_prefix_whose_state_or_window_is_gone_on_both_tiers_is_not_served",
        ),
    ),
    Invariant(
        name="H9",
        shows="Evictable and locked pages of each space add up to the cached ones. A lock on a node holds its "
        "ancestors too.",
        oracles=("accounting",),
        tests=(
            "test_hicache.py::test_a_prefix_that_left_the_device_comes_back_bit_for_bit",
            "test_eviction.py::test_a_lock_keeps_a_path_on_the_device_and_a_host_lock_on_the_host",
            "test_radix_tree.py::test_both_halves_of_a_split_keep_the_locks_and_unlocking_reaches_both",
        ),
    ),
    Invariant(
        name="H10",
        shows="Loading back is all or nothing. Where it fails, every lock, page and slot on both tiers is as before.",
        oracles=("accounting",),
        tests=(
            "test_hicache.py::test_a_load_that_does_not_fit_leaves_everything_as_it_was",
            "test_hicache.py::test_a_load_that_does_not_fit_still_serves_what_the_device_holds",
        ),
    ),
    Invariant(
        name="H11",
        shows="A prefix from storage is no longer than the companion buffers that came with it allow. It is looked "
        "up only once its bytes are there.",
        tests=(
            "test_storage.py::test_the_restorable_prefix_is_the_longest_by_definition",
            "test_storage_tier.py::test_a_prefix_is_no_longer_than_what_arrived_of_every_space",
            "test_storage_tier.py::test_a_window_page_that_did_not_arrive_ends_the_prefix_before_it",
        ),
    ),
    Invariant(
        name="H12",
        shows="Ranks that own a tree each make the same changes to it in the same order. How differently their "
        "copies run does not matter.",
        tests=(
            "test_ranks.py::test_ranks_that_agree_stay_the_same_where_others_differ",
            "test_ranks.py::test_after_every_round_all_ranks_hold_the_same_tree",
            "test_storage_tier.py::test_a_page_that_one_rank_lost_is_published_by_none",
        ),
    ),
    Invariant(
        name="H13",
        shows="Copying from device to host and back is exact, for every layout, copy method and order of ids.",
        oracles=("content",),
        tests=(
            "test_host_pool.py::test_units_go_to_the_host_and_come_back_bit_for_bit",
            "test_hicache.py::test_a_prefix_that_left_the_device_comes_back_bit_for_bit",
        ),
    ),
)
"""Numbers are stable: a retired one is not given to another rule."""
