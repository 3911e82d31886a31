"""Probe host-copy: pages of several requests backed up, evicted, loaded back and read, on both tiers at once.

The release's own controller makes the copies, over its own pools. On a CPU Python versions replace the compiled copies;
they run at the engine's waits or at moments drawn from the seed. On a device the engine's own copies run, held on the
stream that it has chosen. The probe frees pages once the controller has acknowledged the copies that use them, as a
prefix tree does, and another request writes them at once.

Invariants:
- The pages of a request, on both tiers, are written by the content rule or by a copy of the controller.
- Only as many getters read as are needed to see every byte. The probe layer-wait tries the waits of all getters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvcheck.core.probes.frame.content import ProbeJudge, rows_of
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.streams import EAGER, LAZY, RANDOM, Machine
from kvcheck.core.probes.sglang.rig.compiled_copies import require_compiled
from kvcheck.core.probes.sglang.rig.host_tier import BACKUP, LATE, LOAD, RigHostTier, host_tier_needs, make_host_tier
from kvcheck.core.probes.sglang.rig.kernels_jit import JIT_KERNELS
from kvcheck.core.probes.sglang.rig.pools import (
    LAYERS,
    SmallPool,
    arrive,
    call,
    check_seen,
    optional,
    readers,
    seen,
    take,
    tensors_of,
    understood,
)

PLAINEST = "mha"
LAYOUTS = {
    "kernel": ("layer_first", "page_first"),
    LATE: ("layer_first", "page_first"),
    "direct": ("layer_first", "page_first_direct"),
    "mha-kernel": ("layer_first", "page_first", "page_head"),
}
"""Layouts of host memory by way of copying, or by subject if it has others."""
LEFT_OUT = "page_first_kv_split, which is made for another kind of device"
BEFORE, OTHERS = 3999, 4000
"""Owner of all device rows at first, and the first owner of pages that were freed."""
Rows = dict[tuple[str, int], torch.Tensor]
"""[units, bytes] uint8, by buffer and layer."""
COPYING = ("write", "start_writing", "start_loading")
ORDERINGS = "orderings_checked"
TRIES = 2
"""Tries of a schedule on a device, if its watchdog ended a hold in the first."""
ROUNDS = 5
MOST_PAGES = 3


class HostCopy:
    """write, start_writing, load, start_loading and the queues of acknowledgements."""

    def __init__(self) -> None:
        self._readers: tuple[str, ...] = ()

    def needs(self, subject: str) -> tuple[str, ...]:
        return (*dict.fromkeys((*host_tier_needs(PLAINEST), *host_tier_needs(_family(subject)))),)

    def control(self, rig: Rig) -> None:
        if not isinstance(rig.machine, Machine):
            rig.judge.note(f"compiled copies: {require_compiled(rig.device)}")
        rig.machine.reset(EAGER, 0)
        backend = rig.subject.partition("-")[2]
        with closing(make_host_tier(rig, PLAINEST, backend, "layer_first")) as tier:
            HostCopyScene(rig, tier, ()).run_plain()
        with closing(make_host_tier(rig, _family(rig.subject), backend, "layer_first")) as tier:
            tokens = take(tier.made, 1)
            tier.made.write(1, tokens)
            tier.made.check(rig.judge, 1, tokens, when="written and read")
            self._readers = _fewest(rig, tier.made, tokens)

    def measure(self, rig: Rig) -> None:
        family, _, backend = rig.subject.partition("-")
        layouts = LAYOUTS.get(rig.subject, LAYOUTS[backend])
        layout = layouts[rig.schedule % len(layouts)]
        order = (LAZY, RANDOM)[rig.schedule // len(layouts) % 2]
        rig.judge.note(f"host memory {layout}; not exercised: {LEFT_OUT}")
        if not isinstance(rig.machine, Machine):
            self._rehearse(rig, layout)
        for _ in range(1 if isinstance(rig.machine, Machine) else TRIES):
            asked = self._run(rig, layout, order)
            if rig.judge.findings or not rig.machine.fired:
                break
        rig.judge.note(f"copies: {', '.join(sorted(asked))}")
        if backend == LATE and not any(name in JIT_KERNELS for name in asked):
            if layout == layouts[0]:
                raise CannotDrive(f"this release compiles no copy of {family} pools at run time{_in_vain(rig)}")
            rig.judge.note(f"not exercised: copies compiled at run time with host memory {layout}")

    def _run(self, rig: Rig, layout: str, order: str) -> Collection[str]:
        """Orders count only if no watchdog ended a hold."""
        family, _, backend = rig.subject.partition("-")
        rig.machine.reset(order, rig.mix.next_u64())
        before = rig.judge.counts.get(ORDERINGS, 0)
        with closing(make_host_tier(rig, family, backend, layout)) as tier:
            HostCopyScene(rig, tier, self._readers).run()
        if rig.machine.fired:
            rig.judge.counts[ORDERINGS] = before
            rig.judge.note("not exercised: the orders of a try, as the watchdog ended a hold of it")
        return tier.copies.asked

    def _rehearse(self, rig: Rig, layout: str) -> None:
        """Make every copy once, unheld: a device loads and compiles code at its first call. Findings are kept, counts
        are not."""
        family, _, backend = rig.subject.partition("-")
        counts = dict(rig.judge.counts)
        with closing(make_host_tier(rig, family, backend, layout)) as tier:
            HostCopyScene(rig, tier, self._readers).run_plain()
        rig.judge.counts = counts


def _in_vain(rig: Rig) -> str:
    return "" if isinstance(rig.machine, Machine) else ", or its compiler cannot: see CUDA_HOME and nvcc"


@dataclass(slots=True)
class CachedRequest:
    """A request's pages. device, host: indices on each tier. writing, loading: not acknowledged yet.

    given: values of an index list when the controller received it, by tier.
    """

    request: int
    length: int
    device: torch.Tensor | None
    host: torch.Tensor | None = None
    writing: bool = False
    loading: bool = False
    given: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class HostCopyScene:
    rig: Rig
    tier: RigHostTier
    readers: tuple[str, ...]
    cached: dict[int, CachedRequest] = field(default_factory=dict)
    loads: list[tuple[int, list[int]]] = field(default_factory=list)
    forward: Any = None
    fenced: bool = False
    requests: int = 0
    others: int = OTHERS
    lost: set[int] = field(default_factory=set)
    """Requests whose backup was wrong: what a load brings of them says nothing about the load."""
    before: dict[int, Callable[[], Rows]] = field(default_factory=dict)
    """Returns a request's rows on the device: as they were when the model began to write them, or as they are."""
    is_behind: bool = False
    """Whether the main stream may wait for the model's stream."""
    is_at_once: bool = False

    def __post_init__(self) -> None:
        self.forward = self.rig.machine.side()
        self.rig.copied = self.tier.copied
        for held in self.tier.made.writer.found.buffers:  # as if it had been used; fresh rows of both tiers are zero
            held.rows.copy_(rows_of(held, BEFORE, range(len(held.rows))))

    @property
    def is_real(self) -> bool:
        return not isinstance(self.rig.machine, Machine)

    def run_plain(self) -> None:
        self.is_at_once = True
        self.admit(2)
        self.backup()
        self.poll(wait=True)
        self.evict(every=True)
        self.load()
        self.finish()

    def run(self) -> None:
        judge, mix, controller = self.rig.judge, self.rig.mix, self.tier.controller
        for name in self.tier.lacking:
            judge.find("KV304", "contract", f"there is no memory for {name} on the host", buffer=name, tier="host")
        fences = [name for name in ("write_fence_stream", "load_fence_stream") if hasattr(controller, name)]
        if len(fences) == 2 and mix.chance(1, 2):
            self.fenced = True
            for name in fences:
                setattr(controller, name, self.forward)
        judge.note("work of another stream is fenced" if fences else "not exercised: fences of a stream of its own")
        if self.reads_lists and not self.fenced:
            judge.note(
                "not exercised: copies of what the model still writes, as the engine waits before it asks for them"
            )
        for _ in range(ROUNDS):
            for _ in range(1 + mix.below(2)):
                self.admit(1 + mix.below(MOST_PAGES))
            self.backup()
            if mix.chance(1, 2):
                self.admit(1)
                self.backup()
            self.poll(wait=mix.chance(2, 3))
            self.evict()
            self.load()
            if mix.chance(1, 3):
                self.load()
            while self.loads:
                self.read(*self.loads.pop(0))
            self.poll(wait=mix.chance(1, 2))
            self.evict_host()
        self.poll(wait=True)
        self.evict_host(most=2)
        self.finish()

    def admit(self, pages: int) -> None:
        made = self.tier.made
        self.catch_up()
        tokens = made.allocator.alloc(pages * made.page_size)
        if tokens is None:
            return
        self.requests += 1
        self.rig.judge.count("requests")
        self.cached[self.requests] = CachedRequest(self.requests, pages, tokens, given={"device": tokens.tolist()})
        self.compute(self.requests, tokens)

    def compute(self, request: int, tokens: torch.Tensor) -> None:
        machine, arrivals = self.rig.machine, self.tier.made.arrivals(request, tokens)
        self.catch_up()

        def rows() -> Rows:
            return {(each.held.name, each.held.layer): each.held.rows[each.ids] for each in arrivals}

        def work() -> None:
            then = rows()
            self.before[request] = lambda: then
            arrive(arrivals)

        self.before[request] = rows
        with machine.on(self.forward):
            machine.queue(work, goes_last=True)
        if self.is_at_once:
            machine.settle()

    def catch_up(self) -> None:
        """Release the model's work, and no copy: the process is about to wait for the main stream."""
        if self.is_behind and self.is_real:
            reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reached.record(self.rig.machine.main)
            self.rig.machine.let_go_until(reached.query, on=self.forward)
        self.is_behind = False

    def backup(self) -> None:
        """Back up all requests that lie only on the device; some are merged into one copy."""
        controller, mix = self.tier.controller, self.rig.mix
        later = optional(controller.write, flush=False) if mix.chance(1, 2) else {}
        for cached in self.of(lambda each: each.host is None and each.device is not None):
            extra = self.tier.extras(BACKUP, self.rig.names, device_indices=cached.device)
            host = self.engine(
                partial(controller.write, device_indices=cached.device, node_id=cached.request, **extra, **later),
                "write",
            )
            if host is None:
                self.evict_host()
                continue
            cached.host, cached.writing = host.clone(), True
            self.rig.judge.count("backups")
            if mix.chance(1, 3):
                self.poll()
        if later:
            self.engine(controller.start_writing, "start_writing")

    def poll(self, wait: bool = False) -> None:
        """Take acknowledgements in order. wait: wait for all of them, like a tree that needs pages."""
        controller = self.tier.controller
        for queue, done in ((controller.ack_write_queue, self.written), (controller.ack_load_queue, self.loaded)):
            while queue and (wait or self.rig.machine.has_reached(queue[0].finish_event.query)):
                ack = queue.pop(0)
                self.rig.machine.let_go_until(ack.finish_event.query)
                self.engine(ack.finish_event.synchronize, "finish_event.synchronize")
                for request in ack.node_ids:
                    done(self.cached[request])

    def written(self, cached: CachedRequest) -> None:
        cached.writing = False
        self.catch_up()
        self.check_list(cached, "device", cached.device)
        self.judged(partial(self.check_backup, cached, "acknowledged as backed up"))

    def loaded(self, cached: CachedRequest) -> None:
        cached.loading = False
        self.catch_up()
        self.check_list(cached, "host", cached.host)
        self.judged(partial(self.check_device, cached, "acknowledged as loaded"))

    def judged(self, look: Callable[[ProbeJudge], None]) -> None:
        """Bytes that are wrong now and right once all work has run show a missing wait: KV201."""
        first, later = ProbeJudge(), ProbeJudge()
        look(first)
        if first.findings:
            self.rig.machine.settle()
            look(later)
        late = bool(first.findings) and not later.findings
        why = "; it is there once everything that was queued has run"
        self.rig.judge.count(ORDERINGS)
        self.rig.judge.absorb(first, "KV201" if late else None, why if late else "")

    def evict(self, every: bool = False) -> None:
        mix, made = self.rig.mix, self.tier.made
        able = self.of(lambda each: each.device is not None and each.host is not None and not busy(each))
        while able and (every or mix.chance(2, 3) or made.allocator.available_size() < MOST_PAGES * made.page_size):
            cached = able.pop(mix.below(len(able)))
            tokens, cached.device = cached.device, None
            assert tokens is not None
            self.catch_up()
            made.allocator.free(tokens)
            self.others += 1
            self.compute(self.others, tokens)
            self.rig.judge.count("device_evictions")
            self.rig.judge.count("foreign_reuses")

    def evict_host(self, most: int | None = None) -> None:
        """Another request's content is written to the freed pages at once. most: number of requests; None: drawn."""
        mix = self.rig.mix
        able = self.of(lambda each: each.host is not None and not busy(each))
        while able and (mix.chance(1, 2) if most is None else most > 0):
            most = None if most is None else most - 1
            cached = able.pop(mix.below(len(able)))
            host, cached.host = cached.host, None
            assert host is not None
            self.engine(partial(self.tier.controller.evict_host, host), "evict_host")
            self.others += 1
            self.tier.write_host(self.others, host)
            self.rig.judge.count("host_evictions")
            if cached.device is None:
                del self.cached[cached.request]

    def load(self) -> None:
        controller, mix = self.tier.controller, self.rig.mix
        able = self.of(lambda each: each.device is None and each.host is not None and not busy(each))
        taken: list[int] = []
        while able and len(taken) < 2 and (not taken or mix.chance(1, 2)):
            cached = able.pop(mix.below(len(able)))
            assert cached.host is not None
            cached.given["host"] = cached.host.tolist()
            extra = self.tier.extras(LOAD, self.rig.names, host_indices=cached.host)
            device = self.engine(
                partial(controller.load, host_indices=cached.host, node_id=cached.request, **extra), "load"
            )
            if device is None:
                break
            cached.device, cached.loading = device.clone(), True
            taken.append(cached.request)
            self.rig.judge.count("loads")
        if taken:
            producer = self.engine(controller.start_loading, "start_loading")
            self.loads.append((producer, taken))

    def read(self, producer: int, requests: list[int]) -> None:
        machine, mix, made = self.rig.machine, self.rig.mix, self.tier.made
        counter = self.tier.controller.layer_done_counter
        counter.set_consumer(producer)
        machine.main.wait_stream(self.forward)
        self.is_behind = True
        layers = list(range(LAYERS))
        if mix.chance(1, 2):
            layers.reverse()
        for layer in layers:
            for request in (each for each in requests if each not in self.lost):
                self.read_layer(self.cached[request], layer, made)
            if mix.chance(1, 3):
                self.poll()
        counter.set_consumer(-1)

    def read_layer(self, cached: CachedRequest, layer: int, made: SmallPool) -> None:
        assert cached.device is not None
        for name in self.readers:
            got = self.rig.measured(partial(call, made, name, layer, cached.device), name, is_aside=True)
            # Looked at once as it was read, and then as it is by now.
            looks = iter((self.rig.machine.taken(tensors_of(got), rest_stays=True), None))
            self.judged(partial(self.check_read, cached, layer, name, got, looks))

    def check_read(
        self,
        cached: CachedRequest,
        layer: int,
        name: str,
        got: Any,
        looks: Iterator[Sequence[torch.Tensor] | None],
        judge: ProbeJudge,
    ) -> None:
        assert cached.device is not None
        read = seen(self.tier.made, got, layer, cached.device, next(looks))
        check_seen(judge, read, cached.request, f"{name} during a load", name)

    def finish(self) -> None:
        while self.loads:
            self.read(*self.loads.pop(0))
        self.poll(wait=True)
        self.rig.machine.settle()
        if waiting := [cached.request for cached in self.of(busy)]:
            text = f"all that was queued has run, and copies of requests {waiting} were never acknowledged"
            self.rig.judge.find("KV901", "liveness", text, lane="acknowledgement", request=waiting[0])
        for cached in self.cached.values():
            self.check_device(cached, "on the device at the end", self.rig.judge)
            self.check_backup(cached, "on the host at the end", self.rig.judge)
        if not self.tier.copies.has_copied:
            raise CannotDrive("no copy between the tiers was asked for by a name that is known here")

    def check_list(self, cached: CachedRequest, tier: str, kept: torch.Tensor | None) -> None:
        """The index list, which the tree keeps too, must not change after the controller has received it."""
        given = cached.given.pop(tier, None)
        if given is not None and kept is not None and (found := kept.tolist()) != given:
            changed = sum(one != other for one, other in zip(found, given, strict=True))
            text = f"{changed} of {len(given)} {tier} indices of request {cached.request} changed during the copy"
            self.rig.judge.find("KV302", "contract", text, tier=tier, lane="lists", request=cached.request)

    def check_device(self, cached: CachedRequest, when: str, judge: ProbeJudge) -> None:
        if cached.device is not None and cached.request not in self.lost:
            self.tier.made.check(judge, cached.request, cached.device, when=when)

    def check_backup(self, cached: CachedRequest, when: str, judge: ProbeJudge) -> None:
        """A host row that holds what its source held before the model wrote it shows a missing wait: KV201."""
        if cached.host is None:
            return
        look = ProbeJudge()
        self.tier.check_host(look, cached.request, cached.host, when)
        self.lost.discard(cached.request)  # a backup that is late is right at a second look
        is_early = False
        if look.findings:
            self.lost.add(cached.request)
            is_early = self.tier.holds_either(cached.request, cached.host, self.before[cached.request]())
        why = "; its source held that before the model wrote it, so the copy did not wait for the model"
        judge.absorb(look, "KV201" if is_early else None, why if is_early else "")

    def of(self, wanted: Callable[[CachedRequest], bool]) -> list[CachedRequest]:
        return [each for each in self.cached.values() if wanted(each)]

    @property
    def reads_lists(self) -> bool:
        """Whether the engine copies index lists to the host, which waits for its stream, before a copy."""
        return self.is_real and self.tier.controller.io_backend == "direct"

    def engine(self, work: Callable[[], Any], what: str) -> Any:
        """Call the engine on its own stream, which follows the model's work unless it is fenced.

        On a device that stream is the main one, which waits for the model's stream before a copy.
        """
        machine, stream = self.rig.machine, self.rig.machine.main if self.fenced else self.forward
        if self.is_real and not self.fenced:
            stream = machine.main
            if what in COPYING:
                stream.wait_stream(self.forward)
                self.is_behind = True
                if self.reads_lists:
                    self.catch_up()
        with machine.on(stream), self.tier.copies.lent_to(self.tier.modules):
            result = self.rig.measured(work, what, is_aside=what == "evict_host")
        if self.is_at_once:
            machine.settle()
        return result


def busy(cached: CachedRequest) -> bool:
    return cached.writing or cached.loading


def _family(subject: str) -> str:
    return subject.partition("-")[0]


def _fewest(rig: Rig, made: SmallPool, tokens: torch.Tensor) -> tuple[str, ...]:
    """Getters that together show every byte: those of token rows first, and of these the plainest."""
    hidden = {held.name: torch.ones(held.rows.shape[1], dtype=torch.bool) for held in made.writer.found.buffers}
    taken: list[tuple[bool, str]] = []
    for name in sorted(
        readers(made.pool), key=lambda each: len(inspect.signature(getattr(made.pool, each)).parameters)
    ):
        if not any(part.any() for part in hidden.values()):
            break
        got = understood(rig, made, name, tokens)
        if isinstance(got, str) or not any((hidden[each.held.name] & each.part).any() for each in got):
            continue
        for each in got:
            hidden[each.held.name] &= ~each.part
        taken.append((all(each.held.unit != "token" for each in got), name))
    for name, part in hidden.items():
        if part.any():
            rig.judge.note(f"not exercised: no getter that can be driven shows all of {name}")
    return tuple(name for _, name in sorted(taken))
