"""What a batch and its tree do together."""

from sglang import has_fault


def evict_for(tree, tokens):
    lacking = tokens - tree.slots.available_size()
    if lacking > 0:
        tree.evict(lacking)


def release_kv_cache(req, tree_cache, is_insert=True):
    tree_cache.cache_finished_req(req, is_insert)
    if has_fault("rows-by-number"):
        tree_cache.rows.free(req.req_pool_idx)
        return
    tree_cache.rows.free(req)
    if not has_fault("row-number-stays"):
        req.req_pool_idx = None
