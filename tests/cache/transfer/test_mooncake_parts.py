"""What surrounds the transfer engine, without its library: plans, frames, accepted versions."""

from __future__ import annotations

import importlib.metadata
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.errors import TransferError, UnknownVerdict, UsageError
from kvcheck.core.base.identity import MOONCAKE_BUILDS as BUILDS
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.transfer.mooncake.engine import MooncakeEngine, PeerInfo
from kvcheck.core.cache.transfer.mooncake.frames import (
    HEADER,
    MOST_PAYLOAD_BYTES,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    FrameType,
    pack_call,
    unpack_call,
    unpack_json,
)
from kvcheck.core.cache.transfer.mooncake.library import OLDEST, EngineSettings, is_new_enough, require_library
from kvcheck.core.cache.transfer.mooncake.plan import (
    BYTES_OF_A_CALL,
    ENTRIES_OF_A_CALL,
    BlockBatch,
    calls_of,
    entries_of,
)

HERE = {"a": (1 << 40, 4096), "b": (1 << 41, 4096)}
THERE = {"a": (1 << 42, 4096), "b": ((1 << 42) + 4096, 4096)}
SOON_S = 20.0


def blocks(*rows: tuple[int, int, int]) -> IndexArray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def installed(builds: dict[str, str]) -> Callable[[str], str]:

    def version(name: str) -> str:
        if name not in builds:
            raise importlib.metadata.PackageNotFoundError(name)
        return builds[name]

    return version


def moved(entries: IndexArray) -> dict[int, int]:
    return {remote + at: local + at for local, remote, size in entries.T.tolist() for at in range(size)}


def test_neighbours_are_merged_whatever_their_order_and_not_across_regions() -> None:
    batch = BlockBatch("a", "b", blocks((0, 64, 16), (16, 80, 16), (100, 48, 16), (200, 32, 8), (208, 40, 8)))
    local, remote = HERE["a"][0], THERE["b"][0]
    assert entries_of([batch], HERE, THERE).T.tolist() == [
        [local + 200, remote + 32, 16],
        [local + 100, remote + 48, 16],
        [local, remote + 64, 32],
    ]
    here = {"a": (4096, 64), "b": (4160, 64)}  # the library refuses an entry over two registrations, adjacent or not
    batches = [BlockBatch("a", "a", blocks((0, 4032, 64))), BlockBatch("b", "b", blocks((0, 0, 64)))]
    assert entries_of(batches, here, THERE).shape == (3, 2)


@pytest.mark.parametrize("rows", [((0, 8, 8),), ((0, 0, 8), (8, 8, 8)), ((8, 8, 8), (0, 0, 8))])
def test_a_plan_leaves_the_blocks_alone(rows: tuple[tuple[int, int, int], ...]) -> None:
    mine = np.asfortranarray(blocks(*rows))
    entries_of([BlockBatch("a", "a", mine)], HERE, THERE)
    assert mine.tolist() == [list(row) for row in rows]


@given(st.lists(st.tuples(st.integers(-2, 70), st.integers(-2, 70), st.integers(-1, 20)), max_size=8))
def test_a_plan_moves_the_same_bytes_or_refuses(rows: list[tuple[int, int, int]]) -> None:
    here, there = {"a": (1000, 64)}, {"a": (5000, 64)}
    targets = [target + at for _, target, size in rows for at in range(size)]
    is_inside = all(size > 0 and min(s, t) >= 0 and max(s, t) + size <= 64 for s, t, size in rows)
    if not is_inside or len(set(targets)) < len(targets):
        with pytest.raises(TransferError, match="nothing was sent"):
            entries_of([BlockBatch("a", "a", blocks(*rows))], here, there)
        return
    entries = entries_of([BlockBatch("a", "a", blocks(*rows))], here, there)
    assert moved(entries) == {5000 + t + at: 1000 + s + at for s, t, size in rows for at in range(size)}
    assert (np.diff(entries[1]) > 0).all()
    touching = (np.diff(entries[1]) == entries[2][:-1]) & (np.diff(entries[0]) == entries[2][:-1])
    assert not touching.any()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([(4096 - 7, 0, 8)], "block 1 of 2 is not inside local region a: offset 4089"),
        ([(0, 4089, 8)], "block 1 of 2 is not inside remote region b: offset 4089"),
        ([(0, 64, 0)], "0 bytes"),
        ([(-1, 64, 8)], "offset -1"),
        ([(2**63 - 1, 64, 8)], "local region a"),
        ([(0, 2**63 - 8, 8)], "remote region b"),
        ([(64, 64, 2**63 - 1)], "9223372036854775807 bytes"),
        ([(64, 7, 8)], r"one target in remote region b: \[0, 8\) and \[7, 15\)"),
    ],
)
def test_blocks_out_of_place_are_refused(batches: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        entries_of([BlockBatch("a", "b", blocks((0, 0, 8), *batches))], HERE, THERE)


def test_batches_that_share_a_target_unknown_regions_and_other_types_are_refused() -> None:
    for batches, message in (
        (
            [BlockBatch("a", "a", blocks((0, 0, 8))), BlockBatch("b", "a", blocks((0, 7, 8)))],
            "one target in the batches",
        ),
        ([BlockBatch("x", "a", blocks((0, 0, 8)))], "no region 'x' here"),
        ([BlockBatch("a", "x", blocks((0, 0, 8)))], "no region 'x' at the peer"),
    ):
        with pytest.raises(TransferError, match=message):
            entries_of(batches, HERE, THERE)
    with pytest.raises(TransferError, match="int32"):
        BlockBatch("a", "a", blocks((0, 0, 8)).astype(np.int32))
    assert entries_of([BlockBatch("a", "a", blocks())], HERE, THERE).shape == (3, 0)


@pytest.mark.parametrize("sizes", [[8] * 2500, [BYTES_OF_A_CALL] * 2, [BYTES_OF_A_CALL * 2, 8], [200 << 20] * 5])
def test_calls_are_small_and_together_everything(sizes: list[int]) -> None:
    lengths = np.array(sizes, dtype=np.int64)
    entries = np.stack((np.arange(len(sizes)) * 10, np.arange(len(sizes)) * 10, lengths))
    calls = list(calls_of(entries))
    assert np.array_equal(np.concatenate(calls, axis=1), entries)
    for call in calls:
        assert 0 < call.shape[1] <= ENTRIES_OF_A_CALL
        assert call[2].sum() <= BYTES_OF_A_CALL or call.shape[1] == 1


def linked() -> tuple[Channel, Channel, socket.socket]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right), left


def test_frames_arrive_whole_however_they_are_cut() -> None:
    sender, receiver, raw = linked()
    columns = np.arange(6, dtype=np.int64)
    data = HEADER.pack(FrameType.WRITE, 7, len(pack_call(columns.tobytes(), "h:1"))) + pack_call(
        columns.tobytes(), "h:1"
    )
    for at in range(len(data)):
        raw.send(data[at : at + 1])
    sender.send(FrameType.DONE, 8, b"")
    frame = receiver.receive(deadline=time.monotonic() + SOON_S)
    assert (frame.kind, frame.number) == (FrameType.WRITE, 7)
    assert unpack_call(frame.payload) == ("h:1", [0, 1], [2, 3], [4, 5])
    assert receiver.receive(deadline=time.monotonic() + SOON_S).number == 8
    with pytest.raises(ChannelTimeout):
        receiver.receive(deadline=0.0)
    sender.close()
    with pytest.raises(ChannelClosed):
        receiver.receive(deadline=time.monotonic() + SOON_S)
    receiver.close()


@pytest.mark.parametrize("header", [(99, 0, 8), (FrameType.WRITE, 0, MOST_PAYLOAD_BYTES + 1)])
def test_what_is_no_frame_ends_the_channel(header: tuple[int, int, int]) -> None:
    sender, receiver, raw = linked()
    raw.send(HEADER.pack(*header))
    with pytest.raises(ChannelClosed, match="no frame"):
        receiver.receive(deadline=time.monotonic() + SOON_S)
    sender.close()
    receiver.close()


def test_a_full_socket_does_not_hold_the_sender_for_ever() -> None:
    sender, receiver, _ = linked()
    with pytest.raises(ChannelTimeout):
        for number in range(1000):
            sender.send(FrameType.WRITE, number, bytes(1 << 16), deadline=time.monotonic() + 0.05)
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("unpack", "payload"),
    [
        (unpack_call, b"\x05" + bytes(7)),
        (unpack_call, pack_call(bytes(48), "")[:-1]),
        *((unpack_json, payload) for payload in (b"[]", b"{", b"\xff")),
    ],
)
def test_a_payload_that_is_cut_short_or_no_object_is_refused(unpack: Callable[[bytes], object], payload: bytes) -> None:
    with pytest.raises(ChannelClosed):
        unpack(payload)


ENOUGH = ("0.3.13.post1", "0.3.13.post2", "0.3.14", "0.3.14rc1", "0.4", "1.0.0", "0.3.13.post1+cu13")
TOO_OLD = ("0.3.13", "0.3.13rc2", "0.3.12.post9", "0.3.9", "newest")


@pytest.mark.parametrize("version", [*ENOUGH, *TOO_OLD])
def test_versions(version: str) -> None:
    assert is_new_enough(version) is (version in ENOUGH)


@pytest.mark.parametrize(
    ("builds", "message"),
    [
        ({}, "needs the mooncake transfer engine; next: pip install"),
        ({BUILDS[0]: "0.3.12.post1"}, f"{BUILDS[0]} 0.3.12.post1 .*expected {OLDEST}"),
        ({BUILDS[0]: "0.3.14", BUILDS[2]: "0.3.14"}, f"pip uninstall -y {BUILDS[0]} {BUILDS[2]}"),
    ],
)
def test_a_library_that_will_not_do_is_unknown(
    builds: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", installed(builds))
    with pytest.raises(UnknownVerdict, match=message) as caught:
        MooncakeEngine({})
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(importlib.metadata, "version", installed({BUILDS[1]: "0.3.15"}))
    assert require_library() == "0.3.15"


def test_settings_reach_the_library_by_name_and_senseless_ones_are_usage_errors() -> None:
    variables = EngineSettings(progress_s=3, variables=(("MC_LOG_LEVEL", "INFO"),)).environment("rdma")
    assert variables["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "3" and variables["MC_LOG_LEVEL"] == "INFO"
    assert variables["MC_FORCE_HCA"] == "1" and "MC_FORCE_TCP" not in variables
    wrong: tuple[dict[str, Any], ...] = (
        *({"call_s": 0.0}, {"transfer_s": 4}, {"lanes": 0}),
        *({"variables": (("PATH", "x"),)}, {"variables": (("MC_x", "1"),)}),
    )
    for changes in wrong:
        with pytest.raises(UsageError, match="engine settings"):
            EngineSettings(**changes)
    with pytest.raises(UsageError, match="unknown protocol 'tpc'"):
        MooncakeEngine({}, protocol="tpc")


@pytest.mark.parametrize(
    ("session", "extent"),
    [("", (1, 1)), ("host", (1, 1)), ("host:0", (1, 1)), ("host:65536", (1, 1)), ("a b:1", (1, 1))]
    + [("host:1", extent) for extent in ((0, 8), (8, 0), (-8, 8), (2**63 - 8, 8), (2**63, 8))],
)
def test_a_peer_that_cannot_be(session: str, extent: tuple[int, int]) -> None:
    with pytest.raises(TransferError):
        PeerInfo(session, {"kv": extent})
