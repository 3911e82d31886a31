"""Stand-in: chunks in a dictionary, the oldest idle one goes first."""

from types import SimpleNamespace

from vllm import has_fault
from vllm.v1.kv_offload.base import LookupResult


class CPUOffloadingManager:
    """Chunks by key: place, whether ready, loads."""

    def __init__(self, num_chunks, cache_policy="lru"):
        self.free, self.chunks = list(range(num_chunks)), {}

    def on_new_request(self, context):
        """Nothing to note."""

    def on_request_finished(self, context):
        """Nothing to note."""

    def lookup(self, key, context):
        chunk = self.chunks.get(key)
        if chunk is None:
            return LookupResult.MISS
        return LookupResult.HIT if chunk.ready or has_fault("pending-is-hit") else LookupResult.HIT_PENDING

    def prepare_load(self, keys, context):
        for key in keys:
            self.chunks[key].loads += 1
        return SimpleNamespace(block_ids=[self.chunks[key].place for key in keys])

    def complete_load(self, keys, context):
        for key in keys:
            self.chunks[key].loads -= 1

    def prepare_store(self, keys, context):
        new = [key for key in keys if key not in self.chunks]
        pins = 99 if has_fault("evicts-pinned") else 0
        idle = [key for key, each in self.chunks.items() if each.ready and each.loads <= pins and key not in keys]
        gone = idle[: max(0, len(new) - len(self.free))]
        if len(new) > len(self.free) + len(gone):
            return None
        for key in gone:
            self.free.append(self.chunks.pop(key).place)
        keeps = has_fault("place-twice") and len(self.chunks) > len(self.free)
        places = [self.free[0] if keeps and at == 0 else self.free.pop() for at in range(len(new))]
        for key, place in zip(new, places, strict=True):
            self.chunks[key] = SimpleNamespace(place=place, ready=False, loads=0)
        return SimpleNamespace(keys_to_store=new, evicted_keys=gone, store_spec=SimpleNamespace(block_ids=places))

    def complete_store(self, keys, context, success=True):
        for key in keys:
            if success or has_fault("failed-stays"):
                self.chunks[key].ready = True
            else:
                place = self.chunks.pop(key).place
                self.free += [] if has_fault("forgets-room") else [place]

    def reset_cache(self):
        if not has_fault("no-reset"):
            self.chunks.clear()
