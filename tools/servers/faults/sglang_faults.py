"""Faults in a running SGLang: `tools.servers.inside.start` puts them into its scheduler's process where it has some.

A page of one layer is damaged between the write of a prefill and its attention, so that the prefill itself reads it
too: as where the write was lost. A lost load is made before the step that the pages were loaded for.

Invariants:
- The engine's files stay as they are. Without an order every call passes through.
- A page whose content would not change is not counted as planted.
- SGLang's pool of a layer is [slots, heads, dim], keys and values apart, or with MLA [slots, 1, latent + rotary part];
  a page is a run of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tools.servers.faults.planting import LOST_LOAD, STALE, Held, Order, Planter, Row

Change = Callable[[ModuleType], None]
Memory = tuple[Any, ...]
"""What holds a layer's pages: keys and values, or with MLA latents with rotary parts."""
_RUNNER: Final = "sglang.srt.model_executor.model_runner"
_POOL: Final = "sglang.srt.mem_cache.memory_pool"
_HOST_POOL: Final = "sglang.srt.mem_cache.pool_host.mha"


@dataclass(slots=True)
class Loaded:
    """Pages that a load has brought into one layer, by their block: what each held before. memory: of the layer."""

    memory: Memory
    former: dict[int, Memory] = field(default_factory=dict)


@dataclass(slots=True)
class Faults:
    """Of this process. rows: of the step that runs now, None between steps. loaded: by layer, since the last step."""

    orders: Path
    log: Path
    planter: Planter | None = None
    rows: tuple[Row, ...] | None = None
    loaded: dict[int, Loaded] = field(default_factory=dict)

    def changes(self) -> Iterator[tuple[str, Change]]:
        """Modules of the engine, and what is done to each once it is loaded."""
        yield _RUNNER, self._follow_steps
        yield _POOL, self._watch_writes
        yield _HOST_POOL, self._watch_loads

    def _follow_steps(self, module: ModuleType) -> None:
        """Know the requests of each step."""
        run = module.ModelRunner.forward

        @wraps(run)
        def forward(runner: Any, forward_batch: Any, *arguments: Any, **named: Any) -> Any:
            page_size = runner.token_to_kv_pool.page_size
            if self.planter is None:
                self.planter = Planter(self.orders, self.log, page_size)
            self.rows = _rows(forward_batch, runner.req_to_token_pool.req_to_token, page_size)
            self._lose_loads(self.planter)
            try:
                return run(runner, forward_batch, *arguments, **named)
            finally:
                self.rows = None

        module.ModelRunner.forward = forward

    def _watch_writes(self, module: ModuleType) -> None:
        """What one layer's step writes into its pool; its attention comes next."""
        self._watch_write(module.MHATokenToKVPool, "set_kv_buffer", _keys_and_values)
        for name in ("set_kv_buffer", "set_mla_kv_buffer"):
            self._watch_write(module.MLATokenToKVPool, name, _latents)

    def _watch_write(self, pool_type: Any, name: str, memory_of: Callable[[Any, int], Memory]) -> None:
        write = getattr(pool_type, name)

        @wraps(write)
        def set_kv_buffer(pool: Any, layer: Any, *arguments: Any, **named: Any) -> None:
            if self.rows is None or self.planter is None:
                write(pool, layer, *arguments, **named)
                return
            planter, number, order = self.planter, layer.layer_id, self.planter.order()
            memory = memory_of(pool, number - pool.start_layer)
            chosen = []
            if order is not None and order.layer == number and order.kind != LOST_LOAD:
                chosen = [
                    (row, page, _held(memory, row.blocks[page], planter.page_size))
                    for row, page in planter.candidates(order, self.rows)
                ]
            planter.wrote(number, self.rows)
            write(pool, layer, *arguments, **named)
            for row, page, former in chosen:
                if order is not None and planter.order() == order:  # not all of it is done
                    _plant(planter, order, row, page, memory, former)

        setattr(pool_type, name, set_kv_buffer)

    def _watch_loads(self, module: ModuleType) -> None:
        """Pages of one layer from the host tier; the step that they are for has not begun."""
        load = module.MHATokenToKVPoolHost.load_to_device_per_layer

        @wraps(load)
        def load_to_device_per_layer(
            pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, *rest: Any, **named: Any
        ) -> None:
            memory = (pool.device_k_buffers[layer_id], pool.device_v_buffers[layer_id])
            loaded = self.loaded.setdefault(layer_id, Loaded(memory))
            for slot in device_indices[:: pool.page_size].tolist():
                block = slot // pool.page_size
                loaded.former.setdefault(block, _held(memory, block, pool.page_size))
            load(pool, device_pool, host_indices, device_indices, layer_id, *rest, **named)

        module.MHATokenToKVPoolHost.load_to_device_per_layer = load_to_device_per_layer

    def _lose_loads(self, planter: Planter) -> None:
        """Note what was loaded for this step, and put the former content of an ordered page back."""
        order = planter.order()
        for layer, loaded in self.loaded.items():
            rows = [part for row in self.rows or () if (part := _part(row, loaded.former, planter.page_size))]
            planter.wrote(layer, rows)
            if order is None or order.kind != LOST_LOAD or order.layer != layer:
                continue
            for row, page in planter.candidates(order, rows):
                if planter.order() == order:
                    _plant(planter, order, row, page, loaded.memory, loaded.former[row.blocks[page]])
        self.loaded.clear()


def _keys_and_values(pool: Any, layer: int) -> Memory:
    """Of the local layer, in a pool of heads."""
    return pool.k_buffer[layer], pool.v_buffer[layer]


def _latents(pool: Any, layer: int) -> Memory:
    """Of the local layer, in a pool of MLA."""
    return (pool.kv_buffer[layer],)


def _plant(planter: Planter, order: Order, row: Row, page: int, memory: Memory, former: Memory) -> None:
    """Damage one page, where that changes what it holds."""
    is_own = order.kind in (STALE, LOST_LOAD)
    sources: list[tuple[int, Held] | None] = [None] if is_own else [*planter.sources(row, page if order.same else None)]
    now = _held(memory, row.blocks[page], planter.page_size)
    for source in sources:
        content = former if source is None else _held(memory, source[0], planter.page_size)
        if not all(one.equal(other) for one, other in zip(now, content, strict=True)):
            slots = slice(row.blocks[page] * planter.page_size, (row.blocks[page] + 1) * planter.page_size)
            for target, rows in zip(memory, content, strict=True):
                target[slots] = rows
            planter.planted(order, row, page, source)
            return


def _held(memory: Memory, block: int, page_size: int) -> Memory:
    """A copy of what a page holds."""
    slots = slice(block * page_size, (block + 1) * page_size)
    return tuple(each[slots].clone() for each in memory)


def _rows(batch: Any, table: Any, page_size: int) -> tuple[Row, ...]:
    lengths = batch.seq_lens.tolist()
    is_prefill = batch.forward_mode.is_extend()
    computed = batch.extend_prefix_lens_cpu if is_prefill else [length - 1 for length in lengths]
    slots = batch.req_pool_indices.tolist()
    return tuple(
        Row(
            request=name,
            computed=computed[i],
            length=lengths[i],
            blocks=(table[slots[i], : lengths[i] : page_size] // page_size).tolist(),
        )
        for i, name in enumerate(batch.rids)
    )


def _part(row: Row, loaded: dict[int, tuple[Any, Any]], page_size: int) -> Row | None:
    """The part of a request that was loaded, as if a prefill had written it. None where nothing of it was."""
    pages = [page for page, block in enumerate(row.blocks) if block in loaded]
    if not pages:
        return None
    first, end = pages[0], pages[-1] + 1
    return Row(request=row.request, computed=first * page_size, length=end * page_size, blocks=row.blocks)
