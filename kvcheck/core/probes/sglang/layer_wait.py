"""Probe layer-wait: every reader of a pool waits for the load of its layer before it reads.

The engine's own layer counter is registered with the pool. A load writes one layer after the other on a side stream.

Invariants:
- Readers are found on the pool by their parameters, not by a list. A reader that cannot be driven is named.
- Each reader reads each layer after a load of its own, so the wait of another reader does not count.
"""

from __future__ import annotations

from functools import partial

import torch

from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.streams import EAGER, LAZY, RANDOM
from kvcheck.core.probes.sglang.rig.pools import (
    LAYERS,
    Seen,
    SmallPool,
    call,
    check_seen,
    pool_names,
    readers,
    seen,
    small_pool,
    take,
    tensors_of,
    understood,
)

LOADED, STALE = 1, 2
PAGES_LOADED = 3
TRIES = 2
"""Loads of a layer, if the watchdog of a device ends a hold of the first: compiling a kernel takes that long."""


class LayerWait:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (*pool_names(subject), "layers.counter")

    def control(self, rig: Rig) -> None:
        """Loads that complete at once. Every reader returns their rows."""
        driven, why = _driven(rig)
        seen = {each.held.name for reads in driven.values() for each in reads}
        wanted = set(_made(rig).writer.found.names())
        if seen != wanted:
            raise CannotDrive(f"no reader of {', '.join(sorted(wanted - seen))} could be driven: {'; '.join(why)}")
        rig.judge.notes += [f"not exercised: {text}" for text in why]
        for reads in driven.values():
            check_seen(rig.judge, reads, LOADED, "the control", None, "KV201")

    def measure(self, rig: Rig) -> None:
        order = LAZY if rig.schedule % 3 else RANDOM
        for name in _driven(rig)[0]:
            _race(rig, name, order)


def _race(rig: Rig, name: str, order: str) -> None:
    made = _made(rig)
    tokens = _tokens(rig, made)
    layers = list(range(LAYERS))
    if rig.mix.chance(1, 2):
        layers.reverse()
    for layer in layers:
        if any(_is_read_in_order(rig, made, tokens, name, layer, order) for _ in range(TRIES)):
            rig.judge.count("orderings_checked")
        else:
            rig.judge.note(f"not exercised: {name} during a load that is late: the watchdog ended a hold of each one")
    rig.judge.count("loads", LAYERS)


def _is_read_in_order(rig: Rig, made: SmallPool, tokens: torch.Tensor, name: str, layer: int, order: str) -> bool:
    """Return whether all holds of the load imposed an order."""
    rig.machine.reset(order, rig.mix.next_u64())
    _load(rig, made, tokens)
    got = rig.measured(partial(call, made, name, layer, tokens), name)
    taken = rig.machine.taken(tensors_of(got))
    check_seen(rig.judge, seen(made, got, layer, tokens, taken), LOADED, f"{name} during a load", name, "KV201")
    rig.machine.settle()
    return not rig.machine.fired


def _made(rig: Rig) -> SmallPool:
    return small_pool(rig, rig.subject)


def _tokens(rig: Rig, made: SmallPool) -> torch.Tensor:
    for _ in range(rig.mix.below(3)):
        take(made, 1)
    return take(made, PAGES_LOADED)


def _driven(rig: Rig) -> tuple[dict[str, list[Seen]], list[str]]:
    made = _made(rig)
    driven: dict[str, list[Seen]] = {}
    why = []
    for name in readers(made.pool):
        rig.machine.reset(EAGER, 0)
        tokens = take(made, 1)
        _load(rig, made, tokens)
        got = understood(rig, made, name, tokens)
        made.allocator.free(tokens)
        if isinstance(got, str):
            why.append(got)
        else:
            driven[name] = got
    return driven, why


def _load(rig: Rig, made: SmallPool, tokens: torch.Tensor) -> None:
    made.write(STALE, tokens)
    counter = fitted(rig.names["layers.counter"], {"num_layers": LAYERS})
    made.pool.register_layer_transfer_counter(counter)
    producer = counter.update_producer()
    arrivals = made.arrivals(LOADED, tokens)
    rig.machine.settle()  # stale rows are there before any load begins
    with rig.machine.on(rig.machine.side()):
        for layer in range(LAYERS):
            for each in arrivals:
                if each.held.layer == layer:
                    rig.machine.queue(each.arrive)
            counter.events[producer].complete(layer)
    counter.set_consumer(producer)
