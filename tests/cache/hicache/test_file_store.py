"""A folder of pages survives kills, full disks, damage and other processes without a wrong byte."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rigs.file_store_processes import KEYS as SHARED_KEYS
from rigs.store_contract import KEYS, payload_of

from kvcheck.core.base.errors import StorageError, UsageError
from kvcheck.core.cache.hicache.file_store import FileStore
from kvcheck.core.cache.hicache.storage import pack_object

TESTS = Path(__file__).parents[2]


def started(verb: str, folder: Path, *numbers: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(TESTS / "rigs" / "file_store_processes.py"), verb, str(folder), *map(str, numbers)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def result_of(process: subprocess.Popen[str]) -> dict[str, object]:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    result: dict[str, object] = json.loads(text)
    return result


def path_of(folder: Path, key: str) -> Path:
    return folder / key[:2] / key[2:4] / key


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of writers sync, and kills and races are the same on any disk."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path / "store")
    yield store
    store.close()


def test_objects_outlive_the_store(tmp_path: Path) -> None:
    for number in range(3):
        store = FileStore(tmp_path / "a" / "b")
        store.put(KEYS[number], payload_of(number))
        store.close()
    store = FileStore(tmp_path / "a" / "b")
    assert [store.get(key, 3000) for key in KEYS[:3]] == [payload_of(number) for number in range(3)]
    assert files_in(store.folder) == {str(path_of(Path(), key)) for key in KEYS[:3]}
    store.close()


def test_equal_bytes_are_not_written_again(store: FileStore) -> None:
    store.put(KEYS[0], payload_of(0))
    before = path_of(store.folder, KEYS[0]).stat()
    assert not stat.S_IMODE(before.st_mode) & 0o133, "nobody else may write it, and nobody may run it"
    store.put(KEYS[0], payload_of(0))
    assert path_of(store.folder, KEYS[0]).stat().st_ino == before.st_ino
    store.put(KEYS[0], payload_of(1))
    assert store.get(KEYS[0], 3000) == payload_of(1)


@pytest.mark.processes
def test_killed_at_every_system_call(quick_folder: Path) -> None:
    result = result_of(started("every_step", quick_folder))
    assert result["wrong"] == [] and result["status"] == 0
    assert int(str(result["steps"])) > 60


@pytest.mark.processes
def test_killed_at_any_moment(quick_folder: Path) -> None:
    result = result_of(started("any_moment", quick_folder / "store", 60))
    assert result["wrong"] == []
    assert int(str(result["puts"])) >= 60


@pytest.mark.processes
def test_two_processes_share_a_folder(quick_folder: Path) -> None:
    folder = quick_folder / "store"
    twins = [started("share", folder, who) for who in (0, 1)]
    results = [result_of(twin) for twin in twins]
    assert [(result["wrong"], result["refused"]) for result in results] == [([], 0)] * 2
    store = FileStore(folder)
    kept = {number for result in results for number in result["kept"] if number < 8}  # type: ignore[attr-defined]
    assert kept and all(store.get(SHARED_KEYS[number], 9000) is not None for number in kept)
    assert [result["full"] for result in results] == [0, 0]
    assert os.listdir(folder / "drafts") == []
    store.close()


def test_a_live_writers_draft_is_left_and_a_dead_ones_removed(store: FileStore) -> None:
    with store._draft() as (name, _):
        (store.folder / "drafts" / "1-0.draft").write_bytes(b"half an ob")
        (store.folder / "drafts" / "notes.txt").write_bytes(b"not a draft")
        FileStore(store.folder).close()
        assert sorted(os.listdir(store.folder / "drafts")) == sorted([name, "notes.txt"])
    assert os.listdir(store.folder / "drafts") == ["notes.txt"]


def test_a_draft_taken_between_creation_and_lock_is_made_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    flock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        if not taken:
            taken.extend(os.listdir(store.folder / "drafts"))
            os.unlink(store.folder / "drafts" / taken[0])
        flock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", late)
    store.put(KEYS[0], payload_of(0))
    assert len(taken) == 1
    assert store.get(KEYS[0], 3000) == payload_of(0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary(max_size=30), data=st.data())
def test_a_damaged_file_is_refused_and_healed_by_a_put(store: FileStore, payload: bytes, data: st.DataObject) -> None:
    store.put(KEYS[0], payload)
    path = path_of(store.folder, KEYS[0])
    whole = path.read_bytes()
    assert whole == pack_object(KEYS[0], payload)
    at = data.draw(st.integers(0, len(whole) - 1))
    mask = data.draw(st.integers(1, 255))
    for bad in (whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :], whole[:at], whole + bytes([mask])):
        path.write_bytes(bad)
        refused = store.refused
        assert store.get(KEYS[0], len(payload)) is None
        assert store.refused == refused + 1
    store.put(KEYS[0], payload)
    assert store.get(KEYS[0], len(payload)) == payload


def test_only_regular_files_are_read(store: FileStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(pack_object(KEYS[0], payload_of(0)))
    places = [path_of(store.folder, key) for key in KEYS[:4]]
    for place in places:
        place.parent.mkdir(parents=True)
    places[0].symlink_to(outside)
    places[1].mkdir()
    os.mkfifo(places[2])
    places[3].parent.rmdir()
    places[3].parent.symlink_to(tmp_path, target_is_directory=True)
    assert [store.get(key, 3000) for key in KEYS[:4]] == [None] * 4
    assert store.refused == 4
    assert not any(store.contains(key) for key in KEYS[:4])
    for key in (KEYS[0], KEYS[2]):  # a rename replaces the link itself, and the FIFO
        store.put(key, payload_of(5))
        assert store.get(key, 3000) == payload_of(5)
    assert outside.read_bytes() == pack_object(KEYS[0], payload_of(0))
    for key in (KEYS[1], KEYS[3]):
        with pytest.raises(StorageError, match="could not keep"):
            store.put(key, payload_of(5))
    with pytest.raises(StorageError, match="could not remove"):
        store.remove(KEYS[1])
    assert set(os.listdir(tmp_path)) == {"store", "outside"} and os.listdir(store.folder / "drafts") == []


def test_a_folder_in_the_place_of_an_object_is_named_and_costs_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put(KEYS[0], payload_of(0))
    place = tmp_path / KEYS[1][:2] / KEYS[1][2:4] / KEYS[1]
    place.mkdir(parents=True)
    for each in range(60):  # a folder with a size, also where an empty one has none
        (place / f"{each:0>200}").touch()
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert store.get(KEYS[1], 3000) is None
        with pytest.raises(StorageError, match=f"{KEYS[1]}: Is a directory"):
            store.put(KEYS[1], payload_of(1))
    assert len(os.listdir("/proc/self/fd")) == opened
    assert store.get(KEYS[0], 3000) == payload_of(0)
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "replace", "mkdir"])
def test_a_disk_that_says_no(store: FileStore, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    store.put(KEYS[0], payload_of(0))
    before = files_in(store.folder)

    def failing(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(StorageError) as caught:
            store.put(KEYS[1], payload_of(1))
    assert os.strerror(number) in str(caught.value) and str(store.folder) in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert files_in(store.folder) == before
    assert store.get(KEYS[0], 3000) == payload_of(0) and store.get(KEYS[1], 3000) is None
    store.put(KEYS[1], payload_of(1))
    assert store.get(KEYS[1], 3000) == payload_of(1)


@pytest.mark.processes
def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    result = result_of(started("limited", tmp_path / "store"))
    assert "File too large" in str(result["message"])
    assert (result["kept"], result["partial"], result["drafts"]) == (True, False, [])


@pytest.mark.parametrize("kind", ["a file", "a link as its drafts", "without write permission"])
def test_a_folder_that_cannot_be_used_is_a_usage_error(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = tmp_path / "place", os.open

    def without_writing(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_CREAT:  # permission bits do not stop root, who may run the tests
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *args, **kwargs)

    if kind == "a file":
        place.write_text("not a folder")
    elif kind == "a link as its drafts":
        place.mkdir()
        (place / "drafts").symlink_to("/")
    else:
        FileStore(place).close()
        monkeypatch.setattr(os, "open", without_writing)
    with pytest.raises(UsageError, match="expected a folder that can be written") as caught:
        FileStore(place)
    assert "\n" not in str(caught.value)


# Power failures


class WatchedStore(FileStore):
    """Notes what a power failure would leave: by inode, bytes and names as they were synced last."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {}
        super().__init__(folder)

    def _sync(self, opened: int) -> None:
        super()._sync(opened)
        status = os.fstat(opened)
        if stat.S_ISDIR(status.st_mode):
            names = os.listdir(opened)
            self.folders[status.st_ino] = {each: os.stat(each, dir_fd=opened).st_ino for each in names}
        else:
            self.files[status.st_ino] = os.pread(opened, status.st_size, 0)

    def left(self, key: str) -> int | None:
        at: int | None = os.stat(self.folder).st_ino
        for name in (key[:2], key[2:4], key):
            at = self.folders.get(at, {}).get(name) if at is not None else None
        return at


def test_an_object_is_on_the_disk_under_its_name_when_its_put_returns(tmp_path: Path) -> None:
    store = WatchedStore(tmp_path)
    for key, number in ((KEYS[0], 0), (KEYS[1], 1), (KEYS[0], 2)):
        store.put(key, payload_of(number))
        assert store.files.get(store.left(key) or -1) == pack_object(key, payload_of(number))
    other = FileStore(tmp_path)
    other.put(KEYS[2], payload_of(0))
    store.put(KEYS[2], payload_of(0))  # equal bytes, whose writer may have died before it synced the name
    assert store.left(KEYS[2]) == path_of(tmp_path, KEYS[2]).stat().st_ino
    for each in (store, other):
        each.close()
