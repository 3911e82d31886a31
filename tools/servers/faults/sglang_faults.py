"""Faults in a running SGLang: `tools.servers.inside.start` puts them into its scheduler's process where it has some.

A page of one layer is damaged between the write of a prefill and its attention, so that the prefill itself reads it
too: as where the write was lost.

Invariants:
- The engine's files stay as they are. Without an order every call passes through.
- A page whose content would not change is not counted as planted.
- SGLang's pool of a layer is [slots, heads, dim], keys and values apart, or with MLA [slots, 1, latent + rotary part];
  a page is a run of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tools.servers.faults.planting import Planter, Row

Change = Callable[[ModuleType], None]
Memory = tuple[Any, ...]
"""What holds a layer's pages: keys and values, or with MLA latents with rotary parts."""
_RUNNER: Final = "sglang.srt.model_executor.model_runner"
_POOL: Final = "sglang.srt.mem_cache.memory_pool"


@dataclass(slots=True)
class Faults:
    """Of this process. rows: of the step that runs now, None between steps."""

    orders: Path
    log: Path
    planter: Planter | None = None
    rows: tuple[Row, ...] | None = None

    def changes(self) -> Iterator[tuple[str, Change]]:
        """Modules of the engine, and what is done to each once it is loaded."""
        yield _RUNNER, self._follow_steps
        yield _POOL, self._watch_writes

    def _follow_steps(self, module: ModuleType) -> None:
        run = module.ModelRunner.forward

        @wraps(run)
        def forward(runner: Any, forward_batch: Any, *arguments: Any, **named: Any) -> Any:
            page_size = runner.token_to_kv_pool.page_size
            if self.planter is None:
                self.planter = Planter(self.orders, self.log, page_size)
            self.rows = _rows(forward_batch, runner.req_to_token_pool.req_to_token, page_size)
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
            planter, size = self.planter, self.planter.page_size
            memory = memory_of(pool, layer.layer_id - pool.start_layer)

            def held(block: int) -> Memory:
                return tuple(each[block * size : (block + 1) * size].clone() for each in memory)

            def put(block: int, content: Memory) -> None:
                for target, rows in zip(memory, content, strict=True):
                    target[block * size : (block + 1) * size] = rows

            store = partial(write, pool, layer, *arguments, **named)
            planter.around_write(layer.layer_id, self.rows, store, held, put)

        setattr(pool_type, name, set_kv_buffer)


def _keys_and_values(pool: Any, layer: int) -> Memory:
    return pool.k_buffer[layer], pool.v_buffer[layer]


def _latents(pool: Any, layer: int) -> Memory:
    return (pool.kv_buffer[layer],)


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
