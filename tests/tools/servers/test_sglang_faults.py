"""Faults in SGLang: a model runner and pools of a few lines, under the names that the faults look for.

A page has two tokens; the pool holds six pages of one layer. What a request writes is its own number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tools.servers.faults.planting import LOG, ORDERS, Order, events
from tools.servers.faults.sglang_faults import Faults
from tools.servers.sglang_cpu import commands

PAGE = 2


class Pool:
    """SGLang's MHATokenToKVPool."""

    page_size = PAGE
    start_layer = 0

    def __init__(self) -> None:
        self.k_buffer, self.v_buffer = [torch.zeros(6 * PAGE, 1, 1)], [torch.zeros(6 * PAGE, 1, 1)]

    def set_kv_buffer(self, layer: Any, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.k_buffer[layer.layer_id][slots], self.v_buffer[layer.layer_id][slots] = keys, values


class LatentPool:
    """SGLang's MLATokenToKVPool."""

    page_size = PAGE
    start_layer = 0

    def __init__(self) -> None:
        self.kv_buffer = [torch.zeros(6 * PAGE, 1, 1)]

    def set_kv_buffer(self, layer: Any, slots: torch.Tensor, latents: torch.Tensor, _: torch.Tensor) -> None:
        self.kv_buffer[layer.layer_id][slots] = latents

    set_mla_kv_buffer = set_kv_buffer


LATENT_WRITES = ("set_kv_buffer", "set_mla_kv_buffer")


class Runner:
    """SGLang's ModelRunner: each request of a step writes its number into the slots that are new."""

    def __init__(self, pool: Pool) -> None:
        self.token_to_kv_pool = pool
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32))

    def forward(self, batch: Any) -> None:
        computed = batch.extend_prefix_lens_cpu if batch.is_prefill else (batch.seq_lens - 1).tolist()
        for i, name in enumerate(batch.rids):
            slots = self.req_to_token_pool.req_to_token[i, computed[i] : int(batch.seq_lens[i])].long()
            rows = torch.full((len(slots), 1, 1), float(name))
            self.token_to_kv_pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots, rows, rows)


class Engine:
    def __init__(self, folder: Path) -> None:
        self.faults = Faults(folder / "orders", folder / "log")
        names = {"ModelRunner": Runner, "MHATokenToKVPool": Pool, "MLATokenToKVPool": LatentPool}
        for _, change in self.faults.changes():
            module = ModuleType("engine")
            vars(module).update(names)
            change(module)
        self.pool = Pool()
        self.runner = Runner(self.pool)

    def step(self, *requests: tuple[str, int, int, Sequence[int]], is_prefill: bool = True) -> None:
        """Run (request, tokens that are there, tokens afterwards, pages)."""
        for i, (_, _, _, pages) in enumerate(requests):
            slots = torch.tensor([page * PAGE + at for page in pages for at in range(PAGE)], dtype=torch.int32)
            self.runner.req_to_token_pool.req_to_token[i, : len(slots)] = slots
        self.runner.forward(
            SimpleNamespace(
                rids=[name for name, *_ in requests],
                seq_lens=torch.tensor([length for _, _, length, _ in requests]),
                req_pool_indices=torch.arange(len(requests)),
                extend_prefix_lens_cpu=[computed for _, computed, *_ in requests] if is_prefill else None,
                forward_mode=SimpleNamespace(is_extend=lambda: is_prefill),
                is_prefill=is_prefill,
            )
        )

    def holds(self) -> list[float]:
        """The first key of each page; the values are the same."""
        assert torch.equal(self.pool.k_buffer[0], self.pool.v_buffer[0])
        return self.pool.k_buffer[0][::PAGE, 0, 0].tolist()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    for of, name in ((Runner, "forward"), (Pool, "set_kv_buffer"), *((LatentPool, write) for write in LATENT_WRITES)):
        monkeypatch.setattr(of, name, getattr(of, name))  # put back afterwards
    return Engine(tmp_path)


def test_the_prefill_server_of_a_pair_is_the_first_and_alone_has_faults(tmp_path: Path) -> None:
    made = commands(Path("envs"), Path("m4"), folder=tmp_path, variant="pair", has_faults=True)
    assert [each.words[each.words.index("--disaggregation-mode") + 1] for each in made] == ["prefill", "decode"]
    assert [{ORDERS, LOG} & set(each.variables) for each in made] == [{ORDERS, LOG}, set()]
    (clean,) = commands(Path("envs"), Path("m4"), folder=tmp_path)
    assert ORDERS not in clean.variables


def planted(engine: Engine) -> list[tuple[object, ...]]:
    return [(each["event"], each.get("request"), each.get("positions")) for each in events(engine.faults.log)]


def test_without_an_order_for_the_layer_every_request_finds_what_it_wrote(engine: Engine) -> None:
    Order(kind="stale", layer=3, page=0).give(engine.faults.orders)
    engine.step(("1", 0, 4, [1, 2]), ("2", 0, 3, [3, 4]))
    engine.step(("1", 4, 5, [1, 2, 5]), ("2", 3, 4, [3, 4]), is_prefill=False)
    assert engine.holds() == [0, 1, 1, 2, 2, 1]
    assert planted(engine) == []


@pytest.mark.parametrize("write", [None, *LATENT_WRITES])
@pytest.mark.parametrize(
    ("kind", "after"),
    [("stale", [0, 1, 1, 0, 2, 2]), ("foreign", [0, 1, 1, 1, 2, 2])],
)
def test_a_page_of_a_prefill_keeps_its_former_content_or_gets_another_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, write: str | None, kind: str, after: list[float]
) -> None:
    held = engine.pool.k_buffer
    if write is not None:
        latents = LatentPool()
        monkeypatch.setattr(latents, "set_kv_buffer", getattr(latents, write))
        engine.runner.token_to_kv_pool = latents  # type: ignore[assignment]
        held = latents.kv_buffer
    engine.step(("1", 0, 4, [1, 2]))
    Order(kind=kind, layer=0, page=0).give(engine.faults.orders)
    engine.step(("2", 0, 6, [3, 4, 5]))
    assert held[0][::PAGE, 0, 0].tolist() == after
    assert planted(engine) == [("planted", "2", [0, 1])]
    engine.step(("3", 2, 4, [3, 1]))
    assert planted(engine)[1:] == [("reads", "3", None)], "a hit of the damaged page"


def test_a_fault_that_changes_nothing_is_none(engine: Engine) -> None:
    engine.step(("1", 0, 4, [1, 2]))
    Order(kind="stale", layer=0, page=0).give(engine.faults.orders)
    engine.step(("1", 0, 4, [1, 2]))
    assert planted(engine) == []
    engine.step(("2", 0, 4, [1, 2]))
    assert engine.holds()[:3] == [0, 1, 2]
    assert planted(engine) == [("planted", "2", [0, 1])]
