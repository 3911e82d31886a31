"""Host tier: a release's own prefix tree over a small pool, for its cache controller and its host pools.

The tree is made by its constructor with a server's arguments, so the release itself connects pools and controller. Host
memory is found by a search for tensors. The sizes of its axes determine its layout, not the layout's name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from kvcheck.core.base.record import Finding
from kvcheck.core.probes.frame.buffer_views import BufferView, memories
from kvcheck.core.probes.frame.content import ProbeJudge, rows_of
from kvcheck.core.probes.frame.cuda_streams import CudaMachine
from kvcheck.core.probes.frame.device import HOST, pinning
from kvcheck.core.probes.frame.guard import Call, CannotDrive
from kvcheck.core.probes.frame.probe import Rig, StreamsOfDevice
from kvcheck.core.probes.frame.streams import Machine
from kvcheck.core.probes.frame.stubs import replaced
from kvcheck.core.probes.sglang.rig.bare_manager import published
from kvcheck.core.probes.sglang.rig.compiled_copies import CompiledCopies
from kvcheck.core.probes.sglang.rig.copy_engine import CopyEngine
from kvcheck.core.probes.sglang.rig.pools import LAYERS, SmallPool, pool_names, small_pool
from kvcheck.core.probes.sglang.rig.prefix_tree import found_kinds, make_tree

RATIO = 1.4
"""Host pages to device pages: 17 to 12. No other dimension is 17."""
SCRATCH = "staging"
"""In the names of staging memory, which some copies go through and which keeps nothing."""
HOST_POOLS = ("host.mha", "host.mla", "host.index")
LATE = "late"
"""Part of a subject: copies by JIT kernels."""
BACKUP, LOAD = "BACKUP_HOST", "LOAD_BACK"


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Host memory of one device buffer. layers: each [units, ...], or [pages, tokens, ...] if paged.

    paged: tokens of a page, 0 without such an axis.
    """

    name: str
    unit: str
    layers: tuple[torch.Tensor, ...]
    paged: int = 0

    def rows(self, layer: int, ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of units of a layer: [units, bytes]."""
        return self.layers[layer][self._at(ids)].contiguous().flatten(1).view(torch.uint8)

    def fill(self, layer: int, ids: Sequence[int], rows: torch.Tensor) -> None:
        memory, at = self.layers[layer], self._at(ids)
        memory[at] = rows.contiguous().view(memory.dtype).view(memory[at].shape)

    def at(self, row: int) -> tuple[int, ...]:
        return (row // self.paged, row % self.paged) if self.paged else (row,)

    def _at(self, ids: Sequence[int]) -> tuple[torch.Tensor, ...]:
        at = torch.as_tensor(list(ids))
        return (at // self.paged, at % self.paged) if self.paged else (at,)


@dataclass(slots=True, kw_only=True)
class RigHostTier:
    made: SmallPool
    tree: Any
    controller: Any
    copies: CopyEngine | CompiledCopies
    buffers: tuple[HostBuffer, ...]
    modules: tuple[ModuleType, ...]
    machine: StreamsOfDevice
    pinned: PinnedMemory

    def close(self) -> None:
        if self.pinned.starts:
            self.machine.settle()
            self.pinned.give_back()

    @property
    def lacking(self) -> tuple[str, ...]:
        has = {each.name for each in self.buffers}
        return tuple(name for name in self.made.writer.found.names() if name not in has)

    def extras(self, phase: str, names: Any, **indices: torch.Tensor | None) -> dict[str, Any]:
        if hasattr(self.tree, "_get_extra_pools"):
            extra: dict[str, Any] = self.tree._get_extra_pools()
            return extra
        if hasattr(self.tree, "_build_sidecar_transfers"):
            transfer = names["hicache.transfer"](name=names["hicache.pool-name"].KV, **indices)
            made = self.tree._build_sidecar_transfers(getattr(names["hicache.phase"], phase), transfer, {})
            return {"extra_pools": made or None}
        if len(getattr(self.controller.mem_pool_host, "entries", ())) > 1:
            raise CannotDrive("the tree has several host pools, and does not say how it names them to the controller")
        return {}

    def pages(self, host: torch.Tensor) -> dict[str, list[int]]:
        ids = host.to(torch.int64).tolist()
        return {"token": ids, "page": [first // self.made.page_size for first in ids[:: self.made.page_size]]}

    def check_host(self, judge: ProbeJudge, request: int, host: torch.Tensor, when: str) -> None:
        right: dict[str, int] = {}
        for buffer, held in self._paired():
            ids = self.pages(host)[held.unit]
            right[held.name] = right.get(held.name, 0) + judge.compare(
                replace(held, tier="host"),
                buffer.rows(held.layer, ids),
                request=request,
                positions=range(len(ids)),
                ids=ids,
                when=when,
            )
        for name in (name for name, count in right.items() if not count):
            text = f"{when}: not a row of {name} on the host is request {request}'s, in any layer"
            judge.find("KV304", "contract", text, buffer=name, request=request, tier="host")

    def holds_either(self, request: int, host: torch.Tensor, other: Mapping[tuple[str, int], torch.Tensor]) -> bool:
        """Return whether each row on the host is the request's, or that of `other`. other: by buffer and layer."""
        for buffer, held in self._paired():
            ids = self.pages(host)[held.unit]
            rows = buffer.rows(held.layer, ids)
            wanted = [rows_of(held, request, range(len(ids))), other.get((held.name, held.layer), rows.new_zeros(0))]
            same = [(rows == each.to(rows.device)).all(1) for each in wanted if each.shape == rows.shape]
            if not torch.stack(same).any(0).all():
                return False
        return True

    def write_host(self, request: int, host: torch.Tensor) -> None:
        for buffer, held in self._paired():
            ids = self.pages(host)[held.unit]
            buffer.fill(held.layer, ids, rows_of(held, request, range(len(ids))))

    def copied(self, finding: Finding) -> Call:
        """Return the engine's functions at the last copy to the row of a finding, or to the buffer of one without."""
        for buffer, held in self._paired():
            if held.name == finding.buffer and finding.layer in (None, held.layer):
                memory = buffer.layers[held.layer] if finding.tier == "host" else held.rows
                if finding.row is None:
                    return self.copies.asker(memory.untyped_storage().data_ptr(), memory.untyped_storage().nbytes())
                row = memory[buffer.at(finding.row)] if finding.tier == "host" else memory[finding.row]
                return self.copies.asker(row.data_ptr(), 1)
        return ()

    def _paired(self) -> Iterator[tuple[HostBuffer, BufferView]]:
        by_name = {buffer.name: buffer for buffer in self.buffers}
        for held in self.made.writer.found.buffers:
            if held.name in by_name:
                yield by_name[held.name], held


def host_tier_needs(family: str) -> tuple[str, ...]:
    return (*pool_names(family), "tree.params", "server.args", "server.publish")


def make_host_tier(rig: Rig, family: str, backend: str, layout: str) -> RigHostTier:
    """Make a fresh host tier, to be closed. Raises CannotDrive if the release cannot make it."""
    late, backend = backend == LATE, "kernel" if backend == LATE else backend
    real = not isinstance(rig.machine, Machine)
    # On a device the release itself selects copies compiled at run time, for rows that are wide enough.
    made = small_pool(rig, family, is_wide=late and real)
    pinned = PinnedMemory()
    own = {
        "page_size": made.page_size,
        "enable_hierarchical_cache": True,
        "hicache_ratio": RATIO,
        "hicache_size": 0,
        "hicache_mem_layout": layout,
        "hicache_io_backend": backend,
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": None,
        "disable_hicache_numa_detect": True,
    }
    kind = found_kinds(rig, "tree")[0]
    pins = pinned.watched() if real else pinning()
    with published(rig.names, **own) as arguments, pins, _late(rig) if late and not real else nullcontext():
        tree = rig.measured(
            lambda: make_tree(
                rig,
                kind.name,
                family,
                request_pool=made.request_pool,
                allocator=made.allocator,
                page_size=made.page_size,
                host_tier=arguments,
            ),
            "making the prefix tree",
        )
    controller = tree.cache_controller
    host = controller.mem_pool_host
    if (controller.io_backend, host.layout) != (backend, layout):
        raise CannotDrive(f"asked for {backend} {layout}, the release makes {controller.io_backend} {host.layout}")
    devices = [tensor for _, _, tensor in memories(made.pool, rig.package)]
    starts = {tensor.untyped_storage().data_ptr() for tensor in devices}
    others = [each for each in memories(host, rig.package) if each[2].untyped_storage().data_ptr() not in starts]
    found = [each for each in others if SCRATCH not in each[0] and each[2].device.type == HOST]
    for _, _, tensor in found:
        tensor.zero_()  # marks rows that were never written
    return RigHostTier(
        made=made,
        tree=tree,
        controller=controller,
        copies=_copies(rig, (*devices, *(tensor for _, _, tensor in others))),
        buffers=tuple(_buffers(made, found, int(host.size))),
        modules=_modules(host, rig.package),
        machine=rig.machine,
        pinned=pinned,
    )


def _copies(rig: Rig, memory: Sequence[torch.Tensor]) -> CopyEngine | CompiledCopies:
    def complain(text: str) -> None:
        rig.record()
        rig.judge.find("KV301", "contract", text, lane="copy")

    if isinstance(rig.machine, CudaMachine):
        return CompiledCopies(rig.machine, complain)
    regions = [(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in memory]
    return CopyEngine(rig.stand_ins, complain, tuple(sorted(regions)), rig.package)


@contextmanager
def _late(rig: Rig) -> Iterator[None]:
    able = SimpleNamespace(capabilities=SimpleNamespace(hicache_device_kernels=True))
    own = {
        "_is_cuda": True,
        "can_use_hicache_jit_kernel": lambda **_: True,
        "can_use_write_back_jit_kernel": lambda **_: True,
        "current_platform": able,
    }
    kinds = [rig.names[name] for name in HOST_POOLS if rig.names.has(name)]
    with ExitStack() as stack:
        for module in dict.fromkeys(sys.modules[kind.__module__] for kind in kinds):
            stack.enter_context(replaced(module, {name: own[name] for name in own if name in vars(module)}))
        yield


def _modules(host: Any, package: str) -> tuple[ModuleType, ...]:
    pools = [host, *(entry.host_pool for entry in getattr(host, "entries", ()))]
    kinds = [kind.__module__ for pool in pools for kind in type(pool).__mro__]
    names = dict.fromkeys(name for name in kinds if name.partition(".")[0] == package)
    return tuple(sys.modules[name] for name in names)


def _buffers(made: SmallPool, found: Sequence[tuple[str, int, torch.Tensor]], tokens: int) -> Iterator[HostBuffer]:
    """The n-th host memory of a unit belongs to the n-th device buffer of that unit."""
    parts: dict[str, list[tuple[str, list[torch.Tensor]]]] = {"token": [], "page": []}
    paged: dict[str, int] = {}
    for name, at, tensor in found:
        unit, paged[name], pieces = _pieces(name, tensor, made.page_size, tokens)
        if at and parts[unit] and parts[unit][-1][0] == name:  # a list of one tensor a layer
            parts[unit][-1][1].extend(pieces[0])
        else:
            parts[unit] += [(name, list(layers)) for layers in pieces]
    for unit, buffers in parts.items():
        devices = dict.fromkeys(held.name for held in made.writer.found.buffers if held.unit == unit)
        if len(buffers) > len(devices):
            names = ", ".join(name for name, _ in buffers)
            raise CannotDrive(f"the host has {names} for {', '.join(devices) or 'nothing'}, {unit} by {unit}")
        for device, (name, layers) in zip(devices, buffers, strict=False):
            if len(layers) != LAYERS:
                raise CannotDrive(f"{name} on the host has {len(layers)} layers of {LAYERS}")
            yield HostBuffer(device, unit, tuple(layers), paged[name])


def _pieces(name: str, tensor: torch.Tensor, page_size: int, tokens: int) -> tuple[str, int, list[list[torch.Tensor]]]:
    """Return the unit, tokens of a page (0 without such an axis), and the layers of each buffer, units first."""
    shape = list(tensor.shape)
    pages = [at for at, size in enumerate(shape) if size in (tokens // page_size, tokens // page_size + 1)]
    rows = [at for at, size in enumerate(shape) if size == tokens]
    inner = [at for at, size in enumerate(shape) if size == page_size]
    layers = [at for at, size in enumerate(shape) if size == LAYERS]
    units = rows or pages
    if len(units) != 1 or len(layers) > 1 or len(inner) > 1:
        raise CannotDrive(f"{name} on the host is {shape}, of which nobody knows what its axes are")
    front = [*units, *(inner if not rows else [])]
    known = {*front, *layers}
    several = [0] if 0 not in known else []
    rest = [at for at in range(len(shape)) if at not in {*known, *several}]
    view = tensor.permute(*several, *layers, *front, *rest)
    for axis in (several, layers):
        if not axis:
            view = view.unsqueeze(0 if axis is several else 1)
    unit = "token" if rows or inner else "page"
    return unit, page_size if len(front) == 2 else 0, [list(each) for each in view]


@dataclass(slots=True)
class PinnedMemory:
    """Addresses pinned in `watched` and not unpinned since."""

    starts: list[int] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        before: Callable[[], Any] = torch.cuda.cudart
        with replaced(torch.cuda, {"cudart": lambda: _Runtime(before(), self.starts)}):
            yield

    def give_back(self) -> None:
        """Raises CannotDrive if the runtime refuses. No work may be queued on the device."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        refused = [code for start in self.starts if (code := int(runtime.cudaHostUnregister(start)))]
        self.starts.clear()
        if refused:
            raise CannotDrive(
                f"host memory of an earlier pool cannot be unpinned: cudaHostUnregister says {refused[0]}"
            )


class _Runtime:
    def __init__(self, runtime: Any, starts: list[int]) -> None:
        self._runtime = runtime
        self._starts = starts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def cudaHostRegister(self, start: int, *rest: Any) -> Any:
        code = self._runtime.cudaHostRegister(start, *rest)
        if int(code) == 0:
            self._starts.append(start)
        return code

    def cudaHostUnregister(self, start: int) -> Any:
        code = self._runtime.cudaHostUnregister(start)
        if int(code) == 0 and start in self._starts:
            self._starts.remove(start)
        return code
