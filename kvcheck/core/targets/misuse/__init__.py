"""Misuse: illegal calls of the cache's own classes, which their checks have to refuse and which have to change nothing.

    scene     a few small parts of the engine's own classes, on a backend of their own: every row, each once
    engine    the allocators, tree, store and slots that the schedule runs on, as they are between two rounds

Invariants:
- A row is tried on the scene wherever it needs to be prepared. On the engine itself only what has to be refused is
  tried, nothing legal; and nothing that polls, so no order of the schedule changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcheck.core.cache.hicache.file_store import FileStore
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.hicache.storage import PageStore
from kvcheck.core.cache.pools.allocator import IdAllocator
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.targets.misuse import ids, stores, tree
from kvcheck.core.targets.misuse.call import Attempt
from kvcheck.core.targets.misuse.ends import Ends, transfer_attempts
from kvcheck.core.targets.misuse.folders import folder_attempts
from kvcheck.core.targets.misuse.host import host_attempts
from kvcheck.core.targets.misuse.pair_rounds import pair_attempts
from kvcheck.core.targets.misuse.pools import pool_attempts
from kvcheck.core.targets.misuse.queues import queue_attempts
from kvcheck.core.targets.misuse.rounds import round_attempts
from kvcheck.core.targets.misuse.scene import Scene
from kvcheck.core.targets.misuse.sizes import size_attempts
from kvcheck.core.targets.misuse.texts import text_attempts
from kvcheck.core.targets.misuse.tree import tree_attempts
from kvcheck.core.targets.misuse.values import value_attempts
from kvcheck.core.targets.parts import TargetParts


@dataclass(frozen=True, slots=True)
class Misuses:
    """once: on a scene, in any order. always: on the engine as it is, again and again."""

    once: tuple[Attempt, ...]
    always: tuple[Attempt, ...]


def misuses(
    parts: TargetParts,
    shape: ModelShape,
    half: int,
    *,
    allocators: Iterable[IdAllocator],
    cached: PrefixTree | None = None,
    has_host: bool = False,
    store: PageStore | None = None,
    is_pair: bool = False,
) -> Misuses:
    """Half of the rows that an engine has the parts for: 0, of ids and pools; 1, of what is built on them.

    allocators, cached, store: the engine's own; all rows for these.
    """
    scene = Scene(parts, shape)
    if half == 0:
        once = [*ids.allocator_attempts(), *pool_attempts(scene), *size_attempts(scene), *value_attempts(scene)]
    else:
        ends = Ends(scene) if is_pair else None
        once = [*queue_attempts(scene, ends), *round_attempts(scene)]
        if ends is not None:
            once += [*text_attempts(ends.layouts["prefill"], ends.layouts["decode"]), *transfer_attempts(ends)]
            once += pair_attempts(scene)
        once += tree_attempts(scene) if cached is not None else ()
        once += host_attempts(scene) if has_host else ()
        once += stores.store_attempts() if store is not None else ()
        once += folder_attempts() if isinstance(store, FileStore) else ()
    always = [attempt for each in allocators for attempt in ids.live_attempts(each)]
    always += tree.live_attempts(cached) if cached is not None else ()
    always += stores.live_attempts(store) if store is not None else ()
    return Misuses(tuple(once), tuple(always))
