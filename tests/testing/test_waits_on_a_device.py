"""waits and streams over a device that is a stand-in: work is held by a flag, and let go piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from fakes.cuda import Machine, installed
from fakes.cuda_tensors import Memory, memory
from rigs.waits import LAYERS, WAITS, Pool, ReadsOnItsStream, beside_save, judge

from kvcheck.core.base import cuda_hold
from kvcheck.testing import IntegrityError, Judged, NotJudged, streams
from kvcheck.testing.plan import SlotScene

SEEDS = range(4)
"""Of the device, which decides what runs when, and of the call."""
LAZY = 1


@contextmanager
def device(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[tuple[Machine, Memory]]:
    """A device with memory, whose tensors do not say that they lie there."""
    monkeypatch.setattr(SlotScene, "wait_for_device", lambda scene: torch.cuda.synchronize())
    with installed(seed) as machine, memory(machine) as made:
        yield machine, made


def judged(made: Memory, wait: Callable[[Any, int], object] | None, seed: int, kind: type[Pool] = Pool) -> Judged:
    with streams(device="cuda") as held:
        return judge(held, kind(wait, made.put), seed=seed, as_ids=partial(ids_on, made))


def ids_on(made: Memory, ids: list[int]) -> torch.Tensor:
    """Copied to the device from memory that is not pinned, which makes the process wait."""
    made.wait()
    return torch.tensor(ids)


@pytest.mark.parametrize("way", WAITS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_that_waits_is_green_and_no_watchdog_ends_a_hold(
    way: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device(monkeypatch, seed) as (machine, made):
        result = judged(made, WAITS[way], seed)
    assert (result.orderings, beside_save(result.not_tried), machine.fires) == (LAYERS, (), 0)
    assert set(result.words) == {"k", "v"}


WRONG: dict[str, Callable[[Pool, int], object] | None] = {
    "no wait": None,
    "the layer before": lambda pool, layer: pool.loaded[max(0, layer - 1)].wait(),
    "another stream": lambda pool, layer: torch.cuda.current_stream().wait_stream(pool.other),
    "asks the event once": lambda pool, layer: pool.loaded[layer].query(),
}


@pytest.mark.parametrize("way", WRONG)
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 3 != 2])
def test_a_reader_that_waits_for_something_else_is_found_at_each_layer(
    way: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device(monkeypatch, seed) as (machine, made), pytest.raises(IntegrityError) as caught:
        judged(made, WRONG[way], seed)
    first = 1 if way == "the layer before" else 0
    assert {(each.code, each.buffer, each.layer) for each in caught.value.findings} == {
        ("KV201", name, layer) for name in ("k", "v") for layer in range(first, LAYERS)
    }
    assert machine.fires == 0


def test_one_wait_at_the_first_layer_for_the_whole_load_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with device(monkeypatch, LAZY) as (machine, made):
        result = judged(made, lambda pool, layer: None if layer else pool.loaded[-1].wait(), LAZY)
    assert (result.orderings, machine.fires) == (LAYERS, 0)
    assert beside_save(result.not_tried) == (
        "read: a layer that is read alone; it waits where the layers are read in order",
    )


def test_a_reader_with_a_stream_of_its_own_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    way = WAITS["named stream"]
    with device(monkeypatch, LAZY) as (machine, made):
        assert judged(made, way, LAZY, ReadsOnItsStream).orderings == LAYERS and machine.fires == 0
    with device(monkeypatch, LAZY) as (_, made), pytest.raises(IntegrityError):
        judged(made, None, LAZY, ReadsOnItsStream)


def on_host(pool: Pool, layer: int) -> None:
    """Waits on the device, then looks at a value: the process waits for the load, and nothing says so."""
    pool.loaded[layer].wait()
    pool.k[layer].cpu()


def test_a_reader_whose_holds_the_watchdog_ends_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        device(monkeypatch, LAZY) as (machine, made),
        pytest.raises(NotJudged, match="watchdog of the device ended a hold of every load"),
    ):
        judged(made, on_host, LAZY)
    assert machine.fires > 0


def test_reads_without_an_imposed_order_are_named_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with device(monkeypatch, LAZY) as (_, made):
        result = judged(made, lambda pool, layer: on_host(pool, layer) if layer else pool.loaded[0].wait(), LAZY)
    assert result.orderings == 1
    *named, ended = beside_save(result.not_tried)
    assert [text.partition(":")[0] for text in named] == [
        f"read of layer {layer} during a load that is late" for layer in (2, 1)
    ]
    assert ended.startswith("the watchdog of the device ended ") and ended.endswith("these imposed no order")


def test_without_triton_the_result_says_that_time_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    with device(monkeypatch, LAZY) as (_, made):
        monkeypatch.setattr(cuda_hold, "why_not", lambda outcome: "there is none")
        result = judged(made, WAITS["named stream"], LAZY)
    assert result.orderings == LAYERS
    assert beside_save(result.not_tried) == (
        "work is held by a kernel that spins for a fixed time: triton is needed, and there is none",
    )


def test_methods_of_the_device_are_as_they_were_behind_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with device(monkeypatch, LAZY):
        kinds = (torch.cuda.Event, torch.cuda.Stream)
        before = [(kind.query, kind.synchronize) for kind in kinds], torch.cuda.stream, torch.cuda.synchronize
        with pytest.raises(ZeroDivisionError), streams(device="cuda"):
            assert torch.cuda.Event.query is not before[0][0][0]
            raise ZeroDivisionError
        after = [(kind.query, kind.synchronize) for kind in kinds], torch.cuda.stream, torch.cuda.synchronize
    assert before == after


@pytest.mark.gpu
@pytest.mark.parametrize("way", [*WAITS, *WRONG])
def test_a_real_device_tells_a_reader_that_waits_from_one_that_does_not(way: str) -> None:
    with streams(device="cuda") as held:
        pool = Pool((WAITS | WRONG)[way], torch.Tensor.cuda)
        if way in WRONG:
            with pytest.raises(IntegrityError, match="KV201"):
                judge(held, pool, seed=LAZY)
        else:
            result = judge(held, pool, seed=LAZY)
            assert (result.orderings, beside_save(result.not_tried)) == (LAYERS, ())
