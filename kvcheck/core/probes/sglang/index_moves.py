"""Probe index-moves: lists of page ids that are moved for a copy, while the prefix tree keeps the same lists.

The hybrid controller gets the calls of a tree (`hybrid_scene`). Trees are driven by their own calls (`tree_scene`). The
device is a stand-in, so that a list on the wrong side is detected. No bytes are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvcheck.core.probes.frame.device import present
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.bare_manager import published
from kvcheck.core.probes.sglang.rig.hybrid_scene import POLICIES as HYBRID_POLICIES
from kvcheck.core.probes.sglang.rig.hybrid_scene import STAGED_BACKUPS, HybridScene
from kvcheck.core.probes.sglang.rig.prefix_tree import NEEDS, found_kinds
from kvcheck.core.probes.sglang.rig.tree_scene import TreeScene

KERNEL, DIRECT = ("kernel", "layer_first"), ("direct", "layer_first")
KERNEL_BY_PAGE, STAGED = ("kernel", "page_first"), ("direct", "page_first_direct")
"""(io_backend, layout of the host's memory)."""
WAYS = {"kernel": (KERNEL, KERNEL_BY_PAGE), "direct": (DIRECT, STAGED)}
"""Ways of copying by subject, in the order in which a tree is offered them."""
POLICIES = ("write_through", "write_back")
"""Pages are backed up as soon as the tree has them, or when they leave the device."""


class IndexMoves:
    """write and load of the hybrid controller; trees over a host tier."""

    def needs(self, subject: str) -> tuple[str, ...]:
        if subject.startswith("hybrid"):
            own = ("hybrid", "transfer", "pool-name", "host-group", "host-entry")
            return (*(f"hicache.{name}" for name in own), "layers.counter")
        return NEEDS

    def control(self, rig: Rig) -> None:
        if rig.subject.startswith("hybrid"):
            with present(rig.package):
                HybridScene(rig, STAGED).plain()
        else:
            _each_tree(rig, (STAGED,), "write_back", TreeScene.fill)

    def measure(self, rig: Rig) -> None:
        ways = WAYS[rig.subject.rpartition("-")[2]]
        if rig.subject.startswith("hybrid"):
            way, turn = ways[rig.schedule % len(ways)], rig.schedule // len(ways)
            policy = HYBRID_POLICIES[rig.schedule % len(HYBRID_POLICIES)]
            with present(rig.package):
                scene = HybridScene(rig, way, STAGED_BACKUPS[turn % len(STAGED_BACKUPS)], policy)
                scene.run(1 + turn % 2, f"by {' '.join(way)}, {policy}")
        else:
            _each_tree(rig, ways, POLICIES[rig.schedule % 2], TreeScene.run)


def _each_tree(rig: Rig, ways: tuple[tuple[str, str], ...], policy: str, drive: Callable[[TreeScene], object]) -> None:
    model = rig.subject.rpartition("-")[0]
    for kind in found_kinds(rig, model):
        refusals = []
        for way in ways:
            own = {
                "hicache_ratio": 2.0,
                "hicache_write_policy": policy,
                "hicache_io_backend": way[0],
                "hicache_mem_layout": way[1],
                "disable_hicache_numa_detect": True,
            }
            with present(rig.package), published(rig.names, **own) as arguments:
                scene = TreeScene(rig, way)
                refused = attempt(partial(scene.start, kind, model, arguments), rig.package)
                if not isinstance(refused, Fault):
                    drive(scene)
                    break
            refusals.append(f"by {' '.join(way)}: {refused.text} ({refused.where})")
            rig.judge.note(f"{kind.name} {refusals[-1]}")
        else:
            raise CannotDrive(f"{kind.name} cannot be made {'; '.join(refusals)}")
