"""Probe layer-wait: every reader of a pool waits for the load of its layer before it reads.

The engine's own layer counter is registered with the pool; its events are stand-ins. A load writes one layer after the
other on a side stream, which gets on only when somebody waits, or when the seed lets it.

Invariants:
- Readers are found on the pool by their parameters, not by a list; one that cannot be driven is named.
- Each reader reads each layer after a load of its own: what another reader waited for is no excuse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvcheck.core.targets.engines.calls import fitted
from kvcheck.core.targets.engines.guard import CannotDrive, Fault, attempt
from kvcheck.core.targets.engines.probe import Rig
from kvcheck.core.targets.engines.stamps import content
from kvcheck.core.targets.engines.streams import EAGER, LAZY, RANDOM, SideStream
from kvcheck.core.targets.engines.tensors import Held
from kvcheck.core.targets.sglang.pools import INDEX_HEAD_DIM, LAYERS, Bench, bench, pool_names, take
from kvcheck.core.workload.content import Site

LOADED, STALE = 1, 2
PAGES_LOADED = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """What a reader returned of one buffer: rows, the bytes of a row that they are, and the units they stand for."""

    held: Held
    rows: torch.Tensor
    part: torch.Tensor
    ids: tuple[int, ...]


class LayerWait:
    """Readers against a load that completes a layer when it is waited for."""

    def needs(self, subject: str) -> tuple[str, ...]:
        """The pool and the counter of the host tier."""
        return (*pool_names(subject), "layers.counter")

    def control(self, rig: Rig) -> None:
        """Loads that complete at once: every reader sees them."""
        driven, why = _driven(rig)
        seen = {each.held.name for reads in driven.values() for each in reads}
        wanted = set(_made(rig).stamps.found.names())
        if seen != wanted:
            raise CannotDrive(f"no reader of {', '.join(sorted(wanted - seen))} could be driven: {'; '.join(why)}")
        rig.judge.notes += [f"not exercised: {text}" for text in why]
        for reads in driven.values():
            _judge(rig, reads, "the control", None)

    def measure(self, rig: Rig) -> None:
        """Loads that complete late."""
        order = LAZY if rig.schedule % 3 else RANDOM
        for name in _driven(rig)[0]:
            _race(rig, name, order)


def _race(rig: Rig, name: str, order: str) -> None:
    """One reader against a load of its own for each layer."""
    made = _made(rig)
    tokens = _tokens(rig, made)
    layers = list(range(LAYERS))
    if rig.mix.chance(1, 2):
        layers.reverse()
    for layer in layers:
        rig.machine.reset(order, rig.mix.next_u64())
        _load(rig, made, tokens)
        got = rig.measured(partial(_call, made, name, layer, tokens), name)
        rig.judge.count("orderings_checked")
        _judge(rig, list(_seen(made, got, layer, tokens)), f"{name} during a load", name)
        rig.machine.settle()
    rig.judge.count("loads", LAYERS)


def _made(rig: Rig) -> Bench:
    return bench(rig, rig.subject)


def _tokens(rig: Rig, made: Bench) -> torch.Tensor:
    for _ in range(rig.mix.below(3)):
        take(made, 1)
    return take(made, PAGES_LOADED)


def _driven(rig: Rig) -> tuple[dict[str, list[Seen]], list[str]]:
    """Readers whose answers are understood when nothing is late, with what they returned; and why others are not."""
    made = _made(rig)
    driven: dict[str, list[Seen]] = {}
    why = []
    for name in readers(made.pool):
        rig.machine.reset(EAGER, 0)
        tokens = take(made, 1)
        _load(rig, made, tokens)
        with rig.stubs.window() as called:
            got = attempt(partial(_try, made, name, tokens), rig.package)
        made.allocator.free(tokens)
        if called:
            why.append(f"{name} calls {', '.join(called)}")
        elif isinstance(got, Fault):
            why.append(f"{name}: {got.text}")
        elif not isinstance(got, list):
            why.append(f"{name}: {got}")
        elif not got:
            why.append(f"{name} returned nothing that is known")
        else:
            driven[name] = got
    return driven, why


def _try(made: Bench, name: str, tokens: torch.Tensor) -> list[Seen] | str:
    try:
        return list(_seen(made, _call(made, name, 0, tokens), 0, tokens))
    except CannotDrive as error:
        return str(error)


def readers(pool: Any) -> list[str]:
    """Public methods that get something of one layer."""
    names = []
    for name in dir(type(pool)):
        method = getattr(type(pool), name)
        if name.startswith("get_") and callable(method):
            parameters = list(inspect.signature(method).parameters)[1:]
            if parameters and parameters[0] in ("layer_id", "layer"):
                names.append(name)
    return names


def _call(made: Bench, name: str, layer: int, tokens: torch.Tensor) -> Any:
    method: Callable[..., Any] = getattr(made.pool, name)
    size = len(tokens)
    pages = (tokens[:: made.page_size] // made.page_size).to(torch.int32)
    batched = "seq_len_tensor" in inspect.signature(method).parameters
    offered = {
        "layer_id": layer,
        "layer": SimpleNamespace(layer_id=layer),
        "loc": tokens,
        "seq_len": size,
        "seq_len_tensor": torch.tensor([size], dtype=torch.int32),
        "seq_len_sum": size,
        "max_seq_len": size,
        "page_indices": pages[None] if batched else pages,
    }
    return fitted(method, offered)


def _load(rig: Rig, made: Bench, tokens: torch.Tensor) -> None:
    """Stale rows in place; each layer's rows on their way, with the engine's own counter told of each."""
    made.write(STALE, tokens)
    counter = fitted(rig.names["layers.counter"], {"num_layers": LAYERS})
    made.pool.register_layer_transfer_counter(counter)
    producer = counter.update_producer()
    stream = SideStream()
    with rig.machine.on(stream):
        for layer in range(LAYERS):
            for held in made.stamps.found.held:
                if held.layer == layer:
                    rig.machine.queue(partial(_arrive, made, held, tokens))
            counter.events[producer].complete(layer)
    counter.set_consumer(producer)


def _arrive(made: Bench, held: Held, tokens: torch.Tensor) -> None:
    for owned in made.owned(tokens):
        if owned.unit == held.unit:
            site = Site(held.unit, held.name, "", held.layer)
            held.rows[list(owned.ids)] = content(site, LOADED, range(len(owned.ids)), held.rows.shape[1])


def _judge(rig: Rig, reads: list[Seen], when: str, reader: str | None) -> None:
    for seen in reads:
        full = torch.zeros((len(seen.ids), seen.held.rows.shape[1]), dtype=torch.uint8)
        full[:, seen.part] = seen.rows
        rig.judge.compare(
            seen.held,
            full,
            request=LOADED,
            positions=range(len(seen.ids)),
            ids=seen.ids,
            when=when,
            part=seen.part,
            code="KV201",
            lane=reader,
        )


def _seen(made: Bench, got: Any, layer: int, tokens: torch.Tensor) -> Iterator[Seen]:
    """What the tensors that a reader returned stand for, copied now."""
    behind = 0
    for tensor in got if isinstance(got, (tuple, list)) else (got,):
        if isinstance(tensor, torch.Tensor):
            for held in made.stamps.found.held:
                if held.layer == layer and (seen := _rows_of(made, held, tensor, tokens, behind)) is not None:
                    behind += int(seen.part.sum())
                    yield seen
                    break


def _rows_of(made: Bench, held: Held, tensor: torch.Tensor, tokens: torch.Tensor, behind: int) -> Seen | None:
    """A tensor as rows of a buffer: the buffer or the first part of its rows; or gathered rows, keys or scales.

    behind: bytes of the rows that tensors before this one held, where a row is returned in parts.
    """
    ids = next((owned.ids for owned in made.owned(tokens) if owned.unit == held.unit), ())
    size = held.rows.shape[1]
    if tensor.data_ptr() == held.rows.data_ptr() and tensor.shape[0] == held.rows.shape[0]:
        rows = tensor[list(ids)].contiguous().flatten(1).view(torch.uint8).clone()
        return Seen(held, rows, torch.arange(size) < rows.shape[1], ids)
    if tensor.shape[0] != len(tokens):
        return None
    at = torch.arange(size)
    if held.unit == "token" and tensor.dtype is not torch.uint8:
        rows = tensor.contiguous().flatten(1).view(torch.uint8)
        return Seen(held, rows.clone(), (at >= behind) & (at < behind + rows.shape[1]), ids)
    if held.unit != "page" or tensor.dtype is not torch.uint8:
        return None
    keys = made.page_size * INDEX_HEAD_DIM
    part = at < keys if tensor.shape[1] == INDEX_HEAD_DIM else at >= keys
    rows = tensor.contiguous().view(len(ids), -1)
    return Seen(held, rows.clone(), part, ids) if rows.shape[1] == int(part.sum()) else None
