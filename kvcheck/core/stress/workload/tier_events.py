"""Events of the tiers of a prefix cache. Pages are named by the hash of the prefix that ends with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Modelled:
    """window: tokens visible to a window layer, 0 if there is none."""

    page_size: int
    window: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class LookedUp:
    """chain: one hash for each whole page. pages, device_pages: pages found, and those of them on the device.
    device_only: pages of the host could not be loaded and were left out."""

    request: int
    chain: tuple[bytes, ...]
    pages: int
    device_pages: int
    device_only: bool
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Declared:
    """The rules of a prefix cache. uses: after how many uses a page is backed up, its computation being the first;
    None: when it leaves the device. orders: (tier, eviction order). units: (name of an allocator, its number of ids).
    ack_rounds: rounds between checks of its copies; None: not declared. load_lanes: of each engine, in turn."""

    uses: int | None
    orders: tuple[tuple[str, str], ...]
    units: tuple[tuple[str, int], ...]
    ack_rounds: int | None = None
    load_lanes: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StoreQueried:
    """The store was queried for a prompt, before its lookup. is_fetching: a prefetch of its pages was started."""

    request: int
    chain: tuple[bytes, ...]
    is_fetching: bool


@dataclass(frozen=True, slots=True)
class Computed:
    """A request offers the prefix cache pages that it has computed or found there."""

    request: int
    chain: tuple[bytes, ...]
    priority: int


@dataclass(frozen=True, slots=True)
class Locked:
    tier: str
    end: bytes
    added: bool


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """A tier was requested to free so many pages or slots of a space. The victims that follow are for that."""

    tier: str
    space: str
    units: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The run of pages to be evicted. passed: ends of runs chosen before that could not go."""

    tier: str
    space: str
    chain: tuple[bytes, ...]
    passed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Flushed:
    """These pages leave these tiers on request, whatever the order of eviction."""

    tiers: tuple[str, ...]
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a request to remove these pages from these tiers. With both tiers the pages are a prefix and all
    its continuations."""

    tiers: tuple[str, ...]
    chain: tuple[bytes, ...]
    is_gone: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A backup, a prefetch or a snapshot was given up, as that space had no room in the host (snapshot: device)."""

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
    """The store of this run loses nothing: each object stays whole until it is deleted or damaged."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """The scenario damaged or lost the object under this key. An earlier read may still be pending."""

    key: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """Another process deleted these from the store. A write without acknowledgement may have come before or after, so
    whether the store has them is unknown from now on."""

    space: str
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierChanged:
    tier: str
    space: str
    chain: tuple[bytes, ...]
    ids: tuple[int, ...]
    added: bool


@dataclass(frozen=True, slots=True)
class Moving:
    """A backup or a load was made; its operations follow, now or later. units: host ids, by space."""

    number: int
    kind: str
    units: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Transferred:
    """A backup, a load or a prefetch was acknowledged. frozen: its index values are unchanged."""

    kind: str
    request: int
    pages: int
    frozen: bool
    chain: tuple[bytes, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class Evicted:
    tier: str
    space: str
    during_load: bool


UseEvent = Modelled | Declared | StoreQueried | LookedUp | Computed
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
