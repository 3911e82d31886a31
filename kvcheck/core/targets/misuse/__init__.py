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
from kvcheck.core.targets.misuse.host import host_attempts
from kvcheck.core.targets.misuse.pools import pool_attempts
from kvcheck.core.targets.misuse.queues import queue_attempts
from kvcheck.core.targets.misuse.scene import Scene
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
    *,
    allocators: Iterable[IdAllocator],
    cached: PrefixTree | None = None,
    has_host: bool = False,
    store: PageStore | None = None,
    is_pair: bool = False,
) -> Misuses:
    """All rows that an engine has the parts for. allocators, cached, store: the engine's own."""
    scene = Scene(parts, shape)
    once = [*ids.allocator_attempts(), *pool_attempts(scene), *value_attempts(scene)]
    always = [attempt for each in allocators for attempt in ids.live_attempts(each)]
    ends = Ends(scene) if is_pair else None
    if ends is not None:
        once += [*text_attempts(ends.layouts["prefill"], ends.layouts["decode"]), *transfer_attempts(ends)]
    once += queue_attempts(scene, ends)
    if cached is not None:
        once += tree_attempts(scene)
        always += tree.live_attempts(cached)
    if has_host:
        once += host_attempts(scene)
    if store is not None:
        once += stores.store_attempts()
        once += stores.file_attempts() if isinstance(store, FileStore) else ()
        always += stores.live_attempts(store)
    return Misuses(tuple(once), tuple(always))
