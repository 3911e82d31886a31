"""Probe cpu-offload: vLLM's CPUOffloadingManager, whose chunks are stored, pinned by loads, evicted and stored again.

Subjects are its replacement policies. A policy may choose any chunk that no load has pinned. The manager may refuse a
store only if too few chunks are free or idle by the probe's own dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcheck.core.probes.frame.buffer_views import BufferView
from kvcheck.core.probes.frame.content import rows_of
from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig

CHUNKS = 12
ROW_BYTES = 64
FAMILIES = 6
DEPTH = 9
REQUESTS = 60
PENDING = 4


@dataclass(slots=True)
class OffloadChunk:
    """The chunk of a key. place: chunk id. loads: number of loads that read it."""

    place: int
    is_ready: bool = False
    loads: int = 0


@dataclass(slots=True, kw_only=True)
class OffloadJob:
    is_load: bool
    keys: list[int]
    context: Any


class CpuOffload:
    def needs(self, subject: str) -> tuple[str, ...]:
        return ("offload.manager", "offload.request", "offload.key")

    def control(self, rig: Rig) -> None:
        desk = _Desk(rig)
        desk.store([1, 2, 3], desk.context())
        desk.complete(0)
        desk.load([1, 2, 3], desk.context())
        desk.complete(0)

    def measure(self, rig: Rig) -> None:
        desk, mix = _Desk(rig), rig.mix
        for _ in range(REQUESTS):
            family, depth = mix.below(FAMILIES), 1 + mix.below(DEPTH)
            desk.run_request([1 + family * DEPTH + at for at in range(depth)])
            while len(desk.jobs) > mix.below(PENDING + 1):
                desk.complete(mix.below(len(desk.jobs)), fails=mix.chance(1, 8))
        while desk.jobs:
            desk.complete(0)
        desk.store([1 + FAMILIES * DEPTH + at for at in range(CHUNKS)], desk.context())
        desk.complete(0)
        rig.measured(desk.manager.reset_cache, "reset_cache")
        gone = list(desk.chunks)
        desk.chunks.clear()
        for key in gone:
            desk.lookup(key, desk.context())


@dataclass(slots=True)
class _Desk:
    rig: Rig
    manager: Any = None
    chunks: dict[int, OffloadChunk] = field(default_factory=dict)
    jobs: list[OffloadJob] = field(default_factory=list)
    held: BufferView = field(init=False)
    asked: int = 0

    def __post_init__(self) -> None:
        offered = {"num_chunks": CHUNKS, "num_blocks": CHUNKS, "cache_policy": self.rig.subject}
        make = self.rig.names["offload.manager"]
        self.manager = self.rig.measured(lambda: fitted(make, offered), "making the manager")
        rows = torch.zeros(CHUNKS, ROW_BYTES, dtype=torch.uint8)
        self.held = BufferView(name="chunks", layer=0, unit="chunk", rows=rows, tier="host")

    def context(self) -> Any:
        self.asked += 1
        made = fitted(self.rig.names["offload.request"], {"req_id": str(self.asked)})
        self.rig.measured(lambda: self.manager.on_new_request(made), "on_new_request")
        return made

    def run_request(self, keys: list[int]) -> None:
        context = self.context()
        hits = 0
        while hits < len(keys) and self.lookup(keys[hits], context) == "HIT":
            hits += 1
        self.rig.judge.count("requests")
        self.rig.judge.count("lookups")
        self.rig.judge.count("pages_wanted", len(keys))
        self.rig.judge.count("host_hit_pages", hits)
        if hits:
            self.load(keys[:hits], context)
        if hits < len(keys):
            self.store(keys, context)
        self.rig.measured(lambda: self.manager.on_request_finished(context), "on_request_finished")

    def lookup(self, key: int, context: Any) -> str:
        told = self.rig.measured(lambda: self.manager.lookup(self._key(key), context), "lookup")
        name = getattr(told, "name", None)
        if name not in ("MISS", "HIT", "HIT_PENDING"):
            raise CannotDrive(f"lookup answered {told!r}; expected MISS, HIT or HIT_PENDING")
        chunk = self.chunks.get(key)
        wanted = "MISS" if chunk is None else "HIT" if chunk.is_ready else "HIT_PENDING"
        if name != wanted and chunk is not None:
            self._find("KV301", "contract", f"lookup of chunk {key} says {name}; it is {wanted}", key)
        elif name != wanted:
            self._find("KV101", "contract", f"lookup of chunk {key} says {name}; it was evicted or never stored", key)
        return str(name)

    def load(self, keys: list[int], context: Any) -> None:
        names = [self._key(key) for key in keys]
        places = _places(self.rig.measured(lambda: self.manager.prepare_load(names, context), "prepare_load"))
        for key, place in zip(keys, places, strict=True):
            if key in self.chunks and self.chunks[key].place != place:
                self._find(
                    "KV301", "contract", f"chunk {key} is in {self.chunks[key].place}; its load is of {place}", key
                )
        self._read(keys, places, "when its load was prepared", None)
        for key in keys:
            if key in self.chunks:
                self.chunks[key].loads += 1
        self.jobs.append(OffloadJob(is_load=True, keys=keys, context=context))

    def store(self, keys: list[int], context: Any) -> None:
        names = [self._key(key) for key in keys]
        new = [key for key in keys if key not in self.chunks]
        idle = sum(each.is_ready and not each.loads for key, each in self.chunks.items() if key not in keys)
        room = CHUNKS - len(self.chunks) + idle
        got = self.rig.measured(lambda: self.manager.prepare_store(names, context), "prepare_store")
        if got is None:
            if len(new) <= room:
                text = f"a store of {len(new)} chunks was refused; {room} are free or idle"
                self._find("KV401", "accounting", text, new[0] if new else 0)
            return
        for name in got.evicted_keys:
            self._evict(next((key for key in self.chunks if self._key(key) == name), None))
        if list(got.keys_to_store) != [self._key(key) for key in new]:
            self._find(
                "KV301", "contract", f"a store is of {len(got.keys_to_store)} chunks; {len(new)} are not there", 0
            )
            return
        places = _places(got.store_spec)
        for key, place in zip(new, places, strict=True):
            owner = next((other for other, each in self.chunks.items() if each.place == place), None)
            if owner is not None:
                self._find("KV403", "lifetime", f"chunk {key} was given place {place}, which chunk {owner} has", key)
            self.chunks[key] = OffloadChunk(place)
        if new:
            self.jobs.append(OffloadJob(is_load=False, keys=new, context=context))

    def complete(self, number: int, fails: bool = False) -> None:
        job = self.jobs.pop(number)
        names, context = [self._key(key) for key in job.keys], job.context
        there = {key: self.chunks[key] for key in job.keys if key in self.chunks}  # all, unless one was evicted wrongly
        if job.is_load:
            self._read(list(there), [each.place for each in there.values()], "before its load was completed", "KV202")
            self.rig.measured(lambda: self.manager.complete_load(names, context), "complete_load")
            for each in there.values():
                each.loads -= 1
            self.rig.judge.count("loads")
            return
        if not fails:
            for key, each in there.items():
                self.held.rows[each.place] = rows_of(self.held, key, (0,))[0]
                each.is_ready = True
            self.rig.judge.count("backups")
        self.rig.measured(lambda: self.manager.complete_store(names, context, success=not fails), "complete_store")
        if fails:
            for key in there:
                del self.chunks[key]
            self.rig.judge.count("aborts")

    def _evict(self, key: int | None) -> None:
        chunk = self.chunks.pop(key, None) if key is not None else None
        if key is None or chunk is None:
            self._find("KV402", "accounting", "an eviction names a chunk that is not there", 0)
        elif chunk.loads or not chunk.is_ready:
            what = f"{chunk.loads} loads read" if chunk.is_ready else "a store writes"
            self._find("KV202", "lifetime", f"chunk {key} was evicted, which {what}", key)
        self.rig.judge.count("host_evictions")
        self.rig.judge.count("host_evictions_during_load", int(any(job.is_load for job in self.jobs)))

    def _read(self, keys: Sequence[int], places: Sequence[int], when: str, code: str | None) -> None:
        for key, place in zip(keys, places, strict=False):
            rows = self.held.rows[place : place + 1]
            self.rig.judge.compare(
                self.held, rows, request=key, positions=(0,), ids=(place,), when=f"chunk {key} {when}", code=code
            )

    def _find(self, code: str, oracle: str, text: str, key: int) -> None:
        self.rig.judge.find(code, oracle, text, tier="host", buffer=self.held.name, request=key)

    def _key(self, key: int) -> Any:
        return self.rig.names["offload.key"](key.to_bytes(32, "big"), 0)


def _places(spec: Any) -> list[int]:
    ids = getattr(spec, "block_ids", None)
    if ids is None:
        raise CannotDrive(f"{type(spec).__name__} has no block_ids; chunks cannot be told")
    return [int(each) for each in ids]
