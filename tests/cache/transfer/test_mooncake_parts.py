"""What surrounds the transfer engine, without its library: plans, frames, accepted versions.

Invariants:
- Plans are compared with a byte-by-byte reference.
"""

from __future__ import annotations

import importlib.metadata
import socket
import time
from collections.abc import Callable

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
    Kind,
    pack_call,
    unpack_call,
    unpack_json,
)
from kvcheck.core.cache.transfer.mooncake.library import OLDEST, EngineSettings, is_new_enough, require_library
from kvcheck.core.cache.transfer.mooncake.plan import BYTES_OF_A_CALL, ENTRIES_OF_A_CALL, Batch, calls_of, entries_of

HERE = {"a": (1 << 40, 4096), "b": (1 << 41, 4096)}
THERE = {"a": (1 << 42, 4096), "b": ((1 << 42) + 4096, 4096)}
SOON_S = 20.0


def blocks(*rows: tuple[int, int, int]) -> IndexArray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def installed(builds: dict[str, str]) -> Callable[[str], str]:
    """In the place of `importlib.metadata.version`."""

    def version(name: str) -> str:
        if name not in builds:
            raise importlib.metadata.PackageNotFoundError(name)
        return builds[name]

    return version


def moved(entries: IndexArray) -> dict[int, int]:
    """Target address to source address, byte by byte."""
    return {remote + at: local + at for local, remote, size in entries.T.tolist() for at in range(size)}


def test_neighbours_are_merged_whatever_their_order() -> None:
    batch = Batch("a", "b", blocks((0, 64, 16), (16, 80, 16), (100, 48, 16), (200, 32, 8), (208, 40, 8)))
    local, remote = HERE["a"][0], THERE["b"][0]
    assert entries_of([batch], HERE, THERE).T.tolist() == [
        [local + 200, remote + 32, 16],
        [local + 100, remote + 48, 16],
        [local, remote + 64, 32],
    ]


def test_regions_that_touch_are_not_merged() -> None:
    """The library refuses an entry over two registrations, adjacent or not."""
    here = {"a": (4096, 64), "b": (4160, 64)}
    batches = [Batch("a", "a", blocks((0, 4032, 64))), Batch("b", "b", blocks((0, 0, 64)))]
    assert entries_of(batches, here, THERE).shape == (3, 2)


@pytest.mark.parametrize("rows", [((0, 8, 8),), ((0, 0, 8), (8, 8, 8)), ((8, 8, 8), (0, 0, 8))])
def test_a_plan_leaves_the_blocks_alone(rows: tuple[tuple[int, int, int], ...]) -> None:
    mine = np.asfortranarray(blocks(*rows))
    entries_of([Batch("a", "a", mine)], HERE, THERE)
    assert mine.tolist() == [list(row) for row in rows]


@given(st.lists(st.tuples(st.integers(-2, 70), st.integers(-2, 70), st.integers(-1, 20)), max_size=8))
def test_a_plan_moves_the_same_bytes_or_refuses(rows: list[tuple[int, int, int]]) -> None:
    here, there = {"a": (1000, 64)}, {"a": (5000, 64)}
    targets = [target + at for _, target, size in rows for at in range(size)]
    is_inside = all(size > 0 and min(s, t) >= 0 and max(s, t) + size <= 64 for s, t, size in rows)
    if not is_inside or len(set(targets)) < len(targets):
        with pytest.raises(TransferError, match="nothing was sent"):
            entries_of([Batch("a", "a", blocks(*rows))], here, there)
        return
    entries = entries_of([Batch("a", "a", blocks(*rows))], here, there)
    assert moved(entries) == {5000 + t + at: 1000 + s + at for s, t, size in rows for at in range(size)}
    assert (np.diff(entries[1]) > 0).all()
    touching = (np.diff(entries[1]) == entries[2][:-1]) & (np.diff(entries[0]) == entries[2][:-1])
    assert not touching.any()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((4096 - 7, 0, 8), "block 1 of 2 is not inside local region a: offset 4089, 8 bytes"),
        ((0, 4089, 8), "block 1 of 2 is not inside remote region b: offset 4089"),
        ((0, 64, 0), "0 bytes"),
        ((-1, 64, 8), "offset -1"),
        ((2**63 - 1, 64, 8), "local region a: offset 9223372036854775807"),
        ((0, 2**63 - 8, 8), "remote region b"),
        ((64, 64, 2**63 - 1), "9223372036854775807 bytes"),
        ((64, 7, 8), r"one target in remote region b: \[0, 8\) and \[7, 15\)"),
    ],
)
def test_blocks_out_of_place_are_refused(row: tuple[int, int, int], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        entries_of([Batch("a", "b", blocks((0, 0, 8), row))], HERE, THERE)


def test_batches_that_share_a_target_are_refused() -> None:
    with pytest.raises(TransferError, match="one target in the batches"):
        entries_of([Batch("a", "a", blocks((0, 0, 8))), Batch("b", "a", blocks((0, 7, 8)))], HERE, THERE)


def test_unknown_regions_and_shapes_are_refused() -> None:
    with pytest.raises(TransferError, match=r"no region 'x' here; there are: a, b"):
        entries_of([Batch("x", "a", blocks((0, 0, 8)))], HERE, THERE)
    with pytest.raises(TransferError, match="no region 'x' at the peer"):
        entries_of([Batch("a", "x", blocks((0, 0, 8)))], HERE, THERE)
    with pytest.raises(TransferError, match=r"int64 \[n, 3\], got int32 \[1, 3\]"):
        Batch("a", "a", blocks((0, 0, 8)).astype(np.int32))
    assert entries_of([Batch("a", "a", blocks())], HERE, THERE).shape == (3, 0)


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
    data = HEADER.pack(Kind.WRITE, 7, len(pack_call(columns.tobytes(), "h:1"))) + pack_call(columns.tobytes(), "h:1")
    for at in range(len(data)):
        raw.send(data[at : at + 1])
    sender.send(Kind.DONE, 8, b"")
    frame = receiver.receive(deadline=time.monotonic() + SOON_S)
    assert (frame.kind, frame.number) == (Kind.WRITE, 7)
    assert unpack_call(frame.payload) == ("h:1", [0, 1], [2, 3], [4, 5])
    assert receiver.receive(deadline=time.monotonic() + SOON_S).number == 8
    with pytest.raises(ChannelTimeout):
        receiver.receive(deadline=0.0)
    sender.close()
    with pytest.raises(ChannelClosed):
        receiver.receive(deadline=time.monotonic() + SOON_S)
    receiver.close()


@pytest.mark.parametrize("header", [(99, 0, 8), (Kind.WRITE, 0, MOST_PAYLOAD_BYTES + 1)])
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
            sender.send(Kind.WRITE, number, bytes(1 << 16), deadline=time.monotonic() + 0.05)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("payload", [b"\x05" + bytes(7), pack_call(bytes(48), "")[:-1]])
def test_a_call_that_is_cut_short_is_refused(payload: bytes) -> None:
    with pytest.raises(ChannelClosed, match="do not fit"):
        unpack_call(payload)


@pytest.mark.parametrize("payload", [b"[]", b"{", b"\xff"])
def test_what_is_no_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ChannelClosed):
        unpack_json(payload)


@pytest.mark.parametrize(
    ("version", "is_enough"),
    [
        ("0.3.13.post1", True),
        ("0.3.13.post2", True),
        ("0.3.14", True),
        ("0.3.14rc1", True),
        ("0.4", True),
        ("1.0.0", True),
        ("0.3.13.post1+cu13", True),
        ("0.3.13", False),
        ("0.3.13rc2", False),
        ("0.3.12.post9", False),
        ("0.3.9", False),
        ("newest", False),
    ],
)
def test_versions(version: str, is_enough: bool) -> None:
    assert is_new_enough(version) is is_enough


@pytest.mark.parametrize(
    ("builds", "message"),
    [
        (
            {},
            r"needs the mooncake transfer engine; next: pip install .*apt-get install -y libibverbs1 libnuma1 libcurl4",
        ),
        (
            {BUILDS[0]: "0.3.12.post1"},
            f"{BUILDS[0]} 0.3.12.post1 means something else.*expected {OLDEST}",
        ),
        (
            {BUILDS[0]: "0.3.14", BUILDS[2]: "0.3.14"},
            f"installed together.*pip uninstall -y {BUILDS[0]} {BUILDS[2]}",
        ),
    ],
)
def test_a_library_that_will_not_do(builds: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", installed(builds))
    with pytest.raises(UnknownVerdict, match=message) as caught:
        MooncakeEngine.start({})
    assert "\n" not in str(caught.value)


def test_a_library_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", installed({BUILDS[1]: "0.3.15"}))
    assert require_library() == "0.3.15"


@pytest.mark.parametrize(
    "changes",
    [
        {"call_s": 0.0},
        {"transfer_s": 4},
        {"lanes": 0},
        {"variables": (("PATH", "x"),)},
        {"variables": (("MC_x", "1"),)},
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="engine settings"):
        EngineSettings(**changes)  # type: ignore[arg-type]


def test_settings_reach_the_library_by_name() -> None:
    variables = EngineSettings(progress_s=3, variables=(("MC_LOG_LEVEL", "INFO"),)).environment("rdma")
    assert variables["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "3" and variables["MC_LOG_LEVEL"] == "INFO"
    assert variables["MC_FORCE_HCA"] == "1" and "MC_FORCE_TCP" not in variables


def test_an_unknown_protocol_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown protocol 'tpc'; known: tcp, rdma, nvlink, nvlink_intra"):
        MooncakeEngine.start({}, "tpc")


@pytest.mark.parametrize(
    ("session", "extent"),
    [("", (1, 1)), ("host", (1, 1)), ("host:0", (1, 1)), ("host:65536", (1, 1)), ("a b:1", (1, 1))]
    + [("host:1", extent) for extent in ((0, 8), (8, 0), (-8, 8), (2**63 - 8, 8), (2**63, 8))],
)
def test_a_peer_that_cannot_be(session: str, extent: tuple[int, int]) -> None:
    with pytest.raises(TransferError):
        PeerInfo(session, {"kv": extent})
