"""Stand-ins for what only a GPU has, so that SGLang's server runs on a CPU. None of them is code of the engine.

Invariants:
- A stand-in that is asked to move bytes moves them, or raises. A stand-in that moves none says so in its row.
- Names are looked up when the engine's module is loaded: a release that has renamed one does not start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final

from kvcheck.core.probes.frame.stubs import Stubs
from tools.servers.inside.after_import import Change
from tools.servers.inside.ledger import Ledger

_PACKAGES = ("sgl_kernel", "torchvision")


class StandInCannot(RuntimeError):
    """A stand-in was asked for something that it does not do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """module: of the engine, after which it goes in; None: at once. moves_bytes: whether it copies as the real one."""

    module: str | None
    moves_bytes: bool
    shows: str
    put_in: Callable[[str, Ledger, ModuleType | None], None]

    def bind(self, name: str, ledger: Ledger) -> Change:
        return partial(self.put_in, name, ledger)


def _compiled_packages(name: str, ledger: Ledger, _: ModuleType | None) -> None:
    ledger.installed(name)
    _RefusingStubs(name, ledger).install()


class _RefusingStubs(Stubs):
    """Stubs of which nothing may be called: a kernel that computes nothing would give a wrong answer."""

    def __init__(self, stand_in: str, ledger: Ledger) -> None:
        super().__init__("sglang", _PACKAGES)
        self._stand_in = stand_in
        self._ledger = ledger

    def called(self, name: str) -> None:
        self._ledger.add(f"{self._stand_in}: {name}")
        raise StandInCannot(f"{name} is a compiled kernel that this machine lacks, and the engine calls it")


def _unpinned(name: str, ledger: Ledger, module: Any) -> None:
    """Host pools with pin_memory=False, the engine's own option: nothing here needs memory that a device can read."""
    made = module.HostKVCache.__init__

    @wraps(made)
    def init(pool: Any, *arguments: Any, pin_memory: bool, **named: Any) -> None:
        ledger.add(name)
        made(pool, *arguments, pin_memory=False, **named)

    module.HostKVCache.__init__ = init
    ledger.installed(name)


def _host_copies(name: str, ledger: Ledger, module: Any) -> None:
    """The compiled copies between both tiers, by the names that the host pool calls."""
    from kvcheck.core.probes.sglang.rig.copy_engine import CopyEngine  # loads torch

    engine = CopyEngine(machine=_AtOnce(), complain=_raise)  # type: ignore[arg-type]
    lock = threading.Lock()
    regions: dict[int, int] = {}

    def counted(copy: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            with lock:
                before = engine.moved_bytes
                call(*arguments, **named)
                moved = engine.moved_bytes - before
            asked = named.get("src_indices")
            if not moved and (asked is None or asked.numel()):
                raise StandInCannot(f"{copy} was asked to copy and moved no byte")
            ledger.add(f"{name}: {copy}")
            ledger.add(f"{name}: bytes moved", moved)

        return run

    for copy, call in engine.table().items():
        if not copy.startswith("jit_"):  # a CPU is never offered those that are compiled at run time
            setattr(module, copy, counted(copy, call))
    made = module.MHATokenToKVPoolHost.__init__

    @wraps(made)
    def init(pool: Any, *arguments: Any, **named: Any) -> None:
        made(pool, *arguments, **named)
        for memory in (pool.kv_buffer, *pool.device_k_buffers, *pool.device_v_buffers):
            regions[memory.data_ptr()] = memory.numel() * memory.element_size()
        engine.regions = sorted(regions.items())

    module.MHATokenToKVPoolHost.__init__ = init
    ledger.installed(name)


class _AtOnce:
    """Streams of a machine without a device: all work is done when it is asked for."""

    def queue(self, work: Callable[[], None]) -> None:
        work()


def _raise(text: str) -> None:
    raise StandInCannot(text)


def _sender_indices(name: str, ledger: Ledger, module: Any) -> None:
    """Page indices are taken at once, the engine's own other way, instead of over pinned memory and a CUDA event."""
    assert module.MooncakeKVSender.supports_host_tensor_indices
    module.MooncakeKVSender.supports_host_tensor_indices = False
    ledger.installed(name)


def _attention_on_latents(name: str, ledger: Ledger, module: Any) -> None:
    """Attention of DeepSeek models on the latents themselves, as the engine's deterministic mode has it: its backend
    for CPUs has no row of its own in this table, and the row it gets reads keys of heads from the pool of latents."""

    def on_latents(attention: Any, batch: Any) -> Any:
        ledger.add(name)
        return module._dispatch_mla_subtype(attention, batch)

    module.AttentionBackendRegistry.register("torch_native", on_latents)
    ledger.installed(name)


STAND_INS: Final[dict[str, StandIn]] = {
    "compiled-packages": StandIn(
        module=None,
        moves_bytes=False,
        shows="sgl_kernel and torchvision, which want CUDA: imports succeed, and a call raises",
        put_in=_compiled_packages,
    ),
    "unpinned-host-memory": StandIn(
        module="sglang.srt.mem_cache.pool_host.base",
        moves_bytes=False,
        shows="host memory is not registered with a device: the engine's own option pin_memory=False",
        put_in=_unpinned,
    ),
    "host-copies": StandIn(
        module="sglang.srt.mem_cache.pool_host.mha",
        moves_bytes=True,
        shows="copies of sgl_kernel.kvcacheio between device and host tier: made byte by byte, at once",
        put_in=_host_copies,
    ),
    "sender-indices": StandIn(
        module="sglang.srt.disaggregation.mooncake.conn",
        moves_bytes=False,
        shows="page indices of a transfer without pinned memory and CUDA event: the engine's own other branch",
        put_in=_sender_indices,
    ),
    "attention-on-latents": StandIn(
        module="sglang.srt.models.deepseek_common.attention_backend_handler",
        moves_bytes=False,
        shows="which way of MLA a prefill takes: always on the latents",
        put_in=_attention_on_latents,
    ),
}
