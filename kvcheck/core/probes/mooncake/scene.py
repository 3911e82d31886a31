"""Scene: writers, peers and their memory in one schedule, and the verdict on each write.

    word = owner:8 | generation:24 | place:32        place: the number of the word in its peer's region

An unwritten word is 0, and no write has generation 0.

Invariants:
- A write is judged by the bytes at its receiver: at its status, and until its place is written again.
- Bytes that differ at a status are compared again for SETTLE_S, to separate late bytes from lost ones.
- A failed write may have landed or not, and that is no finding here: its peer is no longer compared as a whole.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.rng import Rng
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.tally import ProbeTally
from kvcheck.core.probes.mooncake.agents import AgentLost, start_all, wait_until
from kvcheck.core.probes.mooncake.lanes import CallLane, EngineCall, Result
from kvcheck.core.probes.mooncake.memory import GUARD, MOST_PEERS, REGION, MappedMemory, Plane

SETTLE_S = 1.0
CALL_S = 90.0
"""Limit of calls to healthy peers. The library waits 61 s for a handshake."""
BLOCK = 64 << 10
SIZE_CLASSES = (
    ("64 B to 1 KiB", 64, 1 << 10),
    ("1 to 16 KiB", 1 << 10, 16 << 10),
    ("16 to 256 KiB", 16 << 10, 256 << 10),
    ("256 KiB to 2 MiB", 256 << 10, 2 << 20),
    ("2 to 8 MiB", 2 << 20, 8 << 20),
)
QUIET = {"MC_LOG_LEVEL": "ERROR", "MC_FORCE_TCP": "1"}

Writes = tuple[tuple[int, int], ...]
WORD = 8
MOST_GENERATIONS = 1 << 24
MOST_WORDS = 1 << 10
_LOW = 0 if sys.byteorder == "little" else 1


class WordPlaces:
    def __init__(self, region_bytes: int) -> None:
        self._places = array("I", range(region_bytes // WORD))

    def content(self, *, owner: int, generation: int, at: int, size: int) -> memoryview:
        assert at % WORD == 0 and 0 < generation < MOST_GENERATIONS and 0 < owner < 256
        first, count = at // WORD, -(-size // WORD)
        words = array("I", bytes(WORD * count))
        words[_LOW::2] = self._places[first : first + count]
        words[1 - _LOW :: 2] = array("I", [owner << 24 | generation]) * count
        return memoryview(words).cast("B")[:size]


@dataclass(frozen=True, slots=True)
class HeldWords:
    """Content of bytes, in words. wanted: of the expected owner and generation. older, newer: of other generations of
    that owner. unwritten: 0. strange: of no write."""

    words: int
    wanted: int = 0
    older: int = 0
    newer: int = 0
    foreign: int = 0
    misplaced: int = 0
    unwritten: int = 0
    strange: int = 0

    def text(self) -> str:
        parts = {
            "of this write": self.wanted,
            "of earlier writes": self.older,
            "of later writes": self.newer,
            "of another peer": self.foreign,
            "of another place": self.misplaced,
            "that nobody wrote": self.unwritten,
            "of no write": self.strange,
        }
        return (
            ", ".join(f"{count} {name}" for name, count in parts.items() if count)
            + f", of {self.words} words looked at"
        )


def generation_of(content: bytes) -> int:
    return array("I", content[:WORD])[1 - _LOW] & (MOST_GENERATIONS - 1)


def held(
    seen: bytes,
    *,
    owner: int,
    generation: int,
    at: int,
    owners: int,
    latest: int,
    before: bytes,
    after: bytes | None = None,
) -> HeldWords:
    """Classify the whole words of `seen`, which lies at `at`. owners, latest: highest owner and generation of any
    write.

    before: the former content. after: the written content; None: unchanged words are right, and only others are
    counted. A cut word has landed in part. Of many words about MOST_WORDS are classified.
    """
    count = len(seen) // WORD
    halves = array("I", seen[: count * WORD])
    counts = dict.fromkeys(("wanted", "older", "newer", "foreign", "misplaced", "unwritten", "strange"), 0)
    for number in range(0, count, max(1, count // MOST_WORDS)):
        start = number * WORD
        word, old = seen[start : start + WORD], before[start : start + WORD]
        if after is None and word == old:
            continue
        place, tag = halves[2 * number + _LOW], halves[2 * number + 1 - _LOW]
        kind = _kind(place, tag, at // WORD + number, owner, generation, owners, latest)
        if kind not in ("wanted", "unwritten") and after is not None:
            kind = "older" if word == old else "wanted" if _is_cut(word, old, after[start : start + WORD]) else kind
        counts[kind] += 1
    return HeldWords(sum(counts.values()), **counts)


def _is_cut(word: bytes, old: bytes, new: bytes) -> bool:
    return all(byte in pair for byte, *pair in zip(word, old, new, strict=True))


def _kind(place: int, tag: int, expected: int, owner: int, generation: int, owners: int, latest: int) -> str:
    if not place and not tag:
        return "unwritten"
    whose, when = tag >> 24, tag & (MOST_GENERATIONS - 1)
    if not (0 < whose <= owners and 0 < when <= latest):
        return "strange"
    if whose != owner:
        return "foreign"
    if place != expected:
        return "misplaced"
    return "wanted" if when == generation else "older" if when < generation else "newer"


def class_of(size: int) -> str:
    return next((name for name, _, most in SIZE_CLASSES if size <= most), SIZE_CLASSES[-1][0])


@dataclass(slots=True, kw_only=True)
class TransferRig:
    """Context of a probe in one schedule. variables: the engine's own, from the user."""

    subject: str
    schedule: int
    mix: Rng
    variables: dict[str, str]
    network: str | None
    tally: ProbeTally = field(default_factory=ProbeTally)


@dataclass(slots=True)
class WrongWrites:
    """Writes that contradict their status. tries: all writes that were reported done."""

    early: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    tries: int = 0
    calls: int = 0

    @property
    def told(self) -> int:
        return sum(map(len, (self.early, self.torn, self.lost, self.late, self.strange)))


class Scene:
    """writers, peers: numbers of processes. settings: variables for this probe; the user's replace them."""

    def __init__(
        self, rig: TransferRig, needs: Sequence[str], *, peers: int, writers: int = 1, settings: dict[str, str]
    ) -> None:
        assert 1 <= peers <= MOST_PEERS
        self.rig, self.memory, self.places = rig, MappedMemory(), WordPlaces(REGION)
        self.variables = {**QUIET, **settings, **rig.variables}
        self.generation = 0
        self.wrong = WrongWrites()
        self._tops = [GUARD] * peers
        self._unsettled: set[int] = set()
        names = [f"writer {number}" for number in range(writers)] + [f"peer {number}" for number in range(peers)]
        try:
            agents = start_all(
                names, network=rig.network, memory=self.memory, variables=self.variables, needs=("engine", *needs)
            )
        except CannotDrive:
            self.memory.close()
            raise
        self.writers, self.peers = agents[:writers], agents[writers:]
        try:
            self._register()
        except AgentLost as why:
            self.close()
            raise CannotDrive(f"{why}: registering memory") from why

    def _register(self) -> None:
        for number, peer in enumerate(self.peers):
            peer.register(Plane.TARGET, number, GUARD, REGION - 2 * GUARD)
            for writer in self.writers:
                writer.register(Plane.SOURCE, number, GUARD, REGION - 2 * GUARD)

    def close(self) -> None:
        for agent in (*self.writers, *self.peers):
            agent.close()
        self.memory.close()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(self, plane: Plane, peer: int, writes: Writes) -> int:
        self.generation += 1
        for at, size in writes:
            content = self.places.content(owner=peer + 1, generation=self.generation, at=at, size=size)
            self.memory.write(plane, peer, at, content)
        return self.generation

    def call(self, name: str, peer: int, writes: Writes, *, after: bool = False, note: str = "") -> EngineCall:
        self.fill(Plane.SOURCE, peer, writes)
        self._tops[peer] = max([self._tops[peer], *(at + size for at, size in writes)])
        addresses = tuple(self.peers[peer].address(Plane.TARGET, peer, at) for at, _ in writes)
        return EngineCall(name=name, writes=writes, addresses=addresses, after=after, note=note)

    def lane(self, peer: int, calls: Iterable[EngineCall]) -> CallLane:
        return CallLane(peer=peer, session=self.peers[peer].session, calls=tuple(calls))

    def run(self, lanes: Sequence[CallLane], writer: int = 0, within_s: float = CALL_S) -> list[list[Result]]:
        """Raises CannotDrive if a process is lost."""
        results = self.run_unjudged(lanes, writer, within_s)
        self.judge(lanes, results)
        return results

    def run_unjudged(self, lanes: Sequence[CallLane], writer: int = 0, within_s: float = CALL_S) -> list[list[Result]]:
        """Raises CannotDrive if a process is lost."""
        self.writers[writer].begin(lanes)
        try:
            return self.writers[writer].results(within_s)
        except AgentLost as why:
            raise CannotDrive(str(why)) from why

    def run_healthy(self, lanes: Sequence[CallLane], writer: int = 0) -> None:
        """Raises CannotDrive if a call fails."""
        for lane, results in zip(lanes, self.run(lanes, writer), strict=True):
            if failed := [result for result in results if not result.is_done]:
                code = failed[0].code
                raise CannotDrive(
                    f"a call to the healthy peer {lane.peer} returned {code} after {failed[0].took_s:.1f} s"
                )

    def judge(self, lanes: Sequence[CallLane], results: Sequence[Sequence[Result]]) -> None:
        for lane, of_lane in zip(lanes, results, strict=True):
            for call, result in zip(lane.calls, of_lane, strict=False):  # a lane ends at its first failure
                if result.is_done:
                    self._judge_call(lane, call, result)
                else:
                    self._unsettled.add(lane.peer)

    def _judge_call(self, lane: CallLane, call: EngineCall, result: Result) -> None:
        self.wrong.calls += 1
        self.wrong.tries += len(call.writes)
        self.rig.tally.count("transfers", len(call.writes))
        self.rig.tally.reads += 1
        until = time.monotonic() + SETTLE_S
        for number, (at, size) in enumerate(call.writes):
            self.count_words(size)
            if number in result.wrong:
                self._judge_wrong(lane.peer, call, at, size, until)
            # The present bytes are expected from now on: missing ones were reported above.
            plane = Plane.TARGET if number in result.wrong else Plane.SOURCE
            self.memory.copy(plane, Plane.EXPECTED, lane.peer, at, size)

    def count_words(self, size: int) -> None:
        words = self.rig.tally.words
        words[class_of(size)] = words.get(class_of(size), 0) + -(-size // WORD)

    def _judge_wrong(self, peer: int, call: EngineCall, at: int, size: int, until: float) -> None:
        """until: end of the settle time. The clock decides the kind of a finding, not its existence."""
        memory = self.memory
        left_s = max(0.0, until - time.monotonic())
        has_landed = wait_until(lambda: memory.is_equal(Plane.SOURCE, Plane.TARGET, peer, at, size), left_s)
        source = memory.read(Plane.SOURCE, peer, at, size)
        generation = generation_of(source)
        before = memory.read(Plane.EXPECTED, peer, at, size)
        seen = self.held(memory.read(Plane.SEEN, peer, at, size), peer, at, generation, before, source)
        text = (
            f"a write of {size} bytes by {call.name}, {len(call.writes)} in its call: {seen.text()} were at peer {peer}"
        )
        if seen.foreign or seen.misplaced or seen.strange:
            self.wrong.strange.append(text)
        elif not has_landed:
            now = self.held(memory.read(Plane.TARGET, peer, at, size), peer, at, generation, before, source)
            kind = self.wrong.torn if now.wanted else self.wrong.lost
            kind.append(f"{text}; {SETTLE_S:g} s later {now.text()}")
        elif 0 < seen.wanted < seen.words:
            self.wrong.torn.append(f"{text}; the rest came later")
        elif seen.wanted:
            self.wrong.early.append(f"{text}, and its end was not there at first")
        else:
            self.wrong.early.append(f"{text}; all of it came later")

    def held(
        self, seen: bytes, peer: int, at: int, generation: int, before: bytes, after: bytes | None = None
    ) -> HeldWords:
        return held(
            seen,
            owner=peer + 1,
            generation=generation,
            at=at,
            owners=len(self.peers),
            latest=self.generation,
            before=before,
            after=after,
        )

    def check_quiet(self, peers: Iterable[int] | None = None) -> None:
        """Add findings for bytes at the peers that changed without a reported write."""
        for peer in {*(range(len(self.peers)) if peers is None else peers)} - self._unsettled:
            end = min(REGION, self._tops[peer] + GUARD)
            if self.memory.is_equal(Plane.TARGET, Plane.EXPECTED, peer, 0, end):
                continue
            for at in range(0, end, BLOCK):
                size = min(BLOCK, end - at)
                if not self.memory.is_equal(Plane.TARGET, Plane.EXPECTED, peer, at, size):
                    self._judge_changed(peer, at, size)
                    self.memory.copy(Plane.TARGET, Plane.EXPECTED, peer, at, size)
                    break

    def _judge_changed(self, peer: int, at: int, size: int) -> None:
        seen = self.memory.read(Plane.TARGET, peer, at, size)
        found = self.held(seen, peer, at, self.generation, self.memory.read(Plane.EXPECTED, peer, at, size))
        text = f"peer {peer}, at {at} of its region, holds {found.text()}, which changed after all was reported done"
        (self.wrong.late if found.older + found.wanted + found.newer else self.wrong.strange).append(text)

    def require_landed(self) -> None:
        """Raise CannotDrive if bytes of a control write are lost or strange: the probe is then more likely wrong than
        the engine."""
        if astray := self.wrong.lost + self.wrong.strange:
            raise CannotDrive(f"the control case failed: {astray[0]}")
        self.wrong, self.rig.tally = WrongWrites(), ProbeTally(notes=self.rig.tally.notes)

    def strayed(self, peer: int, at: int, size: int) -> int:
        """Count changed bytes of a peer's region beside those at [at, at + size), and expect them all from now on.

        After a legal write that failed, its bytes may still come, and nothing is counted.
        """
        memory, count = self.memory, 0
        if 0 <= at <= REGION - size:
            memory.copy(Plane.TARGET, Plane.EXPECTED, peer, at, size)
        for start in range(0, REGION, BLOCK):
            if not memory.is_equal(Plane.TARGET, Plane.EXPECTED, peer, start, BLOCK):
                seen, held = (memory.read(plane, peer, start, BLOCK) for plane in (Plane.TARGET, Plane.EXPECTED))
                count += sum(one != other for one, other in zip(seen, held, strict=True))
                memory.copy(Plane.TARGET, Plane.EXPECTED, peer, start, BLOCK)
        return 0 if peer in self._unsettled else count

    def report(self) -> None:
        wrong, tally = self.wrong, self.rig.tally
        of_tries = f"of {wrong.tries} writes in {wrong.calls} calls that were reported done"
        for code, oracle, lane, texts, what in (
            ("KV203", "protocol", "early", wrong.early, "had not landed when the status arrived"),
            ("KV103", "content", "torn", wrong.torn, "had landed in part when the status arrived"),
            ("KV203", "protocol", "lost", wrong.lost, f"had not landed {SETTLE_S:g} s after the status"),
            ("KV203", "protocol", "late", wrong.late, "landed again after their status"),
            ("KV105", "content", "strange", wrong.strange, "changed words that are not theirs"),
        ):
            if texts:
                message = f"{len(texts)} {of_tries} {what}; the first: {texts[0]}"
                tally.find(code, oracle, message, lane=lane, tier="peer", buffer="region")


def spread(mix: Rng, sizes: Sequence[int], most: int = REGION - GUARD) -> Writes:
    writes, at = [], GUARD
    for size in sizes:
        at += WORD * mix.below(9)
        if at + size > most:
            break
        writes.append((at, size))
        at += -(-size // WORD) * WORD
    return tuple(writes)
