"""Stand-in: running requests first, then waiting ones by priority; the last in rank is preempted for room."""

from types import SimpleNamespace

from vllm import has_fault
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector
from vllm.v1.core.kv_cache_manager import KVCacheManager


class Scheduler:
    def __init__(self, vllm_config, kv_cache_config, structured_output_manager, block_size):
        self.limits = vllm_config.scheduler_config
        self.kv_cache_manager = KVCacheManager(kv_cache_config, 0, block_size)
        drafts = getattr(vllm_config, "speculative_config", None)
        self.num_lookahead_tokens = drafts.num_speculative_tokens if drafts else 0
        self.waiting, self.running, self.loading, self.gave_up = [], [], {}, set()
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        block_bytes = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        self.connector = SimpleCPUOffloadConnector(transfer, self.kv_cache_manager, block_bytes) if transfer else None

    def add_request(self, request):
        self.waiting.append(request)

    def schedule(self):
        """Tokens of a step, by request; they count as computed from now on."""
        counts, budget = {}, self.limits.max_num_batched_tokens
        before = len(self.waiting)
        for request in list(self.running):
            count = self._fit(request, budget)
            while request in self.running and count and not self._allocate(request, count):
                self._preempt(counts)
            if request in self.running and count:
                counts[request.request_id] = count
                budget -= count
        if len(self.waiting) == before:
            self._admit(counts, budget)
        for request in self.running:
            request.num_computed_tokens += counts.get(request.request_id, 0)
        served = [request for request in self.running if request.request_id in counts]
        told = self.connector.build(served) if self.connector else None
        return SimpleNamespace(num_scheduled_tokens=counts, kv_connector_metadata=told)

    def update_from_output(self, plan, output):
        """Tokens of those that have computed all they had; those that are loaded wait to run."""
        if self.connector:
            self.connector.ended(output.kv_connector_output)
            ended = output.kv_connector_output.finished_recving or ()
            for request, end in [self.loading.pop(name) for name in ended if name in self.loading]:
                request.num_computed_tokens = end
                self.kv_cache_manager.keep(request, end)
                self.waiting.append(request)
        for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            request = next(each for each in self.running if each.request_id == name)
            for token in sampled:
                request.append_output_token_ids(token)
            if request.is_finished():
                self.running.remove(request)
                self.kv_cache_manager.free(request)

    def _fit(self, request, budget):
        missing = request.num_tokens - request.num_computed_tokens
        return min(missing, budget, self.limits.long_prefill_token_threshold or missing)

    def _allocate(self, request, count, found=0, hit=None):
        ahead = self.num_lookahead_tokens
        return self.kv_cache_manager.allocate_slots(request, count, found, hit, num_lookahead_tokens=ahead)

    def _preempt(self, counts):
        """The last in rank; nobody whose tokens of this step are planned, since nothing has computed them yet."""
        others = [each for each in self.running if each.request_id not in counts or has_fault("preempts-planned")]
        victim = max(others, key=lambda each: (each.priority, int(each.request_id)))
        counts.pop(victim.request_id, None)
        self.running.remove(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        if not has_fault("forgets-preempted"):
            self.waiting.append(victim)
        if not has_fault("keeps-preempted"):
            self.kv_cache_manager.free(victim)

    def _admit(self, counts, budget):
        for request in [each for each in self.waiting if each.request_id in self.kv_cache_manager.tables]:
            budget -= self._admit_loaded(request, counts, budget)
        for request in sorted(self.waiting, key=lambda each: (each.priority, int(each.request_id))):
            hit, found = self.kv_cache_manager.get_computed_blocks(request)
            if self.connector and self._load(request, hit, found):
                continue
            request.num_computed_tokens = found
            count = self._fit(request, budget)
            request.num_computed_tokens = 0
            if len(self.running) == self.limits.max_num_seqs or not count:
                return
            if not self._allocate(request, count, found, hit):
                return
            request.num_computed_tokens = found
            self.waiting.remove(request)
            self.running.append(request)
            counts[request.request_id] = count
            budget -= count

    def _load(self, request, hit, found):
        """Blocks for what the host has, to be loaded into; nothing is computed until then."""
        stored = self.connector.match(request, found)
        end = found + len(stored) * self.kv_cache_manager.size
        if not stored or request.request_id in self.gave_up:
            return False
        if not self.kv_cache_manager.allocate_slots(request, end - found, found, hit, is_loaded=True):
            return False
        table = self.kv_cache_manager.tables[request.request_id]
        self.connector.load(request, stored, table[found // self.kv_cache_manager.size :])
        if has_fault("runs-before-it-is-loaded"):
            request.num_computed_tokens = end
            return True
        self.waiting.remove(request)
        self.loading[request.request_id] = request, end
        return True

    def _admit_loaded(self, request, counts, budget):
        """Go on behind what was loaded, or give it up where there is no room. Returns the tokens of this step."""
        count = self._fit(request, budget)
        if len(self.running) < self.limits.max_num_seqs and count and self._allocate(request, count):
            self.waiting.remove(request)
            self.running.append(request)
            counts[request.request_id] = count
            return count
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        self.gave_up.add(request.request_id)
        return 0
