"""Rounds of the two ends of a pair at the edge: who is asked for, who is let in, and what an abort ends.

Invariants:
- Every call steps a scheduler of its own, between two ends on a pool of their own.
- A message may be delivered late, so every call polls both ends several times. The clock does not advance meanwhile.
"""

from __future__ import annotations

import torch

from kvcheck.core.base.paging import pages_for
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.scheduler.decode import ABORTED, DecodeScheduler
from kvcheck.core.cache.scheduler.prefill import PrefillScheduler
from kvcheck.core.cache.scheduler.request import SchedulerConfig
from kvcheck.core.cache.transfer.messages import Abort, Done, Drained, Message, Status, Want
from kvcheck.core.cache.transfer.receiver import FAILED, TRANSFERRING
from kvcheck.core.cache.transfer.sender import REFUSED, WANTED
from kvcheck.core.targets.misuse.call import Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.ends import PATIENCE, ROOM, Ends
from kvcheck.core.targets.misuse.rounds import ENOUGH, FIRST, SECOND, ZeroDecoder, deps, request
from kvcheck.core.targets.misuse.scene import ROWS, Scene

HEARD = 20
"""Polls after which an end has received every message that was sent to it."""
ENDED_WITHIN = 3
"""Rounds in which an aborted prompt that was never computed has to be reported."""


def _ends(scene: Scene) -> Ends:
    """Two ends on a pool of their own, of which request 1 has two pages and a row."""
    own = Scene(scene.parts, scene.shape)
    own.pool.close(own.two)
    own.pool.close(own.none)
    return Ends(own, slots=ROWS)


def _decode(ends: Ends, config: SchedulerConfig) -> DecodeScheduler:
    return ends.scene.parts.decode_scheduler(
        deps(ends.scene, ends.scene.pool), config, metadata=ends.slots, receiver=ends.receiver, room_of=int
    )


def _prefill(ends: Ends) -> PrefillScheduler:
    """It computes a page a round."""
    pool = ends.scene.pool
    config = SchedulerConfig(max_running=1, chunk_tokens=pool.page_size)
    slots = ends.metadata["prefill"]
    return PrefillScheduler(pool, slots, ZeroDecoder(pool), ends.sender, pool.backend, config, room_of=int)


def _most_coming(scene: Scene) -> bool:
    """With one prompt that may be on its way, a second one is not asked for."""
    scheduler = _decode(_ends(scene), SchedulerConfig(max_running=1, max_prefilling=1))
    for number in (FIRST, SECOND):
        scheduler.submit(request(number, 1))
    return scheduler.settle(scheduler.poll()).admitted == [FIRST]


def _sent_again(scene: Scene) -> bool:
    """A request that is sent again waits until no source writes for its earlier attempt, and is asked for then."""
    ends = _ends(scene)
    scheduler = _decode(ends, SchedulerConfig(max_running=1))
    scheduler.submit(request(FIRST, 1))
    scheduler.settle(scheduler.poll())
    is_ended = scheduler.abort(FIRST)
    scheduler.submit(request(FIRST, 1, attempt=1))
    early = scheduler.settle(scheduler.poll()).admitted
    admitted: list[int] = []
    for _ in range(2 * HEARD):  # the source hears of the abort, and says that it writes nothing
        ends.sender.poll()
        admitted += scheduler.settle(scheduler.poll()).admitted
    return is_ended and not early and admitted == [FIRST]


def _end_to_end(scene: Scene) -> bool:
    """A prompt of two chunks is computed at one end and ended at the other, which is given its metadata once."""
    ends = _ends(scene)
    decode, prefill = _decode(ends, SchedulerConfig(max_running=1)), _prefill(ends)
    decoder = decode.parts.decoder
    assert isinstance(decoder, ZeroDecoder)
    finished: list[tuple[int, tuple[int, ...]]] = []
    for each in (decode, prefill):
        each.submit(request(FIRST, scene.page + 1))
    for _ in range(ENOUGH + 3 * HEARD):  # it is asked for, reported and answered
        prefill.settle(prefill.poll())
        finished += decode.settle(decode.poll()).finished
    return finished == [(FIRST, (0,))] and decoder.joined == [FIRST] and decode.is_idle and prefill.is_idle


def _reason(scene: Scene) -> bool:
    """A prompt that the decode end aborts fails at the prefill end, and the reason is told there."""
    ends = _ends(scene)
    scheduler = _decode(ends, SchedulerConfig(max_running=1))
    ends.sender.open(FIRST, FIRST, 1)
    scheduler.submit(request(FIRST, 1))
    scheduler.settle(scheduler.poll())
    is_ended = scheduler.abort(FIRST)
    _hear(ends)
    return is_ended and ends.sender.reason(FIRST) == ABORTED


def _marked(scene: Scene) -> bool:
    """Before a room is asked for, its memory is filled with other words than it held."""
    ends = _ends(scene)
    pool, slots = ends.scene.pool, ends.slots
    held, slot = pool.open(FIRST), slots.lease(FIRST)
    assert held is not None and slot is not None and pool.grow(held, 1, query=0)
    rows = pool.extent(held, 1)
    words = [
        (owned.write_view(buffer.name), torch.from_numpy(rows.rows(space, buffer)))
        for space, owned in pool.sets.items()
        for buffer in owned.spec.buffers
    ]
    old = [view[:, at].clone() for view, at in words]
    ends.receiver.expect(FIRST, held, 1, slot)
    return all(bool((view[:, at] != before).all()) for (view, at), before in zip(words, old, strict=True))


def _stranger(scene: Scene) -> bool:
    """What a rank says that is no peer of this end counts for nothing."""
    ends = _ends(scene)
    stranger = ends.fabric.end(ScopedBackend(ends.scene.backend, "another-0"))
    generation = ends.room.ticket.generation
    for name in (ends.layouts["decode"].name, ends.layouts["prefill"].name):
        stranger.send(name, Status(room=ROOM, generation=generation, is_ok=False, reason="misused"))
        stranger.send(name, Abort(room=ROOM, attempt=0, generation=generation, reason="misused"))
        stranger.send(name, Drained(room=ROOM, generation=generation))
    _hear(ends)
    return ends.room.status == TRANSFERRING and bool(ends.room.writers) and not ends.sender.reason(ROOM)


def _hear(ends: Ends) -> None:
    """Poll both ends until every message has been received, also one that is delivered late."""
    for _ in range(HEARD):
        ends.receiver.poll()
        ends.sender.poll()


def _ask(ends: Ends, number: int, tokens: int, *, first: int = 1) -> None:
    """The decode rank asks for a prompt into its pages from `first` on."""
    pages = tuple(range(first, first + pages_for(tokens, ends.scene.page)))
    want = Want(
        room=number,
        attempt=0,
        generation=number,
        request=number,
        tokens=tokens,
        slot=0,
        state_slot=0,
        runs=(("kv.full", 0, pages),),
    )
    ends.wires["decode"].send(ends.layouts["prefill"].name, want)
    _hear(ends)


def _say(ends: Ends, message: Message) -> None:
    """The decode rank says something to the prefill rank."""
    ends.wires["decode"].send(ends.layouts["prefill"].name, message)
    _hear(ends)


def _asked_early(scene: Scene) -> bool:
    """A room that was asked for before it is opened is wanted at once, and given up when its patience is over."""
    ends = _ends(scene)
    _ask(ends, FIRST, 1)
    is_told = ends.sender.unopened == [FIRST]
    ends.sender.open(FIRST, FIRST, 1)
    is_wanted = ends.sender.readiness(FIRST) == WANTED and not ends.sender.unopened
    ends.now += PATIENCE
    ends.sender.poll()
    return is_told and is_wanted and ends.sender.readiness(FIRST) == REFUSED


def _aborted_early(scene: Scene) -> bool:
    """A room that was asked for and aborted before it is opened is refused, and nobody waits for it."""
    ends = _ends(scene)
    _ask(ends, FIRST, 1)
    _say(ends, Abort(room=FIRST, attempt=0, generation=FIRST, reason="misused"))
    is_over = not ends.sender.unopened
    ends.sender.open(FIRST, FIRST, 1)
    return is_over and ends.sender.reason(FIRST) == "misused"


def _refused_early(scene: Scene) -> bool:
    """A room that was asked for and is refused before it is opened has failed at the decode end, and is drained."""
    ends = _ends(scene)
    pool, slots = ends.scene.pool, ends.slots
    held, slot = pool.open(FIRST), slots.lease(FIRST)
    assert held is not None and slot is not None and pool.grow(held, 1, query=0)
    room = ends.receiver.expect(FIRST, held, 1, slot)
    _hear(ends)
    ends.sender.refuse(FIRST, 0, "misused")
    _hear(ends)
    return room.status == FAILED and not room.writers


def _other_length(scene: Scene) -> bool:
    """Of a prompt that has another length at the decode end, nothing is sent."""
    ends = _ends(scene)
    pool, held = ends.scene.pool, ends.scene.one
    free = max(held.pages.tolist()) + 1
    rows = pool.extent(held, 1)
    views = []
    for buffer in pool.sets["full"].spec.buffers:
        view = pool.sets["full"].write_view(buffer.name)
        view[:, torch.from_numpy(rows.rows("full", buffer))] = 1
        views.append((view, view.clone()))
    ends.sender.open(FIRST, held.request, 2)
    ends.sender.begin(FIRST, held)
    _ask(ends, FIRST, 1, first=free)
    ends.sender.send_pages(FIRST, 2, ends.backends["prefill"].signal())
    return ends.sender.readiness(FIRST) == REFUSED and all(torch.equal(view, before) for view, before in views)


def _not_taken(scene: Scene) -> bool:
    """A room whose decode rank could not take it has failed, for the reason that the rank gives."""
    ends = _ends(scene)
    ends.sender.open(FIRST, FIRST, 1)
    _ask(ends, FIRST, 1)
    _say(ends, Done(room=FIRST, generation=FIRST, is_ok=False, reason="misused"))
    return ends.sender.reason(FIRST) == "misused"


def _wanted(ends: Ends, scheduler: PrefillScheduler, *tokens: int) -> list[int]:
    """Which of some prompts of so many tokens are let in, in the round in which all of them are wanted."""
    for number, count in enumerate(tokens, FIRST):
        scheduler.submit(request(number, count))
        _ask(ends, number, count)
    return scheduler.settle(scheduler.poll()).admitted


def _too_many(scene: Scene) -> bool:
    """Of five free pages, a prompt under way keeps the last one of its three, so another one of three waits."""
    ends = _ends(scene)
    return _wanted(ends, _prefill(ends), 2 * scene.page + 1, 2 * scene.page + 1) == [FIRST]


def _just_enough(scene: Scene) -> bool:
    """Of five free pages, a prompt under way needs three, so another one of two goes beside it."""
    ends = _ends(scene)
    return _wanted(ends, _prefill(ends), 2 * scene.page + 1, 2 * scene.page) == [FIRST, SECOND]


def _abort_unwanted(scene: Scene) -> bool:
    """A prompt that waits for its decode ranks is ended by an abort, and reported as failed."""
    scheduler = _prefill(_ends(scene))
    scheduler.submit(request(FIRST, 1))
    is_ended = scheduler.abort(FIRST)
    reports = [scheduler.settle(scheduler.poll()) for _ in range(ENDED_WITHIN)]
    return is_ended and [number for each in reports for number, _ in each.failed] == [FIRST] and scheduler.is_idle


PAIR: tuple[Misuse[Scene], ...] = (
    Misuse("a prompt from end to end", None, _end_to_end),
    Misuse("one prompt more than may be on its way", None, _most_coming),
    Misuse("a request that is sent again while it is drained", None, _sent_again),
    Misuse("a prompt that does not fit beside one under way", None, _too_many),
    Misuse("a prompt that just fits beside one under way", None, _just_enough),
    Misuse("abort of a prompt that nobody has asked for", None, _abort_unwanted),
    Misuse("the reason of an abort at the other end", None, _reason),
    Misuse("open of a room that is asked for", None, _asked_early),
    Misuse("open of a room that was aborted", None, _aborted_early),
    Misuse("a room that a decode rank could not take", None, _not_taken),
    Misuse("refusal of a room that is asked for", None, _refused_early),
    Misuse("a prompt that has another length at the other end", None, _other_length),
    Misuse("the memory of a room that is asked for", None, _marked),
    Misuse("messages of a rank that is no peer", None, _stranger),
)


def pair_attempts(scene: Scene) -> list[Attempt]:
    """Of the schedulers at both ends."""
    return on_each(PAIR, scene, Scene.kept)
