"""Requests."""


class Req:
    def __init__(self, rid, origin_input_text, origin_input_ids, sampling_params):
        self.origin_input_ids = origin_input_ids
        self.output_ids = []
        self.req_pool_idx = None
        self.hidden_states_tensor = None

    @property
    def seqlen(self):
        return len(self.origin_input_ids) + len(self.output_ids)

    def _tokens(self, rows):
        return rows.req_to_token[self.req_pool_idx, : self.seqlen - 1].long()

    def offload_kv_cache(self, rows, allocator):
        self.copy = allocator.get_cpu_copy(self._tokens(rows), mamba_indices=None)

    def load_kv_cache(self, rows, allocator):
        allocator.load_cpu_copy(self.copy, self._tokens(rows), mamba_indices=None)
