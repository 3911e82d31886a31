"""Probe local-cpu: LMCache's LocalCPUBackend over its own allocator: put, find, hold, pin, evict and remove.

Subjects are its replacement policies. A chunk that a reader holds or has pinned keeps its bytes until the reader gives
it back; a policy may evict any other. The bytes in use are those of chunks that are cached, held or pinned, counted
without the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvcheck.core.probes.frame.buffer_views import BufferView
from kvcheck.core.probes.frame.content import rows_of
from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig

UNIT = 4096
CHUNKS = 12
TOKENS = 8
SHAPE = (2, 1, TOKENS, 8)
FAMILIES = 6
DEPTH = 8
REQUESTS = 80
HOLDING = 4


@dataclass(slots=True)
class Reader:
    """A reader that holds or has pinned a chunk. memory: the engine's object."""

    key: int
    memory: Any
    is_pin: bool


class LocalCpu:
    def needs(self, subject: str) -> tuple[str, ...]:
        return ("backend", "backend.config", "backend.key", "allocator", "allocator.format")

    def control(self, rig: Rig) -> None:
        run = _BackendRun(rig)
        for key in (1, 2, 3):
            run.put(key)
        for key in (1, 2, 3):
            run.get(key)
            run.pin(key)

    def measure(self, rig: Rig) -> None:
        run, mix = _BackendRun(rig), rig.mix
        for _ in range(REQUESTS):
            family, depth = mix.below(FAMILIES), 1 + mix.below(DEPTH)
            run.run_request([1 + family * DEPTH + at for at in range(depth)])
            while len(run.readers) > mix.below(HOLDING + 1):
                run.give_back(mix.below(len(run.readers)))
            if mix.chance(1, 10) and run.cached:
                run.remove(sorted(run.cached)[mix.below(len(run.cached))])
            run.account("after a request")
        run.close()


@dataclass(slots=True)
class _BackendRun:
    """A backend with its readers and the expected chunks. cached: key -> the engine's object."""

    rig: Rig
    backend: Any = None
    memory: Any = None
    cached: dict[int, Any] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)
    held: BufferView = field(init=False)

    def __post_init__(self) -> None:
        names = self.rig.names
        config = names["backend.config"](
            chunk_size=TOKENS, local_cpu=True, max_local_cpu_size=1, cache_policy=self.rig.subject.upper()
        )
        if names.has("pins.watch"):
            names["pins.watch"](config)  # a release that has it needs it before the first pin
        self.memory = self.rig.measured(lambda: names["allocator"](CHUNKS * UNIT), "making the allocator")
        offered = {
            "config": config,
            "metadata": None,
            "dst_device": "cpu",
            "lmcache_worker": None,
            "memory_allocator": self.memory,
        }
        self.backend = self.rig.measured(lambda: fitted(names["backend"], offered), "making the backend")
        size = 4 * SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
        rows = torch.zeros(1, size, dtype=torch.uint8)
        self.held = BufferView(name="chunks", layer=0, unit="chunk", rows=rows, tier="host")

    def run_request(self, keys: list[int]) -> None:
        self.rig.judge.count("requests")
        self.rig.judge.count("lookups")
        self.rig.judge.count("pages_wanted", len(keys))
        hits = 0
        while hits < len(keys) and self.find(keys[hits]):
            hits += 1
        self.rig.judge.count("host_hit_pages", hits)
        for key in keys[:hits]:
            if self.rig.mix.chance(1, 3):
                self.pin(key)
            else:
                self.get(key)
        for key in keys[hits:]:
            if key not in self.cached and not self.put(key):
                return

    def find(self, key: int) -> bool:
        has = bool(self.rig.measured(lambda: self.backend.contains(self._key(key)), "contains"))
        if has != (key in self.cached):
            what = "is there, which was evicted or never put" if has else "is not there, which nobody evicted"
            self._find("KV301", "contract", f"contains says that chunk {key} {what}", key)
        return has and key in self.cached

    def put(self, key: int) -> bool:
        shape, form = torch.Size(SHAPE), self.rig.names["allocator.format"]
        made = self.rig.measured(
            lambda: self.backend.allocate(shape, torch.float32, form, eviction=True, busy_loop=False), "allocate"
        )
        self._evicted()
        if made is None:
            free = CHUNKS - len(self._in_use())
            idle = [each for each, memory in self.cached.items() if not self._users(memory)]
            if free or idle:
                text = f"no room for chunk {key}; {free} places are free and {len(idle)} chunks are idle"
                self._find("KV401", "accounting", text, key)
            return False
        owner = self._owner(made.meta.address)
        if owner is not None:
            self._find("KV403", "lifetime", f"chunk {key} was given the place of chunk {owner}, which is in use", key)
        self._bytes(made)[:] = rows_of(self.held, key, (0,))
        self.rig.measured(lambda: self.backend.submit_put_task(self._key(key), made), "submit_put_task")
        self.rig.measured(made.ref_count_down, "ref_count_down")
        self.cached[key] = made
        self.rig.judge.count("backups")
        return True

    def get(self, key: int) -> None:
        memory = self.rig.measured(lambda: self.backend.get_blocking(self._key(key)), "get_blocking")
        if memory is None:
            self._find("KV301", "contract", f"chunk {key} is cached and cannot be got", key)
            return
        self._read(key, memory, "when it was got", None)
        self.readers.append(Reader(key, memory, is_pin=False))

    def pin(self, key: int) -> None:
        """Pin a chunk by its key, as a lookup does before a load."""
        if self.rig.measured(lambda: self.backend.pin(self._key(key)), "pin"):
            self.readers.append(Reader(key, self.cached[key], is_pin=True))
        else:
            self._find("KV301", "contract", f"chunk {key} is cached and cannot be pinned", key)

    def give_back(self, number: int) -> None:
        reader = self.readers.pop(number)
        self._read(reader.key, reader.memory, "before it was given back", "KV202")
        if reader.is_pin:
            self.rig.measured(lambda: self.backend.unpin(self._key(reader.key)), "unpin")
        else:
            self.rig.measured(reader.memory.ref_count_down, "ref_count_down")
        self.rig.judge.count("loads")

    def remove(self, key: int) -> None:
        if not any(reader.is_pin and reader.key == key for reader in self.readers):
            if not self.rig.measured(lambda: self.backend.remove(self._key(key)), "remove"):
                self._find("KV301", "contract", f"chunk {key} is cached and cannot be removed", key)
            self.cached.pop(key, None)
            self.rig.judge.count("aborts")

    def account(self, when: str) -> None:
        self.rig.judge.count("orderings_checked")
        told, wanted = int(self.memory.pin_allocator.total_allocated_size), len(self._in_use()) * UNIT
        if told != wanted:
            code = "KV401" if told > wanted else "KV402"
            self._find(code, "accounting", f"{when}: {told} bytes are in use; cached or held are {wanted}", 0)

    def close(self) -> None:
        while self.readers:
            self.give_back(0)
        for key in sorted(self.cached):
            self.find(key)
        self.rig.measured(self.backend.clear, "clear")
        self.cached.clear()
        self.account("with everything given back and cleared")

    def _evicted(self) -> None:
        left = {int(key.chunk_hash) for key in self.rig.measured(self.backend.get_keys, "get_keys", is_aside=True)}
        for key in [each for each in self.cached if each not in left]:
            users = self._users(self.cached.pop(key))
            if users:
                self._find("KV202", "lifetime", f"chunk {key} was evicted, which {users} readers hold or pinned", key)
            self.rig.judge.count("host_evictions")
            self.rig.judge.count("host_evictions_during_load", int(bool(self.readers)))

    def _users(self, memory: Any) -> int:
        """A chunk that was removed and put again is a different object."""
        return sum(reader.memory is memory for reader in self.readers)

    def _in_use(self) -> dict[int, int]:
        kept = {int(memory.meta.address): key for key, memory in self.cached.items()}
        return kept | {int(each.memory.meta.address): each.key for each in self.readers}

    def _owner(self, address: int) -> int | None:
        return self._in_use().get(int(address))

    def _read(self, key: int, memory: Any, when: str, code: str | None) -> None:
        seen, at = self._bytes(memory), int(memory.meta.address) // UNIT
        self.rig.judge.compare(
            self.held, seen, request=key, positions=(0,), ids=(at,), when=f"chunk {key} {when}", code=code
        )

    def _bytes(self, memory: Any) -> torch.Tensor:
        tensor = memory.tensor
        if tensor is None:
            raise CannotDrive("a memory object has no tensor; it was given back")
        return tensor.view(-1).view(torch.uint8)[None]  # type: ignore[no-any-return]

    def _find(self, code: str, oracle: str, text: str, key: int) -> None:
        self.rig.judge.find(code, oracle, text, tier="host", buffer=self.held.name, request=key)

    def _key(self, key: int) -> Any:
        offered = {
            "model_name": "model",
            "world_size": 1,
            "worker_id": 0,
            "chunk_hash": key,
            "dtype": torch.float32,
            "fmt": "vllm",
        }
        return fitted(self.rig.names["backend.key"], offered)
