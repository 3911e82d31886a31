"""waits and streams: readers without the wait are found each time; every legal way to wait stays green."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from rigs.waits import LAYERS, WAITS, Pool, ReadsOnItsStream, beside_save, judge

from kvcheck.testing import IntegrityError, NotJudged, streams

SEEDS = range(6)


@pytest.mark.parametrize("way", WAITS)
def test_a_reader_that_waits_is_green(way: str) -> None:
    for seed in SEEDS:
        with streams(device="cpu") as held:
            result = judge(held, Pool(WAITS[way]), seed=seed)
        assert result.orderings == LAYERS and set(result.words) == {"k", "v"} and not beside_save(result.not_tried)


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 3 != 2])
def test_a_reader_without_the_wait_is_found_with_layer_row_and_owner(seed: int) -> None:
    with streams(device="cpu") as held, pytest.raises(IntegrityError) as caught:
        judge(held, Pool(), seed=seed)
    assert {(each.code, each.buffer, each.layer) for each in caught.value.findings} == {
        ("KV201", name, layer) for name in ("k", "v") for layer in range(LAYERS)
    }
    first = caught.value.findings[0]
    assert first.seen_request == 3 and first.lane == "read"
    assert f"]); read({first.layer}, [" in str((first.minimal or {})["called"])
    assert f"read of layer {first.layer} did not wait for its load: row {first.row} of" in first.message


def test_a_reader_that_waits_for_an_earlier_layer_is_found() -> None:
    with streams(device="cpu") as held, pytest.raises(IntegrityError) as caught:
        judge(held, Pool(lambda pool, layer: pool.loaded[0].wait()))
    assert {(each.code, each.layer) for each in caught.value.findings} == {("KV201", 1), ("KV201", 2)}


@pytest.mark.parametrize("seed", SEEDS)
def test_one_wait_at_the_first_layer_for_the_whole_load_is_enough(seed: int) -> None:
    with streams(device="cpu") as held:
        pool = Pool(lambda pool, layer: None if layer else pool.loaded[-1].wait())
        judged = judge(held, pool, seed=seed)
    (note,) = [each for each in judged.not_tried if "alone" in each]
    assert note == "read: a layer that is read alone; it waits where the layers are read in order"


@pytest.mark.parametrize("seed", [seed for seed in range(6) if seed % 3 != 2])
def test_one_wait_at_the_last_layer_comes_too_late_for_the_others(seed: int) -> None:
    with streams(device="cpu") as held, pytest.raises(IntegrityError) as caught:
        judge(held, Pool(lambda pool, layer: pool.loaded[-1].wait() if layer else None), seed=seed)
    assert ("KV201", 0) in {(each.code, each.layer) for each in caught.value.findings}


def test_the_wait_of_one_reader_does_not_count_for_another() -> None:
    def values(layer: int, ids: Any) -> Any:
        pool.loaded[layer].wait()
        return pool.v[layer][ids]

    with streams(device="cpu") as held, pytest.raises(IntegrityError) as caught:
        pool = Pool()
        judge(held, pool, read={"values": values, "keys": lambda layer, ids: pool.k[layer]})
    assert {(each.code, each.lane, each.buffer) for each in caught.value.findings} == {("KV201", "keys", "k")}


class Staged(Pool):
    """Copies to a staging buffer first, by two streams that wait for each other."""

    def load(self, copy: Any, ids: Any) -> None:
        for layer, rows in enumerate(copy):
            with torch.cuda.stream(self.other):
                staged = [torch.empty_like(each).copy_(each, non_blocking=True) for each in rows]
                arrived = torch.cuda.current_stream().record_event()
            with self.stream:
                self.stream.wait_event(arrived)
                order = ids.sort().indices
                for held, each in zip((self.k, self.v), staged, strict=True):
                    each.record_stream(self.stream)
                    held[layer][ids[order]] = each[order]
                self.loaded[layer].record()


class Chosen(Pool):
    """Names its stream as the current one, reads sizes on the host, and computes masks."""

    def load(self, copy: Any, ids: Any) -> None:
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(self.stream)
        for layer, (k, v) in enumerate(copy):
            mask = torch.ones(len(ids), dtype=torch.bool)
            mask.logical_and_(ids > 0)
            at = ids[mask.nonzero().view(-1)]
            assert len(at.tolist()) == len(ids) == int((at > 0).sum())
            torch.index_select(k, 0, torch.arange(len(ids)), out=torch.empty_like(k))
            self.k[layer].index_put_((at,), k)
            self.v[layer][at] = v
            self.loaded[layer].record()
        torch.cuda.set_stream(before)


@pytest.mark.parametrize("kind", [ReadsOnItsStream, Staged, Chosen], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_other_ways_to_load_and_read_are_green_with_the_wait_and_red_without(kind: type[Pool], seed: int) -> None:
    with streams(device="cpu") as held:
        assert judge(held, kind(WAITS["named stream"]), seed=seed).orderings == LAYERS
        if seed % 3 != 2:
            with pytest.raises(IntegrityError, match="KV201"):
                judge(held, kind(), seed=seed)


def test_a_reader_may_return_whole_buffers_and_what_none_returns_is_named() -> None:
    def whole(layer: int, ids: Any) -> Any:
        pool.loaded[layer].wait()
        return {"k": pool.k[layer]}

    with streams(device="cpu") as held:
        pool = Pool()
        told = beside_save(judge(held, pool, read=whole).not_tried)
    assert told == tuple(f"v, layer {layer}: no reader returned a row of it" for layer in range(LAYERS))


class AtOnce(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        for layer, (k, v) in enumerate(copy):
            self.k[layer][ids], self.v[layer][ids] = k, v


class InAThread(AtOnce):
    """Another thread's work runs at once: what it does to the current stream is not seen either."""

    def load(self, copy: Any, ids: Any) -> None:
        def work() -> None:
            with torch.cuda.stream(self.stream):
                super(InAThread, self).load(copy, ids)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (AtOnce, {}, "load put nothing on a stream of its own"),
        (InAThread, {}, "load put nothing on a stream of its own"),
        (Pool, {"read": lambda layer, ids: torch.zeros(3)}, "returned [3] of float32, which is no row of a buffer"),
        (Pool, {"read": lambda layer, ids: None}, "returned no tensor"),
        (Pool, {"load": lambda copy, ids: None}, "no row of a buffer as it was saved, though the load had finished"),
        (Pool, {"slots": 12}, "no dimension of 12 slots"),
    ],
)
def test_what_cannot_be_judged_is_said(kind: type[Pool], options: dict[str, Any], told: str) -> None:
    with streams(device="cpu") as held, pytest.raises(NotJudged) as caught:
        judge(held, kind(), **options)
    assert told in str(caught.value)


def test_torch_is_as_it_was_behind_the_block() -> None:
    before = (torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream, torch.cuda.synchronize, torch.Tensor.tolist)
    with pytest.raises(ZeroDivisionError), streams(device="cpu"):
        assert torch.cuda.Stream is not before[0]
        raise ZeroDivisionError
    after = (torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream, torch.cuda.synchronize, torch.Tensor.tolist)
    assert before == after and "record_stream" not in vars(torch.Tensor)


def test_equal_seeds_give_equal_orders() -> None:
    def outcome(seed: int) -> str:
        with streams(device="cpu") as held:
            try:
                return str(judge(held, Pool(), seed=seed))
            except IntegrityError as error:
                return str(error)

    texts = [outcome(seed) for seed in range(12)]
    assert texts == [outcome(seed) for seed in range(12)] and len(set(texts)) > 6


def test_a_device_that_is_not_there_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NotJudged, match=r"no streams of cuda:3.*1 CUDA devices"), streams(device="cuda:3"):
        pass
