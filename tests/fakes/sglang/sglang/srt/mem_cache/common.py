"""What a batch and its tree do together."""


def evict_for(tree, tokens):
    lacking = tokens - tree.slots.available_size()
    if lacking > 0:
        tree.evict(lacking)


def release_kv_cache(req, tree_cache, is_insert=True):
    tree_cache.cache_finished_req(req, is_insert)
    tree_cache.rows.free(req)
    req.req_pool_idx = None
