"""Movement: backs up nodes and loads them back, from the first lock to the acknowledgement.

Invariants:
- From the start of a transfer to its acknowledgement its nodes are locked on both tiers.
- With write-through a node is backed up only if its parent is, so every prefix of a backed-up prefix is backed up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.events import Emit, Refused, TierChanged
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.node import (
    Node,
    SpaceCopy,
    Transfer,
    TransferBegan,
    TransferEnded,
    WindowPages,
    make_copy,
    owned,
)
from kvcheck.core.cache.hicache.radix_tree import Match

SPACES = ("full", "window", "state")


@dataclass(frozen=True, slots=True)
class Gap:
    """Units that a match needs on the device and only the host holds. places: pages of the node."""

    node: Node
    space: str
    host: IndexArray
    places: IndexArray


class Movement:
    """Copies nodes between the tiers of one rank. uses: hits before a node is backed up; None: on eviction."""

    def __init__(
        self,
        residency: Residency,
        controller: TransferController,
        make_room: Callable[[str, int], int],
        *,
        uses: int | None,
        agree: Callable[[int], int],
        emit: Emit | None,
    ) -> None:
        self.controller = controller
        self.uses = uses
        self._residency = residency
        self._tree = residency.tree
        self._pool = residency.pool
        self._make_room = make_room
        self._agree = agree
        self._emit = emit
        self._count = 0
        self.on_backed_up: Callable[[Node, int], None] = lambda node, request: None

    # Backup

    def back_up_when_due(self, node: Node, request: int) -> None:
        if self.uses is None or node.hits < self.uses or node.parent is None:
            return
        if node.parent is self._tree.root or node.parent.host.is_live:
            self.back_up(node, request)

    def back_up(self, node: Node, request: int) -> bool:
        """Start a backup; False if the node has one, is loading, or the host has no room."""
        if node.host.is_live or node.loading or not node.device.is_live:
            return False
        copies: list[SpaceCopy] = []
        for space in SPACES:
            device = node.device.ids(space)
            if not len(device):
                continue
            host = self._host_ids(space, len(device), request)
            if host is None and self._emit is not None:
                self._emit(Refused("backup", request, space, node.device.hashes(node.chain, space)))
            if host is None and space == "full":
                return False
            if host is not None:  # without room for a companion the host keeps the pages alone: a tombstone
                hashes = node.device.hashes(node.chain, space)
                copies.append(make_copy(space, host, device, hashes, owners=request))
                self._place_host(node, space, host)
        transfer = self._transfer("backup", request, node, tuple(copies))
        transfer.nodes.append(node)
        node.backing = transfer
        self._pin(transfer)
        self._report_begin(transfer)
        self.controller.backup(transfer)
        self._residency.gained(node, "host", SPACES)
        return True

    def wait_for_backups(self) -> None:
        while self.controller.backups:
            self.controller.wait(self.controller.backups[0])
            self._acknowledge(self.controller.take_backup())

    def _host_ids(self, space: str, count: int, request: int) -> IndexArray | None:
        allocator = self.controller.host.allocators[space]
        if allocator.available < count:
            self._residency.evict_host(space, count - allocator.available)
        return allocator.allocate(count, request)

    def _place_host(self, node: Node, space: str, host: IndexArray) -> None:
        """Set the node's host value, owned by the node. (mutant: node-keeps-queue-view)"""
        if space == "full":
            node.host.full = owned(host)
        elif space == "state":
            node.host.state = int(host[0])
        elif node.device.window is not None:
            node.host.window = WindowPages(node.device.window.held, host)

    # Load-back

    def load_back(self, match: Match, request: int) -> bool:
        """Load all that a match lacks on the device. Return False, with nothing changed, if it does not fit."""
        gaps = [gap for node in match.nodes for gap in self._gaps(node, match)]
        if not gaps:
            return True
        # Lock before evicting for room: the pages of both ends of the load must stay.
        transfer = self._transfer("load", request, match.node, ())
        self._pin(transfer)
        taken = self._device_ids(gaps, request)
        if taken is None:
            self._abandon(transfer)
            return False
        transfer.copies = tuple(
            make_copy(gap.space, gap.host, ids, [gap.node.chain[at] for at in gap.places], owners=request)
            for gap, ids in zip(gaps, taken, strict=True)
        )
        for gap, copy in zip(gaps, transfer.copies, strict=True):
            self._place_device(gap, copy.device)
            if self._emit is not None:
                self._emit(TierChanged("device", copy.space, copy.chain, tuple(copy.device.tolist()), added=True))
            if transfer not in gap.node.loading:
                gap.node.loading = (*gap.node.loading, transfer)
                transfer.nodes.append(gap.node)
        self._report_begin(transfer)
        self.controller.queue_load(transfer)
        return True

    def _abandon(self, transfer: Transfer) -> None:
        """Undo the locks of a load that does not fit. (mutant: partial-load-keeps-lock)"""
        self._unpin(transfer)

    def _device_ids(self, gaps: list[Gap], request: int) -> list[IndexArray] | None:
        taken: list[tuple[str, IndexArray]] = []
        for gap in gaps:
            wanted = len(gap.host)
            if (usable := self._pool.spare(gap.space)) < wanted:
                self._make_room(gap.space, wanted - usable)
            fits = self._pool.spare(gap.space) >= wanted
            ids = self._pool.allocators[gap.space].allocate(wanted, request) if fits else None
            if ids is None:
                for space, given_back in taken:
                    self._pool.allocators[space].free(given_back)
                return None
            taken.append((gap.space, ids))
        return [ids for _, ids in taken]

    def _gaps(self, node: Node, match: Match) -> list[Gap]:
        """Gaps of a node for this match, pages before their companions."""
        if not node.is_backed:
            return []
        gaps: list[Gap] = []
        places = np.arange(len(node.keys), dtype=np.int64)
        if not node.device.is_live:
            gaps.append(Gap(node, "full", node.host.ids("full"), places))
        if node.host.window is not None:
            lacking = node.host.window.held & (places + self._start(node) >= self._first_seen(match))
            if node.device.window is not None:
                lacking &= ~node.device.window.held
            gaps.append(Gap(node, "window", node.host.window.among(lacking), places[lacking]))
        if node is match.node and node.device.state is None:
            gaps.append(Gap(node, "state", node.host.ids("state"), places[-1:]))
        return [gap for gap in gaps if len(gap.host)]

    def _first_seen(self, match: Match) -> int:
        return self._pool.first_seen_page(match.pages * self._pool.page_size)

    def _start(self, node: Node) -> int:
        return sum(len(each.keys) for each in node.path()) - len(node.keys)

    def _place_device(self, gap: Gap, ids: IndexArray) -> None:
        node = gap.node
        if gap.space == "full":
            node.device.full = owned(ids)
        elif gap.space == "state":
            node.device.state = int(ids[0])
        else:
            held = node.device.window or WindowPages.nothing(len(node.keys))
            node.device.window = held.plus(gap.places, ids)
            assert node.device.full is not None
            self._pool.map_window(node.device.full[gap.places], ids)

    # Acknowledgement

    def poll(self) -> bool:
        """Acknowledge transfers that are done on every rank. True if there was one."""
        backups = self._agree(self.controller.finished_backups())
        loads = self._agree(self.controller.finished_loads())
        for _ in range(backups):
            self._acknowledge(self.controller.take_backup())
        for _ in range(loads):
            for transfer in self.controller.take_load():
                self._acknowledge(transfer)
        return bool(backups or loads)

    def wait_oldest(self) -> bool:
        """Wait for the oldest backup, else load, and acknowledge it; False if none is in flight."""
        if self.controller.backups:
            self.controller.wait(self.controller.backups[0])
            self._acknowledge(self.controller.take_backup())
            return True
        if self.controller.loads:
            self.controller.wait(self.controller.loads[0][0])
            for transfer in self.controller.take_load():
                self._acknowledge(transfer)
            return True
        return False

    def _acknowledge(self, transfer: Transfer) -> None:
        for node in transfer.nodes:
            if transfer.kind == "backup":
                node.backing = None
            else:
                node.loading = tuple(each for each in node.loading if each is not transfer)
        transfer.acknowledged = True
        self._unpin(transfer)
        for node in transfer.nodes if transfer.kind == "backup" else ():
            self.on_backed_up(node, transfer.request)
        if self._emit is not None:
            self._emit(TransferEnded(transfer))

    def _transfer(self, kind: str, request: int, lock: Node, copies: tuple[SpaceCopy, ...]) -> Transfer:
        self._count += 1
        return Transfer(number=self._count, kind=kind, request=request, nodes=[], copies=copies, lock=lock)

    def _report_begin(self, transfer: Transfer) -> None:
        if self._emit is not None:
            self._emit(TransferBegan(transfer))

    def _pin(self, transfer: Transfer) -> None:
        """Keep both ends until the acknowledgement. (mutants: load-without-pin, write-back-without-pin)"""
        self._tree.lock(transfer.lock)
        self._tree.lock_host(transfer.lock)

    def _unpin(self, transfer: Transfer) -> None:
        self._tree.unlock(transfer.lock)
        self._tree.unlock_host(transfer.lock)
