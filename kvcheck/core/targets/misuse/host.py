"""Misuse of a host pool: ids, layers, buffers, words and payloads that do not fit.

Invariants:
- Copies that are refused, or at an edge, are planned and not run. Copies that are run go between a host pool and words
  of their own; what is unpacked is what was packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from kvcheck.core.base.errors import LayoutMismatch, LengthMismatch, UsageError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import ChunkWork
from kvcheck.core.cache.hicache.host_pool import HostPool, layout_axes
from kvcheck.core.targets.misuse.call import Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import PAGES, Scene, StillBackend, ids

UNITS = 3
PAIR = ids(1, 2)
FLOATS = np.array([1.0])
TABLE = np.array([[1]])


@dataclass(frozen=True, slots=True)
class Copies:
    """A host pool and the words of the device beside it."""

    scene: Scene
    host: HostPool
    words: Mapping[str, torch.Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """The buffers of the full space."""
        return tuple(self.words)

    @property
    def layers(self) -> int:
        """The layers of the full space."""
        return next(iter(self.words.values())).shape[0]

    def backup(
        self,
        *,
        space: str = "full",
        buffers: Sequence[str] | None = None,
        host: IndexArray = PAIR,
        device: IndexArray = PAIR,
        words: Mapping[str, torch.Tensor] | None = None,
    ) -> bool:
        """Plan a backup; whether there is anything to copy."""
        names, given = self.names if buffers is None else buffers, self.words if words is None else words
        return bool(self.host.backup_chunks(space, names, host=host, device=device, words=given))

    def load(self, *, layer: int = 0, host: IndexArray = PAIR, device: IndexArray = PAIR) -> bool:
        """Plan a load."""
        return (
            len(self.host.load_chunks("full", self.names, layer=layer, host=host, device=device, words=self.words)) > 0
        )

    def touched(self, units: IndexArray = PAIR, layers: tuple[int, int] = (0, 1), space: str = "full") -> bool:
        """Name a footprint."""
        return len(self.host.footprint(space, self.names, units, layers=layers).rows) == len(units)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The words with those of the last buffer changed."""
        *first, last = self.words
        return {name: self.words[name] for name in first} | {last: change(self.words[last])}

    def unpacked(self, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Unpack what was packed, changed."""
        self.host.unpack("full", 0, change(self.host.pack("full", 0)))
        return True

    def numbered(self) -> dict[str, torch.Tensor]:
        """Words of their own: every word of a buffer is another one."""
        return {name: torch.arange(each.numel(), dtype=torch.int64).view_as(each) for name, each in self.words.items()}

    def kept(self) -> object:
        """What no refused call may change."""
        return self.scene.backend.acts, self.host.size_bytes()


def _host(
    scene: Scene, *, units: Mapping[str, int] | None = None, layout: str = "layer-first", method: str = "direct"
) -> HostPool:
    return HostPool(
        scene.pool.specs,
        units={spec.name: UNITS for spec in scene.pool.specs} if units is None else units,
        page_size=scene.page,
        layout=layout,
        method=method,
        backend=StillBackend(),
    )


def _made(*, layout: str = "layer-first", method: str = "direct") -> Callable[[Copies], object]:
    return lambda each: _host(each.scene, layout=layout, method=method)


def _units(count: int | None) -> Callable[[Copies], object]:
    """A host pool whose last space has so many units; None: it is not named."""

    def made(each: Copies) -> bool:
        *first, last = [spec.name for spec in each.scene.pool.specs]
        units = dict.fromkeys(first, UNITS) | ({} if count is None else {last: count})
        return _host(each.scene, units=units).size_bytes() > 0

    return made


def _backup(*, host: IndexArray = PAIR, device: IndexArray = PAIR) -> Callable[[Copies], object]:
    return lambda each: each.backup(host=host, device=device)


def _load(*, host: IndexArray = PAIR, device: IndexArray = PAIR) -> Callable[[Copies], object]:
    return lambda each: each.load(host=host, device=device)


WRONG_IDS: tuple[tuple[str, type[LayoutMismatch | LengthMismatch], dict[str, IndexArray]], ...] = (
    ("a host id of -1", LayoutMismatch, {"host": ids(0, -1)}),
    ("a host id above the last", LayoutMismatch, {"host": ids(0, UNITS)}),
    ("the device's padding", LayoutMismatch, {"device": ids(0, 1)}),
    ("a device id above the last", LayoutMismatch, {"device": ids(1, PAGES + 1)}),
    ("one host id less", LengthMismatch, {"host": ids(1)}),
    ("one device id less", LengthMismatch, {"device": ids(1)}),
    ("host ids as floats", LayoutMismatch, {"host": FLOATS, "device": ids(1)}),
    ("device ids in two rows", LayoutMismatch, {"host": ids(1), "device": TABLE}),
)
EDGES = {"host": ids(0, UNITS - 1), "device": ids(1, PAGES)}

LAYOUTS = ("layer-first", "page-first", "page-first-direct")
METHODS = ("kernel", "direct")
PAIRS: tuple[tuple[IndexArray, IndexArray], ...] = (
    (ids(0, 1, 2), ids(2, 3, 4)),
    (ids(0, 1, 2), ids(1, 3, 5)),
    (ids(0, 2), ids(1, 2)),
    (ids(2, 1, 0), ids(4, 5, 6)),
    (ids(0, 1, 2), ids(PAGES, 1, 2)),
)
"""Host ids and device ids: runs on both sides, on one side alone, and on neither."""


def _moved(layout: str, method: str) -> Callable[[Copies], object]:
    """Units go to the host and come back, to the bit, and no other unit changes."""

    def call(each: Copies) -> bool:
        host = _host(each.scene, layout=layout, method=method)
        return all(_there_and_back(each, host, hosts, devices) for hosts, devices in PAIRS)

    return call


def _there_and_back(each: Copies, host: HostPool, hosts: IndexArray, devices: IndexArray) -> bool:
    words = each.numbered()
    back = {name: torch.full_like(of, -1) for name, of in words.items()}
    _run(host.backup_chunks("full", each.names, host=hosts, device=devices, words=words))
    for layer in range(each.layers):
        _run(host.load_chunks("full", each.names, layer=layer, host=hosts, device=devices, words=back))
    for name in each.names:
        source, target = (_by_unit(of[name]) for of in (words, back))
        kept = [host.unit_words("full", name, unit) for unit in hosts.tolist()]
        if not all(torch.equal(one, source[:, unit]) for one, unit in zip(kept, devices.tolist(), strict=True)):
            return False
        untouched = np.setdiff1d(np.arange(PAGES + 1), devices)
        if not torch.equal(target[:, devices], source[:, devices]) or not bool((target[:, untouched] == -1).all()):
            return False
    return True


def _by_unit(words: torch.Tensor) -> torch.Tensor:
    """[L, units, r, W]"""
    return words.view(words.shape[0], PAGES + 1, -1, words.shape[2])


def _run(chunks: Iterable[ChunkWork]) -> None:
    for chunk in chunks:
        chunk()


def _copied(each: Copies) -> bool:
    """Nobody changes a unit through the words that were given out of it."""
    given = each.host.unit_words("full", each.names[0], 0)
    before = given.clone()
    given += 1
    return torch.equal(before, each.host.unit_words("full", each.names[0], 0))


COPIES: tuple[Misuse[Copies], ...] = (
    *(
        Misuse(f"copies by {method} with a host in {layout}", None, _moved(layout, method))
        for layout, method in product(LAYOUTS, METHODS)
    ),
    Misuse("words of a unit that are changed by who has them", None, _copied),
    *(Misuse(f"backup with {what}", error, _backup(**given)) for what, error, given in WRONG_IDS),
    *(Misuse(f"load with {what}", error, _load(**given)) for what, error, given in WRONG_IDS),
    Misuse("backup to one host id twice", LayoutMismatch, _backup(host=ids(1, 1))),
    Misuse("load to one device id twice", LayoutMismatch, _load(device=ids(1, 1))),
    Misuse("backup of one device id twice", None, _backup(device=ids(1, 1))),
    Misuse("load of one host id twice", None, _load(host=ids(1, 1))),
    Misuse("backup of the first and the last id", None, _backup(**EDGES)),
    Misuse("load of the first and the last id", None, _load(**EDGES)),
    Misuse("backup of no id", None, lambda each: not each.backup(host=ids(), device=ids())),
    Misuse("load of layer -1", LayoutMismatch, lambda each: each.load(layer=-1)),
    Misuse("load of a layer above the last", LayoutMismatch, lambda each: each.load(layer=each.layers)),
    Misuse("load of the last layer", None, lambda each: each.load(layer=each.layers - 1)),
    Misuse("backup in a space that the pool lacks", LayoutMismatch, lambda each: each.backup(space="none")),
    Misuse("backup of a buffer that the space lacks", LayoutMismatch, lambda each: each.backup(buffers=("none",))),
    Misuse("backup of one buffer twice", LayoutMismatch, lambda each: each.backup(buffers=each.names[:1] * 2)),
    Misuse("backup without the words of a buffer", LayoutMismatch, lambda each: each.backup(words={})),
    Misuse(
        "backup of words of 32 bits",
        LayoutMismatch,
        lambda each: each.backup(words=each.changed(lambda words: words.view(torch.int32)[..., : words.shape[2]])),
    ),
    Misuse(
        "backup of words without rows",
        LayoutMismatch,
        lambda each: each.backup(words=each.changed(lambda words: words[0])),
    ),
    Misuse(
        "backup of words with a layer less",
        LayoutMismatch,
        lambda each: each.backup(words=each.changed(lambda words: words[1:])),
    ),
    Misuse(
        "backup of words with a narrower row",
        LayoutMismatch,
        lambda each: each.backup(words=each.changed(lambda words: words[..., 1:])),
    ),
    Misuse(
        "footprint of layers beyond the last", LayoutMismatch, lambda each: each.touched(layers=(0, each.layers + 1))
    ),
    Misuse("footprint of layers from -1", LayoutMismatch, lambda each: each.touched(layers=(-1, 1))),
    Misuse("footprint of no layer", LayoutMismatch, lambda each: each.touched(layers=(1, 1))),
    Misuse("footprint of all layers", None, lambda each: each.touched(layers=(0, each.layers))),
    Misuse("footprint of the id -1", LayoutMismatch, lambda each: each.touched(ids(-1))),
    Misuse("footprint of an id above the last", LayoutMismatch, lambda each: each.touched(ids(UNITS))),
    Misuse("footprint of ids as floats", LayoutMismatch, lambda each: each.touched(FLOATS)),
    Misuse("footprint of the first and the last id", None, lambda each: each.touched(ids(0, UNITS - 1))),
    Misuse("footprint in a space that the pool lacks", LayoutMismatch, lambda each: each.touched(space="none")),
    Misuse("words of unit -1", LayoutMismatch, lambda each: each.host.unit_words("full", each.names[0], -1)),
    Misuse(
        "words of a unit above the last",
        LayoutMismatch,
        lambda each: each.host.unit_words("full", each.names[0], UNITS),
    ),
    Misuse(
        "words of the last unit",
        None,
        lambda each: each.host.unit_words("full", each.names[0], UNITS - 1).shape[0] == each.layers,
    ),
    Misuse("pack in a space that the pool lacks", LayoutMismatch, lambda each: each.host.pack("none", 0)),
    Misuse("unpack of one byte less", LengthMismatch, lambda each: each.unpacked(lambda payload: payload[:-1])),
    Misuse(
        "unpack of one byte more",
        LengthMismatch,
        lambda each: each.unpacked(lambda payload: torch.cat((payload, payload[:1]))),
    ),
    Misuse("unpack of words", LayoutMismatch, lambda each: each.unpacked(lambda payload: payload.view(torch.int8))),
    Misuse(
        "unpack of bytes in two rows", LayoutMismatch, lambda each: each.unpacked(lambda payload: payload.view(1, -1))
    ),
    Misuse("unpack to unit -1", LayoutMismatch, lambda each: each.host.unpack("full", -1, each.host.pack("full", 0))),
    Misuse(
        "unpack to a unit above the last",
        LayoutMismatch,
        lambda each: each.host.unpack("full", UNITS, each.host.pack("full", 0)),
    ),
    Misuse("unpack of what was packed", None, lambda each: each.unpacked(lambda payload: payload)),
    Misuse("a host pool of an unknown layout", UsageError, _made(layout="none")),
    Misuse("a host pool of an unknown copy method", UsageError, _made(method="none")),
    Misuse("axes of an unknown layout", UsageError, lambda each: layout_axes("none")),
    Misuse("a host pool with a space of no unit", LayoutMismatch, _units(0)),
    Misuse("a host pool with a space that is not sized", LayoutMismatch, _units(None)),
    Misuse("a host pool with a space of one unit", None, _units(1)),
)


def host_attempts(scene: Scene) -> list[Attempt]:
    """Of a host pool beside the scene's pool."""
    space = scene.pool.sets["full"]
    words = {buffer.name: space.write_view(buffer.name) for buffer in space.spec.buffers}
    return on_each(COPIES, Copies(scene, _host(scene), words), Copies.kept)
