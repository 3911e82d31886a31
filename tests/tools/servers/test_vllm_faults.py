"""Broken rules of attention in vLLM: an attention of a few lines, under the names that the faults look for.

A layer returns, for each token, how many positions its window holds, or all, and the sink. Pages have two tokens.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tools.servers.faults.planting import LOG, ORDERS, Order, events
from tools.servers.vllm_cpu import FAULTS, commands

PAGE, WINDOW, SINK = 2, 3, 5.0
Step = Callable[[Sequence[tuple[str, int, int]]], list[list[float]]]


class Attention:
    """vLLM's CPUAttentionBackendImpl, as far as the faults see it."""

    def __init__(self) -> None:
        self.sliding_window, self.sinks = WINDOW, torch.tensor([SINK])

    def do_kv_cache_update(self, *_: Any) -> None:
        """Nothing is read from the cache here."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> Any:
        if attn_metadata is None:
            return output
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for i, length in enumerate(lengths):
            for at in range(starts[i], starts[i + 1]):
                position = length - (starts[i + 1] - at)
                seen = position + 1 if self.sliding_window < 0 else min(position + 1, self.sliding_window)
                output[at, 0], output[at, 1] = seen, self.sinks[0]
        return output


class Runner:
    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=list[str]())


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    """What layer 1 returns for a step: (request, tokens held before it, tokens after it) of each."""

    class Backend(Attention):
        pass

    class Worker(Runner):
        pass

    names: dict[str, dict[str, Any]] = {
        "vllm.forward_context": {"get_forward_context": lambda: SimpleNamespace(attn_metadata=None)},
        "vllm.v1.attention.backends.cpu_attn": {"CPUAttentionBackendImpl": Backend},
        "vllm.v1.worker.cpu_model_runner": {"CPUModelRunner": Worker},
    }
    for name, held in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for each, value in held.items():
            monkeypatch.setattr(sys.modules[name], each, value, raising=False)
    monkeypatch.syspath_prepend(str(FAULTS))
    for name in ("planting", "vllm_faults"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(ORDERS, str(tmp_path / "orders"))
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    importlib.import_module("vllm_faults")
    runner, attention = Worker(), Backend()

    def run(batch: Sequence[tuple[str, int, int]]) -> list[list[float]]:
        counts = [length - computed for _, computed, length in batch]
        starts = torch.tensor([0, *counts]).cumsum(0)
        metadata = SimpleNamespace(
            query_start_loc=starts,
            seq_lens=torch.tensor([length for _, _, length in batch]),
            block_table=torch.zeros(len(batch), 8, dtype=torch.int64),
        )
        runner.input_batch.req_ids = [name for name, _, _ in batch]
        layer = SimpleNamespace(layer_name="model.layers.1.self_attn.attn")
        output = torch.zeros(int(starts[-1]), 2)
        cache = torch.zeros(8, 1, PAGE, 2)
        attention.forward(layer, None, None, None, cache, metadata, output=output)
        assert attention.sliding_window == WINDOW and attention.sinks.tolist() == [SINK], (
            "the rule is broken for a call"
        )
        return output.tolist()

    yield run
    for name in ("planting", "vllm_faults"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("kind", "window", "sink"),
    [
        ("window-longer", WINDOW + 1, SINK),
        ("window-shorter", WINDOW - 1, SINK),
        ("sink-lost", WINDOW, -1e4),
        ("sink-twice", WINDOW, 2 * SINK),
    ],
)
def test_a_rule_is_broken_for_requests_that_began_with_a_hit(
    kind: str, window: int, sink: float, step: Step, tmp_path: Path
) -> None:
    batch = [("cold", 0, 4), ("warm", 4, 6)]
    right = [[1, SINK], [2, SINK], [3, SINK], [3, SINK], [3, SINK], [3, SINK]]
    assert step(batch) == right, "no order"
    Order(kind=kind, layer=1).give(tmp_path / "orders")
    assert step(batch) == [*right[:4], [window, sink], [window, sink]]
    assert step([("cold", 4, 5), ("warm", 6, 7)]) == [right[-1], [window, sink]], "decoding, they are what they were"
    assert events(tmp_path / "log") == [{"event": "planted", "kind": kind, "layer": 1, "request": "warm"}]
    (tmp_path / "orders").unlink()
    assert step([("warm", 7, 8)]) == [right[-1]]


def test_what_changes_nothing_and_another_layer_are_not_noted(step: Step, tmp_path: Path) -> None:
    Order(kind="window-longer", layer=0).give(tmp_path / "orders")
    assert step([("warm", 4, 5)]) == [[WINDOW, SINK]]
    Order(kind="window-longer", layer=1).give(tmp_path / "orders")
    assert step([("short", 1, 2)]) == [[2, SINK]], "two positions fit into both windows"
    assert events(tmp_path / "log") == []


def test_the_server_loads_the_faults_where_they_are_asked_for(tmp_path: Path) -> None:
    flag = "--worker-extension-cls"
    faulty, clean = (
        commands(Path("envs"), Path("m4"), folder=tmp_path, has_faults=has_faults)[0] for has_faults in (True, False)
    )
    module, _, name = faulty.words[faulty.words.index(flag) + 1].partition(".")
    assert f"class {name}:" in (FAULTS / f"{module}.py").read_text() and {ORDERS, LOG} <= set(faulty.variables)
    assert flag not in clean.words and ORDERS not in clean.variables


def test_an_order_that_comes_again_is_noted_again(step: Step, tmp_path: Path) -> None:
    for _ in range(2):
        Order(kind="sink-lost", layer=1).give(tmp_path / "orders")
        step([("warm", 4, 5)])
        step([("warm", 5, 6)])
        (tmp_path / "orders").unlink()
        step([("warm", 6, 7)])
    assert [event["request"] for event in events(tmp_path / "log")] == ["warm", "warm"]
