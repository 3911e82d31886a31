"""The prefill side of a transfer: what it sends after each chunk."""

from sglang import has_fault


class SchedulerDisaggregationPrefillMixin:
    def send_kv_chunk(self, req, last_chunk=False, end_idx=None):
        size, row = self.token_to_kv_pool_allocator.page_size, self.req_to_token_pool.req_to_token[req.req_pool_idx]
        extended = req.extend_range.end if has_fault("reads-extend-range") else len(req.fill_ids)
        end = min(extended, len(req.origin_input_ids))
        if not last_chunk and not has_fault("part-page-twice"):
            end -= end % size
        states = None
        if last_chunk:
            length = end + (len(req.output_ids) if has_fault("sampled-is-counted") else 0)
            states = (row[:length:size] // size).tolist()
        start = req.start_send_idx
        if has_fault("rest-forgotten") and start and last_chunk:
            end -= end % size
        req.disagg_kv_sender.send((row[start:end:size] // size).tolist(), states)
        req.start_send_idx = end
