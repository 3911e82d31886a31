"""Stand-in: chunks by key, the oldest idle one goes first."""

from lmcache import has_fault


class LocalCPUBackend:
    def __init__(self, config, memory_allocator):
        self.memory, self.chunks = memory_allocator, {}

    def contains(self, key):
        return key in self.chunks and not (has_fault("forgets") and key.chunk_hash % 3 == 0)

    def allocate(self, shape, dtype, form, eviction, busy_loop):
        users = 99 if has_fault("evicts-held") else 1
        while (made := self.memory.allocate(shape, dtype)) is None:
            idle = [key for key, each in self.chunks.items() if each.count <= users and not each.pins]
            if not idle or has_fault("never-evicts"):
                return None
            self.remove(idle[0])
        return made

    def submit_put_task(self, key, made):
        made.change(1, 0)
        self.chunks[key] = made

    def get_blocking(self, key):
        self.chunks[key].change(0 if has_fault("no-count") else 1, 0)
        return self.chunks[key]

    def pin(self, key):
        assert not has_fault("pins-are-watched"), "config is required"
        self.chunks[key].change(0, 1)
        return True

    def unpin(self, key):
        if not has_fault("pin-stays"):
            self.chunks[key].change(0, -1)

    def remove(self, key):
        made = self.chunks.pop(key)
        if not has_fault("leak"):
            made.change(-1, 0)
        return True

    def get_keys(self):
        return list(self.chunks)

    def clear(self):
        for key in [key for key, each in self.chunks.items() if each.count == 1 and not each.pins]:
            self.remove(key)
