"""Rules of the host tier that hold in every schedule, and the oracles that judge them.

Invariants:
- An oracle that a row names judges the rule in every run. A rule without one is checked by this project's own tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariant:
    """One rule. oracles: rows of ORACLES that judge it in every run."""

    name: str
    shows: str
    oracles: tuple[str, ...] = ()

    @property
    def checked_by(self) -> str:
        """The oracles in one line, or that only tests check it."""
        return ", ".join(f"oracle {name}" for name in self.oracles) or "this project's own tests"


INVARIANTS = (
    Invariant(
        name="H1",
        shows="No move of a transfer changes the index values of nodes, requests or other transfers. They keep "
        "their numbers and their memory when a transfer is started, moved or merged.",
        oracles=("residency",),
    ),
    Invariant(
        name="H2",
        shows="A node owns its index values, which are read-only and shared with no queue and no other node. They "
        "are int64 on the host, one a page, or one slot for a state.",
        oracles=("residency",),
    ),
    Invariant(
        name="H3",
        shows="The host pages and slots of a node are allocated as long as it names them, and are freed once.",
        oracles=("lifetime", "residency", "liveness"),
    ),
    Invariant(
        name="H4",
        shows="Nobody reads a layer of a page before that layer has been loaded. This holds on a second lane, in a "
        "companion buffer and in a replayed graph.",
        oracles=("ordering", "content"),
    ),
    Invariant(
        name="H5",
        shows="A page that is being copied between tiers is not freed, evicted or reused until the copy is "
        "acknowledged. This holds on both sides, also when the node is split.",
        oracles=("ordering", "content"),
    ),
    Invariant(
        name="H6",
        shows="A backup reads what the passes before it have computed, and before anybody writes over it.",
        oracles=("ordering", "content"),
    ),
    Invariant(
        name="H7",
        shows="A ring entry is armed again only after the process has seen its load finish. With all entries in "
        "flight a load is put off, and nothing fails.",
        oracles=("ordering",),
    ),
    Invariant(
        name="H8",
        shows="What left the device is on the host, and no lookup goes past a node that no tier can serve. When "
        "writing through, nothing is backed up under a parent that is not.",
        oracles=("residency",),
    ),
    Invariant(
        name="H9",
        shows="Evictable and locked pages of each space add up to the cached ones. A lock on a node holds its "
        "ancestors too.",
        oracles=("accounting",),
    ),
    Invariant(
        name="H10",
        shows="Loading back is all or nothing. Where it fails, every lock, page and slot on both tiers is as before.",
        oracles=("accounting",),
    ),
    Invariant(
        name="H11",
        shows="A prefix from storage is no longer than the companion buffers that came with it allow. It is looked "
        "up only once its bytes are there.",
    ),
    Invariant(
        name="H12",
        shows="Ranks that own a tree each make the same changes to it in the same order. How differently their "
        "copies run does not matter.",
    ),
    Invariant(
        name="H13",
        shows="Copying from device to host and back is exact, for every layout, copy method and order of ids.",
        oracles=("content",),
    ),
    Invariant(
        name="H14",
        shows="Of what may go, a tier gives up first what its declared order names first. Ties are broken in any way.",
        oracles=("caching",),
    ),
    Invariant(
        name="H15",
        shows="A backup, a load or a prefetch that is due takes place, unless no room is free or can be made for it.",
        oracles=("caching",),
    ),
    Invariant(
        name="H16",
        shows="What was computed is cached. It leaves a tier by eviction alone, and a request that finds it computes "
        "none of it again.",
        oracles=("caching",),
    ),
)
"""Numbers are stable: a retired one is not given to another rule."""
