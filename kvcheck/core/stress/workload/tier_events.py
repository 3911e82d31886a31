"""Events of the tiers of a prefix cache: what was looked up, what each tier holds, what moved, what was refused.

Invariants:
- Pages are named by the hash of the prefix that ends with them. So an event says what it is about without the tree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Modelled:
    """What prefixes of the model need besides their pages. window: tokens that a window layer sees, 0 if there is
    none."""

    page_size: int
    window: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A request looked its prompt up. chain: one hash for each whole page. pages: how many were found. device_pages:
    how many of those are on the device.

    device_only: pages of the host could not be loaded and were left out.
    """

    request: int
    chain: tuple[bytes, ...]
    pages: int
    device_pages: int
    device_only: bool
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Declared:
    """The rules of a prefix cache. uses: after how many uses a page is backed up, and that it is computed is one; None:
    when it leaves the device. orders: (tier, eviction order). units: (name of an allocator, ids that it has).

    ack_rounds: it looks at its copies every so many rounds; None: it says nothing of that. load_lanes: those of each
    engine that loads take turns on.
    """

    uses: int | None
    orders: tuple[tuple[str, str], ...]
    units: tuple[tuple[str, int], ...]
    ack_rounds: int | None = None
    load_lanes: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """The store was asked for a prompt, before its lookup. is_fetching: pages of it are on their way."""

    request: int
    chain: tuple[bytes, ...]
    is_fetching: bool


@dataclass(frozen=True, slots=True)
class Computed:
    """A request offers the prefix cache the pages of this chain, which it has computed or found there."""

    request: int
    chain: tuple[bytes, ...]
    priority: int


@dataclass(frozen=True, slots=True)
class Locked:
    """The prefix that ends at this hash is locked on a tier once more, or once less."""

    tier: str
    end: bytes
    added: bool


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """Somebody asked a tier to free so many pages or slots of a space. The victims that follow are for that."""

    tier: str
    space: str
    units: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The run of pages that is to lose what a tier holds of it in a space. passed: ends of runs that were chosen
    before, and could not go."""

    tier: str
    space: str
    chain: tuple[bytes, ...]
    passed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Flushed:
    """These pages leave these tiers because somebody asked for it, whatever the order of eviction says."""

    tiers: tuple[str, ...]
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """Somebody asked for these pages to leave these tiers, and this is the answer. is_gone: they have left. With both
    tiers the pages are a prefix and all that continues it."""

    tiers: tuple[str, ...]
    chain: tuple[bytes, ...]
    is_gone: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A backup or a prefetch of these pages or this state was given up: the host has no room in that space. A snapshot
    of a state was given up where the device has none."""

    kind: str
    request: int
    space: str
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """The store has taken these pages or states, or could not serve them whole. keys: of the objects."""

    space: str
    chain: tuple[bytes, ...]
    is_whole: bool
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreKeeps:
    """The store of this run loses nothing by itself: each object stays whole until it is deleted or damaged."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """The scenario has damaged the object under this key, or lost it. A read before that may not be told yet."""

    key: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """Somebody else has deleted these from the store. A write that is not acknowledged may have come before or after
    that, so whether the store has them is not known any more."""

    space: str
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierChanged:
    """A tier now holds, or no longer holds, pages or states of these hashes under these ids."""

    tier: str
    space: str
    chain: tuple[bytes, ...]
    ids: tuple[int, ...]
    added: bool


@dataclass(frozen=True, slots=True)
class Moving:
    """A backup or a load was made; its operations follow, now or later. units: the host's ids, by space."""

    number: int
    kind: str
    units: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Transferred:
    """A backup, a load or a prefetch was acknowledged. frozen: its index values are those it was made with. chain: the
    hashes of its pages. number: that of a backup or a load."""

    kind: str
    request: int
    pages: int
    frozen: bool
    chain: tuple[bytes, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class Evicted:
    """A node lost what a tier held of it in a space. during_load: while a load was in flight."""

    tier: str
    space: str
    during_load: bool


UseEvent = Modelled | Declared | Asked | LookedUp | Computed
TierEvent = (
    Locked
    | TierChanged
    | RoomWanted
    | Chosen
    | Flushed
    | Answered
    | Refused
    | Moving
    | Transferred
    | Evicted
    | Stored
    | StoreKeeps
    | Damaged
    | Deleted
)
