"""pd-transfer and nvlink-aux: one end computes prompts and another decodes them, each with its own number of ranks.

Invariants:
- A fault is an event of the history when it happens, so that oracles know which request has to fail, and why.
"""

from __future__ import annotations

from dataclasses import replace

from kvcheck.core.base.paging import pages_for
from kvcheck.core.base.record import Evidence
from kvcheck.core.base.rng import Rng
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools import FAMILIES
from kvcheck.core.cache.pools.pool import PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.scheduler.request import StepReport
from kvcheck.core.cache.transfer.messages import Abort, Done, Drained, Message, Status, Want
from kvcheck.core.cache.transfer.wire import LEGS, Ticket
from kvcheck.core.run.plan import parse_ranks
from kvcheck.core.stress.scenarios.disturber import disturber
from kvcheck.core.stress.scenarios.scenario import ABORTS, CHUNKS, TRANSFERS, Load, Scenario
from kvcheck.core.stress.scenarios.serving import (
    buffer_names,
    make_setup,
    serve,
    synthetic_load,
    unread,
)
from kvcheck.core.stress.scenarios.variants import Settings, Variant, settings_of
from kvcheck.core.stress.targets.target import Engine, PairSetup, Target
from kvcheck.core.stress.workload.events import Faulted, HandoversKnown, Happened
from kvcheck.core.stress.workload.handover import bytes_for
from kvcheck.core.stress.workload.jobs import Job

SYNTHETIC_PAGES = 9
MAX_RUNNING = 4
REQUESTS = 12
MANY_RANKS = 5
FEWER_REQUESTS = 6
"""Requests if both ends have so many ranks together: each rank does the work of one alone."""
RANKS = ("1x1", "2x2", "2x1", "1x2", "4x2", "2x4", "4x1", "1x4", "4x4")
"""Prefill and decode ranks."""
STAGES = ("late", "joined", "retracted", "admitted")
ABORT_EVERY = 4
FAULT_EVERY = 5
LATE_ROUNDS = 4
"""Stage "late" aborts at most so many rounds after admission."""
RETRIES = {"none": None, "at once": 0, "later": 3}
"""Rounds after which failed requests are sent again."""
MESSAGES = "messages"
LOSSES = "losses"
FAULT_KINDS = {
    "short lists, refusals": ("shorter", "refused"),
    "long lists, refusals": ("longer", "refused"),
    LOSSES: ("vanished", "lost"),
}
STATE_FAMILIES = ("nsa", "swa", "mamba")
"""Families that send index pages, windows or states beside KV."""
FAULTY_LEGS = ("state", "kv", "seal")
LOST_MESSAGES = {"Want": Want, "Status": Status}
PATIENCE = 200
"""Rounds of a room. Where one leg at a time is held back, healthy rooms took up to 131; under random orders, 13."""
LIMITS = 3
"""One schedule in so many lets few requests be in transfer, and another one gives the prefill end few pages. Mostly the
slots of metadata hold requests back, and then no other limit is ever met."""
FEW_COMING = 2
ANSWERS = (Done, Abort, Drained)
TOO_LATE = "nothing complete from"
"""Beginning of the reason of a room that is too late; the ranks it waited for follow."""


class PDTransfer(Scenario):
    """Prefill and decode ends over a wire whose completion means that bytes have landed."""

    name = "pd-transfer"
    needs = frozenset({"pd-transfer", "metadata"})
    families = FAMILIES
    focus = frozenset({"request/ready/abort"})
    """Situations that every disturbed schedule aims at, as they are rare."""
    sends_rows = False
    """True if ranks in processes send metadata rows as messages, not through the engine."""
    metadata_paths: tuple[str, ...] = ("ordered", MESSAGES)
    """How metadata rows and seals travel: over a path of the engine, or as messages."""
    path = "ordered"
    """The path of KV and state."""

    def __init__(self, ranks: tuple[int, int] | None = None) -> None:
        self.ranks = ranks

    @property
    def table(self) -> Settings:
        ranks = RANKS if self.ranks is None else (f"{self.ranks[0]}x{self.ranks[1]}",)
        return settings_of(
            {
                "rank layout": ranks,
                "abort stage": STAGES,
                "metadata path": self.metadata_paths,
                "prefill chunk": CHUNKS,
                "fault kind": FAULT_KINDS,
                "faulty leg": FAULTY_LEGS,
                "retry delay": RETRIES,
                "faulty rank": ("all", "first"),
                "lost message": LOST_MESSAGES,
                "message count": ("1", "2"),
            }
        )

    def lanes(self, variant: Variant, shape: ModelShape) -> tuple[str, ...]:
        state = ("state",) if self.path == "async" and shape.family in STATE_FAMILIES else ()
        aux = ("aux",) if variant["metadata path"] == "async" else ()
        return ("compute", "d2h", "h2d", "wire", "message", *state, *aux)

    def paths(self, variant: Variant) -> dict[str, str]:
        way = variant["metadata path"]
        return dict.fromkeys(LEGS, self.path) | ({} if way == MESSAGES else {"aux": way, "seal": way})

    def drawn(self, shape: ModelShape, row: Variant, *, seed: int, requests: int | None, is_short: bool) -> Load:
        usual = REQUESTS if sum(parse_ranks(row["rank layout"])) < MANY_RANKS else FEWER_REQUESTS
        return synthetic_load(
            shape,
            pages=SYNTHETIC_PAGES,
            requests=requests or usual,
            max_running=MAX_RUNNING,
            seed=seed,
            chunk=row["prefill chunk"],
        )

    def run(
        self,
        target: Target,
        shape: ModelShape,
        load: Load,
        *,
        backend: Backend,
        emit: Emit,
        variant: int,
    ) -> int:
        row = self.table.variant(variant)
        faults = Faults(load.jobs, shape, emit, row, is_kept=TRANSFERS in load.faults)
        prefill, decode = parse_ranks(row["rank layout"])
        setup = make_setup(shape, load, backend, emit, share_prefixes=False)
        if variant % LIMITS == 1:
            setup = replace(setup, config=replace(setup.config, max_prefilling=FEW_COMING))
        # Behind a request whose fault shows only by waiting, those that wait for its pages would run out of time.
        is_tight = variant % LIMITS == 2 and row["fault kind"] != LOSSES
        emit(HandoversKnown({job.request: bytes_for(shape, job.prompt_tokens, decode) for job in load.jobs}))
        pair = PairSetup(
            prefill_ranks=prefill,
            decode_ranks=decode,
            prefill_sizes=prefill_sizes(setup.sizes, load.jobs, shape, is_tight=is_tight),
            paths=self.paths(row),
            room_of=room_of,
            refuses=faults.refuses,
            vanishes=faults.vanishes,
            tamper=faults.tamper,
            copies=faults.copies,
            patience=PATIENCE * (len(load.jobs) if is_tight else 1),  # one prompt may wait for all others
            aux_over_messages=row["metadata path"] == MESSAGES,
        )
        engine = target.build(replace(setup, pair=pair))
        aborts = Aborts(row["abort stage"], faults)
        retries = RoomRetries(faults, aborts, RETRIES[row["retry delay"]], engine=engine, emit=emit)
        return serve(
            engine,
            load,
            emit,
            backend,
            aborts=aborts if ABORTS in load.faults else None,
            retries=retries,
            disturber=disturber(self.name, load, emit, variant, shape=shape.name, spared=faults.has, focus=self.focus),
        )

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        if not evidence.transfers:
            return "no transfer happened; use more requests or schedules"
        return unread(evidence, buffer_names(shape) | {"metadata", "sealed"})


class NVLinkAux(PDTransfer):
    """The engine reports a copy when it has queued it; metadata rows travel in three ways."""

    name = "nvlink-aux"
    sends_rows = True
    metadata_paths = ("async", "ordered", MESSAGES)
    """On the CPU ("ordered"), copies of metadata are acknowledged, while those of KV and state are not."""
    path = "async"


class Faults:
    """Faults of every fifth request, of several kinds in turn.

        shorter, longer    a decode rank sends a page list of another length
        refused            the engine refuses a write
        vanished           the engine reports a write and never makes it
        lost               a Want or a Status of a rank does not arrive

    A rank notices the last two only by a timeout, so they have schedules for themselves. There some answers (Done,
    Abort, Drained) are lost as well, which only costs time. If the message count is 2, a late copy of each arrives as
    well, which is no fault. is_kept: some of this happens; else nothing.
    """

    def __init__(
        self, jobs: tuple[Job, ...], shape: ModelShape, emit: Emit, variant: Variant, *, is_kept: bool = True
    ) -> None:
        self._emit = emit
        self._kinds: dict[int, str] = {}
        self._requests = {room_of(job.request): job.request for job in jobs}
        self._told: set[int] = set()
        self._is_partial = variant["faulty rank"] == "first"
        self._leg = variant["faulty leg"]
        if self._leg == "state" and shape.family not in STATE_FAMILIES:
            self._leg = "kv"
        self._lost = LOST_MESSAGES[variant["lost message"]]
        self._copies = int(variant["message count"]) if is_kept else 1
        self._number = variant.number
        kinds = FAULT_KINDS[variant["fault kind"]]
        self._has_losses = is_kept and "lost" in kinds
        self._unheard: set[tuple[str, str, int, type]] = set()
        for job in jobs if is_kept else ():
            if job.request % FAULT_EVERY == self._number % FAULT_EVERY:
                self._kinds[job.request] = kinds[(job.request // FAULT_EVERY + self._number) % len(kinds)]

    def has(self, request: int) -> bool:
        return request in self._kinds

    def end(self, request: int) -> None:
        self._kinds.pop(request, None)

    def refuses(self, writer: str, peer: str, leg: str, ticket: Ticket) -> bool:
        if not self._is_hit(peer, leg, ticket, "refused"):
            return False
        self._tell(ticket.request, f"a write of its {leg} was refused", ("refused", leg))
        return True

    def vanishes(self, writer: str, peer: str, leg: str, ticket: Ticket) -> bool:
        if not self._is_hit(peer, leg, ticket, "vanished"):
            return False
        self._tell(ticket.request, f"a write of its {leg} never landed", (TOO_LATE, writer))
        return True

    def copies(self, sender: str, peer: str, message: Message) -> int:
        request = self._requests.get(message.room, 0)
        if self._is_unheard(sender, peer, request, message):
            return 0
        is_with_a_first_rank = sender.endswith("-0") or peer.endswith("-0")
        # A report of a failure is not lost: then the reason would be lost as well, and no rank could name it.
        is_one_to_lose = isinstance(message, self._lost) and not (isinstance(message, Status) and not message.is_ok)
        if self._kinds.get(request) == "lost" and is_one_to_lose and is_with_a_first_rank:
            self._tell(request, f"its {type(message).__name__} from {sender} to {peer} was lost", (TOO_LATE,))
            return 0
        return self._copies

    def _is_unheard(self, sender: str, peer: str, request: int, message: Message) -> bool:
        """The first answer of each kind is lost if it can be repeated."""
        key = (sender, peer, request, type(message))
        is_first = isinstance(message, ANSWERS) and key not in self._unheard
        if not self._has_losses or not is_first or request % FAULT_EVERY != (self._number + 2) % FAULT_EVERY:
            return False
        self._unheard.add(key)
        return True

    def _is_hit(self, peer: str, leg: str, ticket: Ticket, kind: str) -> bool:
        is_there = not self._is_partial or peer.endswith("-0")
        return leg == self._leg and is_there and self._kinds.get(ticket.request) == kind

    def tamper(self, message: Message) -> Message:
        if not isinstance(message, Want) or self._kinds.get(message.request) not in ("shorter", "longer"):
            return message
        leg, first, pages = message.runs[-1]
        longer = self._kinds[message.request] == "longer"
        changed = (*pages, max(pages, default=0) + 1) if longer else pages[:-1]
        why = f"its page list {leg} has the length {len(changed)}, where the prompt has {len(pages)} pages"
        # A window may begin elsewhere at the source, which then has another number of pages.
        held = "source has " if leg == "state.window" else f"source has {len(pages)} pages"
        self._tell(message.request, why, (f"target has {len(changed)} pages", held))
        return replace(message, runs=(*message.runs[:-1], (leg, first, changed)))

    def _tell(self, request: int, why: str, names: tuple[str, ...]) -> None:
        if request not in self._told:
            self._told.add(request)
            self._emit(Faulted(request, why, names))


class Aborts:
    def __init__(self, stage: str, faults: Faults) -> None:
        self.stage = stage
        self._faults = faults
        self._due: list[tuple[int, int]] = []
        self._round = 0
        self._spared: set[int] = set()

    def spare(self, request: int) -> None:
        self._spared.add(request)

    def __call__(self, report: StepReport) -> list[int]:
        self._round += 1
        if self.stage == "late":
            self._due += [(self._round + 1 + request % LATE_ROUNDS, request) for request in report.admitted]
            due = [request for at, request in self._due if at <= self._round]
            self._due = [each for each in self._due if each[0] > self._round]
        else:
            due = list(getattr(report, self.stage))
        return [
            each for each in due if each % ABORT_EVERY < 2 and not self._faults.has(each) and each not in self._spared
        ]


class RoomRetries:
    """Sends failed requests again, once each, in the room they failed in.

    delay: 0: at once, while the ends still hold memory of the first attempt; else some rounds later, for odd requests
    not before both ends have freed everything. None: never.
    """

    def __init__(self, faults: Faults, aborts: Aborts, delay: int | None, *, engine: Engine, emit: Emit) -> None:
        self._faults = faults
        self._aborts = aborts
        self._engine = engine
        self._emit = emit
        self._delay = delay
        self._due: dict[int, int] = {}  # request -> the round from which it may be sent
        self._sent: set[int] = set()
        self._round = 0

    @property
    def is_open(self) -> bool:
        return bool(self._due)

    def __call__(self, report: StepReport) -> list[int]:
        self._round += 1
        if self._delay is not None:
            failed = [request for request, _ in report.failed if request not in self._sent]
            self._due |= dict.fromkeys(failed, self._round + self._delay)
        states = self._states() if self._due else {}
        now = [
            request
            for request, at in self._due.items()
            if at <= self._round and (not self._delay or request % 2 == 0 or states[request] == "ended")
        ]
        for request in now:
            del self._due[request]
            self._sent.add(request)
            self._faults.end(request)
            self._aborts.spare(request)
            self._emit(Happened("request", states[request], "retry"))
        return now

    def _states(self) -> dict[int, str]:
        standings = self._engine.standings()
        return {each.name: each.state for each in standings if each.subject == "request" and isinstance(each.name, int)}


def room_of(request: int) -> int:
    return (0, (1 << 64) - 1)[request - 1] if request <= 2 else Rng(request).next_u64()


def prefill_sizes(sizes: PoolSizes, jobs: tuple[Job, ...], shape: ModelShape, *, is_tight: bool = False) -> PoolSizes:
    """Other numbers of pages and rows than at the decode end. is_tight: the longest prompt takes every page."""
    longest = max(job.prompt_tokens for job in jobs)
    pages = max(sizes.pages + 2, 2 * (longest // shape.page_size + 1)) | 1
    if is_tight:
        pages = pages_for(longest, shape.page_size)
    return replace(sizes, pages=pages, requests=sizes.requests + 2, max_tokens=sizes.max_tokens + 2)
