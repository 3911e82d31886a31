"""Stand-in: blocks that a step has completed are stored on the host, and loaded for requests that begin like them."""

from types import SimpleNamespace

from vllm import has_fault
from vllm.v1.core.kv_cache_manager import BlockPool


class SimpleCPUOffloadConnector:
    """The host's pool, and the copies that are under way."""

    def __init__(self, config, manager, block_bytes):
        self.manager, self.device = manager, manager.block_pool
        host = config.kv_connector_extra_config["cpu_bytes_to_use"] // block_bytes
        self.scheduler_manager = SimpleNamespace(cpu_block_pool=BlockPool(host))
        self.host = self.scheduler_manager.cpu_block_pool
        self.next, self.stores, self.loads, self.under_way = 0, {}, {}, set()
        self.told = None

    def match(self, request, found):
        """The blocks of the host that go on where the device's hit ends."""
        hit = []
        for prefix in request.hasher(request.all_token_ids[:-1])[found // self.manager.size :]:
            if prefix not in self.host.by_prefix:
                break
            hit.append(self.host.by_prefix[prefix])
        return hit

    def load(self, request, hit, table):
        """Pin both ends and tell the worker with the next plan."""
        for block in hit:
            if not has_fault("host-unpinned"):
                if block.ref_cnt == 0:
                    self.host.free.remove(block)
                block.ref_cnt += 1
        self._tell()
        event = self.told.load_event = self.told.load_event if self.told.load_event >= 0 else self._number()
        self.told.load_cpu_blocks += [block.block_id for block in hit]
        self.told.load_gpu_blocks += [block.block_id for block in table]
        self.loads.setdefault(event, []).append((request.request_id, hit))

    def build(self, served):
        """What the worker is told with a plan. served: requests that are computed."""
        self._tell()
        told, self.told = self.told, None
        for request in served:
            table = self.manager.tables[request.request_id]
            whole = request.hasher(request.all_token_ids[: request.num_computed_tokens])
            for prefix, block in zip(whole, table, strict=False):
                if prefix in self.host.by_prefix or prefix in self.under_way or not self.host.free:
                    continue
                place = self.host.take()
                self.under_way.add(prefix)
                block.ref_cnt += 0 if has_fault("stores-hold-nothing") else 1
                told.store_event = told.store_event if told.store_event >= 0 else self._number()
                told.store_gpu_blocks.append(block.block_id)
                told.store_cpu_blocks.append(place.block_id)
                self.stores.setdefault(told.store_event, []).append((prefix, block, place))
        told.load_event_to_reqs = {event: [name for name, _ in each] for event, each in self.loads.items()}
        return told

    def ended(self, output):
        names = set(output.finished_recving or ())
        for event in [event for event, each in self.loads.items() if {name for name, _ in each} <= names]:
            for _, hit in self.loads.pop(event):
                if not has_fault("host-unpinned") and not has_fault("loads-leak"):
                    self._give_back(self.host, hit)
        report = output.kv_connector_worker_meta
        for event in report.completed_store_events if report else ():
            for prefix, block, place in self.stores.pop(event):
                self.under_way.discard(prefix)
                self.host.keep(prefix, place)
                self._give_back(self.host, [place])
                self._give_back(self.device, [] if has_fault("stores-hold-nothing") else [block])

    def has_pending_push_work(self):
        return bool(self.stores)

    def _give_back(self, pool, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                pool.free.append(block)

    def _number(self):
        self.next += 1
        return self.next

    def _tell(self):
        if self.told is None:
            self.told = SimpleNamespace(load_event=-1, store_event=-1, need_flush=False)
            for name in ("load_cpu_blocks", "load_gpu_blocks", "store_gpu_blocks", "store_cpu_blocks"):
                setattr(self.told, name, [])
