"""Probes state-lengths, whose two sides have lists of states of unequal lengths, and state-failure, whose copies fail.

state-failure: a copy of states fails, and the copies of pages and of metadata around it succeed. In half of the
schedules the first copy of states succeeds. The request must end on both sides, and on neither as Success.

state-lengths: the list of rows that is sent is longer or shorter than the receiving side's list. Two requests go
through one worker. The lists of the first one differ at the end, and in a family with a window also at the start.

Invariants:
- A row of state is written by position, so its content identifies the position.
- Unequal lists alone are no finding: a request may succeed with every row in its place.
- Findings about the request itself are conditional: its two sides must build unequal lists. Findings about other
  requests are not.
"""

from __future__ import annotations

import torch

from kvcheck.core.probes.frame.buffer_views import BufferView
from kvcheck.core.probes.frame.guard import CannotDrive, Fault
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.pd_pair import (
    NEEDS,
    DecodeTarget,
    PDPair,
    RegisteredMemory,
    SentRequest,
    StandInLink,
)
from kvcheck.core.probes.sglang.rig.pools import PAGES, SmallPool, pool_names, small_pool

UNIT = {"nsa": "page", "swa": "window"}
KINDS = {"nsa": ("nsa", "dsa"), "swa": ("swa",)}
UNEQUAL, BEHIND, OTHER = 1, 2, 3
"""Requests: with unequal lists, behind it, and the owner of all other rows of the decode side."""
PLACES = {"nsa": ("end",), "swa": ("end", "start")}
"""Where lists can differ. Lists of all pages begin at the same page on both sides, those of a window anywhere."""

CONDITION = (
    "the two sides of a transfer build state lists of unequal length; no way is known in which peers of one release do "
    "so since sgl-project/sglang#27004, and copies take such lists on purpose since sgl-project/sglang#23323"
)
ROWS = 3


def parts(subject: str) -> tuple[str, str]:
    family, _, direction = subject.partition("-")
    return family, direction


class StateLengths:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (*NEEDS, *pool_names(parts(subject)[0]))

    def control(self, rig: Rig) -> None:
        transfer = StateTransfer(rig)
        rows = 3 + rig.mix.below(3)
        transfer.send(range(rows), range(rows), rows)
        transfer.check_success(UNEQUAL, range(rows), "sent with equal lists")
        transfer.check_success(BEHIND, range(rows), "sent behind one with equal lists")
        transfer.check_others("beside states that were sent with equal lists")

    def measure(self, rig: Rig) -> None:
        family, direction = parts(rig.subject)
        for place in PLACES[family]:
            found = len(rig.judge.findings)
            rows = 3 + rig.mix.below(3)
            more = 1 + rig.mix.below(rows - 1)
            whole, cut = range(rows), range(rows - more) if place == "end" else range(more, rows)
            ours, theirs = (whole, cut) if direction == "longer" else (cut, whole)
            case = f"prefill {direction} at the {place}"
            came = _unequal(rig, ours, theirs, rows, case)
            rig.judge.count("orderings_checked")
            harm = "; a finding" if len(rig.judge.findings) > found else "; nobody was harmed"
            rig.judge.note(f"{case}: {came}{harm}")


def _unequal(rig: Rig, ours: range, theirs: range, rows: int, case: str) -> str:
    transfer = StateTransfer(rig)
    died = transfer.send(ours, theirs, rows)
    rig.judge.count("requests", 2)
    rig.judge.count("transfers", 2)
    what = f"state lists of {len(ours)} rows at the prefill side and {len(theirs)} at the decode side ({case})"
    if died is not None:
        text = f"{what}: the transfer worker died of it: {died.text} ({died.where}); nobody's request is sent any more"
        rig.judge.find("KV902", "liveness", text, lane=_lane("worker", case), request=UNEQUAL)
    came = transfer.judge_unequal(what, theirs, case) if died is None else f"the worker died ({died.text})"
    transfer.check_lists(what)
    transfer.check_others(what)
    if died is None:
        transfer.check_success(BEHIND, range(rows), f"sent behind one with {what}")
    return came


def _lane(what: str, case: str) -> str:
    return f"{what}, {case}"


class StateTransfer:
    """state_places: addresses of the decode pool's states."""

    def __init__(self, rig: Rig) -> None:
        family, _ = parts(rig.subject)
        self._rig, self._judge, self._unit = rig, rig.judge, UNIT[family]
        self._ours, self._theirs = small_pool(rig, family), small_pool(rig, family)
        self.state_places: list[range] = []
        memories = []
        for made in (self._ours, self._theirs):
            states = made.pool.get_state_buf_infos()
            memories.append(RegisteredMemory(pages=made.pool.get_contiguous_buf_infos(), states=states))
            self.state_places = [range(start, start + size) for start, size, *_ in zip(*states, strict=True)]
        link = StandInLink(fails=self._record)
        self.peers = PDPair(rig, link, memories[0], memories[1:], kinds=KINDS[family], flat=family == "nsa")
        self._lists: dict[int, tuple[list[int], list[int]]] = {}
        self._kept: dict[int, tuple[list[int], list[int]]] = {}
        self._window: dict[int, range] = {}

    def is_state(self, address: int) -> bool:
        return any(address in each for each in self.state_places)

    def _record(self, address: int) -> bool:
        """Record the request for a copy of states. None fails."""
        if self.is_state(address):
            self._rig.record()
        return False

    def send(self, ours: range, theirs: range, rows: int) -> Fault | None:
        total = self._rows(self._theirs)
        self._theirs.writer.write(OTHER, self._unit, range(1, total))
        free = [*range(1, min(total, PAGES))]
        scatter = self._rig.mix.chance(1, 2)
        requests = []
        for request, (left, right) in ((UNEQUAL, (ours, theirs)), (BEHIND, (range(rows), range(rows)))):
            source = [1 + (request - 1) * 6 + at for at in range(rows)]
            target = [free.pop(self._rig.mix.below(len(free)) if scatter else 0) for _ in range(rows)]
            self._ours.writer.write(request, self._unit, source)
            lists = [source[at] for at in left], [target[at] for at in right]
            self._lists[request], self._kept[request] = lists, (list(lists[0]), list(lists[1]))
            self._window[request] = right
            page = (request,)
            sent = SentRequest(
                room=request, pages=page, slot=0, states=lists[0], targets=(DecodeTarget(page, 0, lists[1]),)
            )
            requests.append(sent)
        died = self.peers.send(requests)
        lost = self.peers.deliver(0)
        if lost is not None:
            raise CannotDrive(f"the receive loop died: {lost.text} ({lost.where})")
        if self.peers.link.refused:
            self._judge.note("the copy engine refused writes beyond what the receiver has registered")
        return died

    def judge_unequal(self, what: str, theirs: range, case: str) -> str:
        """Both sides must fail it, or succeed with every row in place. Returns the result in words."""
        sides = {"prefill": self.peers.sender, "decode": self.peers.ranks[0]}
        states = {side: self.peers.status(manager, UNEQUAL) for side, manager in sides.items()}
        told = ", ".join(f"{side} says {status}" for side, status in states.items())
        if len({*states.values()}) > 1:
            text = f"{what}: {told}; one of them waits, or is wrong"
            self._find("KV301", "contract", text, _lane("sides", case))
        if "Success" in states.values():
            right = self.check_rows(UNEQUAL, theirs, f"Success with {what}", CONDITION)
            if right:
                return "Success on lists of other lengths, with every row of the receiver in place"
            text = f"{what}: nobody failed the request ({told}), and rows were left out or come from other positions"
            self._find("KV301", "contract", text, _lane("lengths", case))
            return "Success on lists of other lengths, with rows that are wrong"
        if "Failed" not in states.values():
            text = f"{what}: {told}; the request waits for ever, and so does whoever needs its pages"
            self._find("KV901", "liveness", text, _lane("waits", case))
            return f"nobody concluded the request ({told})"
        reasons = [self.peers.reason(manager, UNEQUAL) for manager in sides.values()]
        lengths = [str(len(each)) for each in self._kept[UNEQUAL]]
        if not any(all(length in reason for length in lengths) for reason in reasons):
            self._judge.note(f"{case}: no reason of the failure has both lengths")
        return f"the request alone failed ({told})"

    def check_success(self, request: int, theirs: range, when: str) -> None:
        for side, manager in (("prefill", self.peers.sender), ("decode", self.peers.ranks[0])):
            status = self.peers.status(manager, request)
            if status != "Success":
                text = f"request {request}, {when}: {side} says {status}, expected Success"
                self._judge.find("KV901", "liveness", text, lane=side, request=request)
        self.check_rows(request, theirs, when)

    def check_rows(self, request: int, theirs: range, when: str, condition: str | None = None) -> bool:
        right = True
        for held in self._held():
            ids = self._kept[request][1]
            seen = held.rows[torch.as_tensor(ids)]
            at = list(theirs)
            count = self._judge.compare(
                held, seen, request=request, positions=at, ids=ids, when=when, condition=condition
            )
            right = right and count == len(ids)
        return right

    def check_lists(self, what: str) -> None:
        for request, lists in self._lists.items():
            for side, seen, kept in zip(("prefill", "decode"), lists, self._kept[request], strict=True):
                if seen != kept:
                    text = f"{what}: the {side} list of request {request} was {kept} and is {seen} after the transfer"
                    self._judge.find("KV303", "contract", text, lane=side, request=request)

    def check_others(self, when: str) -> None:
        taken = {row for _, targets in self._kept.values() for row in targets}
        ids = [row for row in range(1, self._rows(self._theirs)) if row not in taken]
        for held in self._held():
            seen = held.rows[torch.as_tensor(ids)]
            at = [row - 1 for row in ids]
            self._judge.compare(
                held, seen, request=OTHER, positions=at, ids=ids, when=f"somebody else's, {when}", code="KV403"
            )

    def _find(self, code: str, oracle: str, text: str, lane: str) -> None:
        self._judge.find(code, oracle, text, lane=lane, request=UNEQUAL, condition=CONDITION)

    def _held(self) -> list[BufferView]:
        return [held for held in self._theirs.writer.found.buffers if held.unit == self._unit]

    def _rows(self, made: SmallPool) -> int:
        return min(len(held.rows) for held in made.writer.found.buffers if held.unit == self._unit)


class StateFailure:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (*NEEDS, *pool_names(subject))

    def control(self, rig: Rig) -> None:
        transfer = StateTransfer(rig)
        transfer.send(range(ROWS), range(ROWS), ROWS)
        transfer.check_success(UNEQUAL, range(ROWS), "sent with states that were copied")

    def measure(self, rig: Rig) -> None:
        transfer = StateTransfer(rig)
        link, passes = transfer.peers.link, rig.schedule % 2

        def fails(address: int) -> bool:
            nonlocal passes
            if not transfer.is_state(address):
                return False
            rig.record()
            passes -= 1
            return passes < 0

        link.fails = fails
        died = transfer.send(range(ROWS), range(ROWS), ROWS)
        rig.judge.count("requests")
        rig.judge.count("transfers")
        rig.judge.count("orderings_checked")
        if died is not None:
            text = f"the transfer worker died of a copy of states that failed: {died.text} ({died.where})"
            rig.judge.find("KV902", "liveness", text, lane="worker", request=UNEQUAL)
            return
        if not link.failed:
            raise CannotDrive("no copy of states was asked for that could fail")
        _judge(rig, transfer)


def _judge(rig: Rig, transfer: StateTransfer) -> None:
    peers = transfer.peers
    sides = {"prefill": peers.sender, "decode": peers.ranks[0]}
    states = {side: peers.status(manager, UNEQUAL) for side, manager in sides.items()}
    told = ", ".join(f"{side} says {status}" for side, status in states.items())
    what = f"the copy engine said of {peers.link.failed} copies of states that they failed"
    rig.judge.note(f"{what}: {told}")
    rig.judge.reads += len(sides)
    if "Success" in states.values():
        text = f"{what}, and {told}: a request without its states is served"
        rig.judge.find("KV203", "protocol", text, lane="status", request=UNEQUAL)
    elif {*states.values()} != {"Failed"}:
        text = f"{what}, and {told}: one of them waits for ever, and so does whoever needs its pages"
        rig.judge.find("KV901", "liveness", text, lane="status", request=UNEQUAL)
