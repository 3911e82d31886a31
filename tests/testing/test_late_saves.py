"""check_round_trip and waits: copies that save takes before its streams have made them, by both documented ways."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvcheck.testing import IntegrityError, Judged, check_round_trip, streams, waits

SLOTS, LAYERS, ROOM = 31, 2, 16
LIMIT = "save: it put nothing on a stream of its own"


class Pool:
    """Saves by way of a staging buffer a layer, on a stream, with an event a layer. `wait` says how the host waits."""

    def __init__(self, wait: Callable[[Any, int], object] | None = None) -> None:
        self.kv = [torch.zeros(SLOTS, 6, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.staging = [torch.zeros(ROOM, 6, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.stream, self.loading = torch.cuda.Stream(), torch.cuda.Stream()
        self.copied, self.loaded = [torch.cuda.Event() for _ in range(LAYERS)], torch.cuda.Event()
        self.wait = wait if wait is not None else lambda pool, layer: None

    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            for layer, rows in enumerate(self.kv):
                self.staging[layer][: len(ids)].copy_(rows[ids])
                self.copied[layer].record()
        return [self.taken(layer, len(ids)) for layer in range(LAYERS)]

    def taken(self, layer: int, count: int) -> torch.Tensor:
        self.wait(self, layer)
        return self.staging[layer][:count].clone()

    def load(self, copy: Any, ids: Any) -> None:
        with torch.cuda.stream(self.loading):
            for layer, rows in enumerate(copy):
                self.kv[layer][ids] = rows
            self.loaded.record()
        self.loaded.wait()

    def read(self, layer: int, ids: Any) -> Any:
        return self.kv[layer][ids]


class OneStaging(Pool):
    """A layer after the other by the same staging buffer."""

    def save(self, ids: Any) -> Any:
        host = []
        for layer, rows in enumerate(self.kv):
            with self.stream:
                self.staging[0][: len(ids)].copy_(rows[ids], non_blocking=True)
                self.copied[layer].record()
            self.wait(self, layer)
            host.append(self.staging[0][: len(ids)].clone())
        return host


class ReadByNumpy(Pool):
    """A copy in the background to memory of the host, which numpy reads."""

    def save(self, ids: Any) -> Any:
        host = []
        for layer, rows in enumerate(self.kv):
            with torch.cuda.stream(self.stream):
                made = rows[ids].to("cpu", non_blocking=True)
                self.copied[layer].record()
            self.wait(self, layer)
            host.append(torch.from_numpy(made.view(torch.int16).numpy().copy()).view(torch.bfloat16))
        return host


class ResultOfAStream(Pool):
    """The rows that a stream has gathered are read on the main stream."""

    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            rows = [each[ids] for each in self.kv]
            for event in self.copied:
                event.record()
        self.wait(self, 0)
        return [each * 1 for each in rows]


class ClearsBehind(Pool):
    """Slots are cleared once they are saved."""

    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            host = [torch.empty_like(each[ids]).copy_(each[ids], non_blocking=True) for each in self.kv]
            self.copied[0].record()
        self.wait(self, 0)
        for each in self.kv:
            each[ids] = 0
        return host


def poll(pool: Any, layer: int) -> None:
    while not pool.copied[layer].query():
        pass


RIGHT: dict[str, Callable[[Any, int], object]] = {
    "event": lambda pool, layer: pool.copied[layer].synchronize(),
    "stream": lambda pool, layer: pool.stream.synchronize(),
    "all": lambda pool, layer: torch.cuda.synchronize(),
    "asks again and again": poll,
}
WRONG: dict[str, Callable[[Any, int], object] | None] = {
    "no wait": None,
    "asks once": lambda pool, layer: pool.copied[layer].query(),
    "another stream": lambda pool, layer: pool.loading.synchronize(),
}
KINDS = (Pool, OneStaging, ReadByNumpy, ResultOfAStream, ClearsBehind)


def judge(
    way: str, kind: Callable[[Any], Pool], wait: Callable[[Any, int], object] | None = None, seed: int = 0
) -> Judged:
    with streams(device="cpu") as held:
        pool = kind(wait)
        own = {"save": pool.save, "load": pool.load, "slots": SLOTS, "exclude": ("staging",), "seed": seed}
        if way == "waits":
            return waits(pool, streams=held, read=pool.read, layers=LAYERS, **own)
        return check_round_trip(pool, **own)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", ["waits", "round trip"])
def test_a_copy_that_is_taken_too_early_is_found_each_time_and_its_twin_is_clean(way: str, kind: type[Pool]) -> None:
    for seed in (0, 2):
        for wait in RIGHT.values():
            result = judge(way, kind, wait, seed)
            assert all("staging" in text for text in result.not_tried) and min(result.words.values()) > 0
        for wait in WRONG.values():
            with pytest.raises(IntegrityError) as caught:
                judge(way, kind, wait, seed)
            assert {(each.code, each.buffer, each.lane) for each in caught.value.findings} == {("KV203", "kv", "save")}


def test_the_event_of_an_earlier_layer_is_not_enough() -> None:
    for way in ("waits", "round trip"):
        with pytest.raises(IntegrityError) as caught:
            judge(way, Pool, lambda pool, layer: pool.copied[0].synchronize())
        assert {(each.code, each.layer) for each in caught.value.findings} == {("KV203", 1)}


class Overwritten(Pool):
    """Wrong: the stream has filled the one staging buffer with the next layer before the host reads."""

    def __init__(self, wait: Callable[[Any, int], object] | None = None) -> None:
        super().__init__(wait)
        self.staging = self.staging[:1] * LAYERS


def test_a_staging_buffer_that_the_stream_fills_again_is_found() -> None:
    with pytest.raises(IntegrityError) as caught:
        judge("round trip", Overwritten, RIGHT["event"])
    assert {(each.code, each.layer) for each in caught.value.findings} == {("KV106", 0)}
    assert any(
        "kv, layer 0: a load that runs at once" in text
        for text in judge("waits", Overwritten, RIGHT["event"]).not_tried
    )


class Blocking(Pool):
    """Legal: copies that make the process wait, into memory that is made in save, and by cpu."""

    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            host = torch.empty(LAYERS, len(ids), 6, dtype=torch.bfloat16)
            host[0].copy_(self.kv[0][ids])
            host[1] = self.kv[1][ids].cpu()
        return host.clone()


class BlockingTo(Pool):
    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            host = [each[ids].to("cpu") for each in self.kv]
        return torch.stack(host)


class InMemoryOfSave(Pool):
    """Legal: memory that save makes with a device, where that of the KV was made without."""

    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            rows = [each[ids] for each in self.kv]
            host = [torch.empty_like(rows[0], device="cpu"), rows[1].new_empty(rows[1].shape, device="cpu")]
            host[0].copy_(rows[0])
            host[1].copy_(rows[1])
        return [each.clone() for each in host]


class WaitsOnTheDevice(ResultOfAStream):
    """Legal: the main stream waits, and no host."""

    def save(self, ids: Any) -> Any:
        self.wait = lambda pool, layer: torch.cuda.current_stream().wait_stream(pool.stream)
        return super().save(ids)


@pytest.mark.parametrize(
    "kind", [Blocking, BlockingTo, InMemoryOfSave, WaitsOnTheDevice], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("way", ["waits", "round trip"])
def test_legal_saves_on_a_stream_are_clean(way: str, kind: type[Pool]) -> None:
    for seed in range(3):
        assert all("staging" in text for text in judge(way, kind, seed=seed).not_tried)


class Staged(Pool):
    """Copies into staging buffers, of which nothing is waited for. kv, host: how memory is made. free: layers that are
    copied with non_blocking."""

    def __init__(self, kv: dict[str, Any], host: dict[str, Any], free: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.kv = [torch.zeros(SLOTS, 6, dtype=torch.bfloat16, **kv) for _ in range(LAYERS)]
        self.staging = torch.zeros(LAYERS, ROOM, 6, dtype=torch.bfloat16, **host)
        self.free = free

    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            for layer, rows in enumerate(self.kv):
                self.staging[layer][: len(ids)].copy_(rows[ids], non_blocking=layer in self.free)
        return [each[: len(ids)].clone() for each in self.staging]


class StagedBySetting(Staged):
    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            for layer, rows in enumerate(self.kv):
                self.staging[layer][: len(ids)] = rows[ids]
        return [each[: len(ids)].clone() for each in self.staging]


CPU, PINNED = {"device": "cpu"}, {"pin_memory": False}
ON_HOST: tuple[tuple[Any, Any], ...] = (({}, CPU), (CPU, {}), ({}, PINNED), (CPU, CPU | PINNED))


def late(make: Callable[[], Pool], way: str = "round trip") -> set[tuple[Any, ...]]:
    """Findings of a save by layer and condition."""
    with pytest.raises(IntegrityError) as caught:
        judge(way, lambda wait: make())
    assert {each.code for each in caught.value.findings} == {"KV203"}
    return {(each.layer, each.condition is not None, "unless" in each.message) for each in caught.value.findings}


@pytest.mark.parametrize(("kv", "host"), ON_HOST)
def test_a_blocking_copy_into_host_memory_waits_and_one_in_the_background_is_found(kv: Any, host: Any) -> None:
    for way in ("waits", "round trip"):
        for kind in (Staged, StagedBySetting):
            told = judge(way, lambda wait, kind=kind: kind(kv, host)).not_tried
            assert all(text.startswith("staging") for text in told)
        assert late(lambda: Staged(kv, host, free=(0, 1)), way) == {(0, False, False), (1, False, False)}


@pytest.mark.parametrize("how", [{}, CPU, CPU | PINNED])
def test_where_it_is_not_known_whose_memory_it_is_the_finding_has_that_as_its_condition(how: Any) -> None:
    both = {(0, True, True), (1, True, True)}
    assert late(lambda: Staged(how, how)) == late(lambda: StagedBySetting(how, how)) == both
    assert late(lambda: Staged(how, how, free=(1,))) == {(0, True, True), (1, False, False)}
    with pytest.raises(IntegrityError, match="unless staging is host memory: there a copy_ without"):
        judge("waits", lambda wait: Staged(how, how))


class Gathered(ResultOfAStream):
    def __init__(self, wait: Callable[[Any, int], object] | None, dtype: torch.dtype) -> None:
        super().__init__(wait)
        self.kv = [torch.zeros(SLOTS, 8, dtype=torch.uint8).view(dtype) for _ in range(LAYERS)]

    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            rows = [each.view(torch.uint8)[ids].view(each.dtype) for each in self.kv]
        self.wait(self, 0)
        return [each.clone() for each in rows]

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.kv, copy, strict=True):
            each.view(torch.uint8)[ids] = rows.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.float8_e4m3fn, torch.complex64])
def test_rows_of_bytes_that_a_stream_has_not_gathered_yet_are_found(dtype: torch.dtype) -> None:
    assert judge("round trip", lambda wait: Gathered(wait, dtype), RIGHT["stream"]).reads
    assert {layer for layer, *_ in late(lambda: Gathered(None, dtype))} == {0, 1}


class BesideOthers(Pool):
    """Legal: a tensor that has no memory of its own, which is left out."""

    def __init__(self, wait: Callable[[Any, int], object] | None = None) -> None:
        super().__init__(wait)
        self.staging.append(torch.zeros(2, 2, layout=torch.sparse_coo))


def test_a_tensor_without_memory_may_be_left_out() -> None:
    assert judge("round trip", BesideOthers, RIGHT["stream"]).reads


class ReusedStaging(Pool):
    """One stream fills the staging buffer, another empties it. Wrong: the first does not wait for the second."""

    def __init__(self, wait: Callable[[Any, int], object] | None = None) -> None:
        super().__init__(wait)
        self.kv.append(torch.zeros(SLOTS, 6, dtype=torch.bfloat16))

    def save(self, ids: Any) -> Any:
        count, emptied = len(ids), torch.cuda.Event()
        host = [torch.empty(count, 6, dtype=torch.bfloat16) for _ in self.kv]
        for rows, kept in zip(self.kv, host, strict=True):
            with torch.cuda.stream(self.stream):
                self.wait(emptied, 0)
                self.staging[0][:count].copy_(rows[ids], non_blocking=True)
                self.copied[0].record()
            with torch.cuda.stream(self.loading):
                self.copied[0].wait()
                kept.copy_(self.staging[0][:count], non_blocking=True)
                emptied.record()
        self.loading.synchronize()
        return host


@pytest.mark.parametrize("seed", range(4))
def test_a_staging_buffer_that_one_stream_fills_before_another_has_emptied_it_is_found(seed: int) -> None:
    told = judge("round trip", ReusedStaging, lambda emptied, _: emptied.wait(), seed).not_tried
    assert all(text.startswith("staging") for text in told)
    with pytest.raises(IntegrityError, match="KV203"):
        judge("round trip", ReusedStaging, seed=seed)


class UnderWay(Pool):
    """What save returns is still under way. It is right if the slots are not given away before it has arrived."""

    def save(self, ids: Any) -> Any:
        with torch.cuda.stream(self.stream):
            return [each[ids].to("cpu", non_blocking=True) for each in self.kv]


class Behind(Pool):
    """A copy in the background on the main stream."""

    def save(self, ids: Any) -> Any:
        return [each[ids].to("cpu", non_blocking=True) for each in self.kv]


@pytest.mark.parametrize("way", ["waits", "round trip"])
def test_copies_that_are_under_way_when_save_returns_are_named(way: str) -> None:
    (told,) = (text for text in judge(way, UnderWay).not_tried if "staging" not in text)
    assert told.startswith("save: 4 operations had not run when it returned; kvcheck ran them")
    assert any(text.startswith("save: 2 copies with non_blocking") for text in judge(way, Behind).not_tried)


class AtOnce(Pool):
    def save(self, ids: Any) -> Any:
        return [each[ids] for each in self.kv]


class InAThread(AtOnce):
    def __init__(self, wait: Callable[[Any, int], object] | None = None) -> None:
        super().__init__(wait)
        self.workers = ThreadPoolExecutor(1)

    def save(self, ids: Any) -> Any:
        return self.workers.submit(super().save, ids).result()


class InAThreadOfItsOwn(AtOnce):
    def save(self, ids: Any) -> Any:
        with ThreadPoolExecutor(1) as workers:
            return workers.submit(super().save, ids).result()


@pytest.mark.parametrize("way", ["waits", "round trip"])
def test_a_save_of_which_no_copy_was_late_says_so(way: str) -> None:
    assert any(text.startswith(LIMIT) for text in judge(way, AtOnce).not_tried)
    for kind in (InAThread, InAThreadOfItsOwn):  # their work is held, and they wait for it
        assert [text for text in judge(way, kind).not_tried if "thread" in text] == []


def test_outside_of_streams_save_and_load_are_called_once() -> None:
    calls: list[str] = []
    rows = torch.zeros(SLOTS, 4)

    def save(ids: Any) -> Any:
        calls.append("save")
        return rows[ids]

    result = check_round_trip([rows], save=save, load=lambda copy, ids: rows.index_copy_(0, ids, copy), slots=SLOTS)
    assert calls == ["save"] and result.not_tried == ()
